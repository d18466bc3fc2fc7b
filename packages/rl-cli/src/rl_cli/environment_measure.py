"""Measuring a model on an environment, as in `rl envs run`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.evaluation import EvalConfig
from rl_cli.environment_choice import GivenTasks, choose_environment
from rl_distributed.errors import ConfigError

if TYPE_CHECKING:
    from rl_algorithms.evaluation import DatasetEvaluation
    from rl_envs.interfaces import EnvironmentInterface

__all__ = ["Measurement", "measure"]

_TURNS = 10


@dataclass(frozen=True)
class Measurement:
    """Results of a model on tasks of an environment."""

    model: str
    """Name of the model."""
    found: DatasetEvaluation
    """Metrics and conversations."""
    time_s: float
    """Seconds from the first prompt to the last reward."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON value without the conversations."""
        metrics = {
            # JSON has no NaN.
            name: value if value == value else None
            for name, value in self._metrics().items()
        }
        return {
            "model": self.model,
            "num_tasks": self.found.num_prompts,
            "num_generations": self.found.num_generations,
            "metrics": metrics,
        }

    def rows(self) -> list[tuple[Any, ...]]:
        """Return rows of a table: metric, value, and its confidence interval."""
        metrics = self._metrics()
        rows: list[tuple[Any, ...]] = [
            ("tasks", str(self.found.num_prompts), "", ""),
            ("answers per task", str(self.found.num_generations), "", ""),
        ]
        for name, value in metrics.items():
            if name.endswith(("_low", "_high")) or name.startswith("cons@"):
                continue
            ends = [metrics.get(f"{name}_{end}") for end in ("low", "high")]
            low, high = ("" if end is None else f"{end:.3g}" for end in ends)
            rows.append((name, f"{value:.4g}", low, high))
        return rows

    def save(self, path: Path) -> None:
        """Write the conversations as JSON lines, creating the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(s, ensure_ascii=False) for s in self.found.samples)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _metrics(self) -> dict[str, float]:
        samples = self.found.samples
        chars = sum(len(sample["response"]) for sample in samples) / len(samples)
        return {
            **self.found.metrics,
            "mean_response_chars": chars,
            "time_s": self.time_s,
            # A clock may not have moved.
            "answers_per_s": len(samples) / max(self.time_s, 1e-9),
        }


def measure(
    environment: str, overrides: Sequence[str], options: Mapping[str, Any]
) -> Measurement:
    """Measure a model folder or a server.

    Args:
        environment: Name for `choose_environment`.
        overrides: Overrides for `choose_environment`.
        options: Options of the command, by name.

    Raises:
        UserError: An option, the environment, the tasks or the model is wrong.
        GenerationError: The server does not answer.
    """
    address, model = options["address"], options["model"]
    _check_who(options)
    chosen = choose_environment(
        environment,
        config=options["config"],
        overrides=overrides,
        world=options["world"],
        data=options["data"],
        prompt_column=options["prompt_column"],
    )
    tasks = chosen.held_out(options["num_tasks"], options["seed"], unique=True)
    env = chosen.spec.make()
    try:
        config = _eval_config(options, env)
        if address is not None:
            return _of_address(options, env, tasks, config)
        return _of_folder(model, env, tasks.rows, config)
    finally:
        env.shutdown()


def _check_who(options: Mapping[str, Any]) -> None:
    address, model = options["address"], options["model"]
    if (address is None) == (model is None):
        raise ConfigError("give either --model or --address, to choose what answers")
    if address is not None and options["served_model"] is None:
        raise ConfigError(
            "--address needs --served-model, the server's name of the model"
        )
    for name in ("served_model", "key_file"):
        if address is None and options[name] is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} requires --address")


def _eval_config(
    options: Mapping[str, Any], env: EnvironmentInterface[Any]
) -> EvalConfig:
    turns = options["max_turns"] or (1 if env.many_turns is False else _TURNS)
    settings = {
        "num_generations": options["num_generations"],
        "seed": options["seed"],
        "max_rollout_turns": turns,
        "pass_threshold": options["full_reward"],
        "greedy": False,
        "generation": {
            "max_new_tokens": options["max_new_tokens"],
            "temperature": options["temperature"],
        },
        "data": {"input_key": options["prompt_column"]},
    }
    return EvalConfig.from_dict(settings, source="the command line")


def _of_folder(
    model: str,
    env: EnvironmentInterface[Any],
    rows: Sequence[dict[str, Any]],
    config: EvalConfig,
) -> Measurement:
    from rl_algorithms.evaluation import find_target  # noqa: PLC0415
    from rl_cli.trained_model import model_of_run  # noqa: PLC0415
    from rl_distributed.logs import configure_logging  # noqa: PLC0415
    from rl_models.checkpoint.model_folder import check_model_folder  # noqa: PLC0415

    configure_logging("warning")
    folder = model_of_run(model)
    check_model_folder(find_target(folder).model)
    # Imported last, which takes seconds: mistakes are reported at once.
    from rl_algorithms.evaluation import evaluate  # noqa: PLC0415

    began = time.perf_counter()
    result = evaluate(folder, list(rows), environment=env, config=config)
    (found,) = result.datasets.values()
    return Measurement(model, found, time.perf_counter() - began)


def _of_address(
    options: Mapping[str, Any],
    env: EnvironmentInterface[Any],
    tasks: GivenTasks,
    config: EvalConfig,
) -> Measurement:
    from rl_cli.chat_server import ChatServer  # noqa: PLC0415
    from rl_cli.environment_run import measure_address  # noqa: PLC0415
    from rl_distributed.extras import leave_torch_out  # noqa: PLC0415
    from rl_envs.agents.tasks import AgentHost  # noqa: PLC0415

    # Nothing here needs torch, whose import takes seconds.
    leave_torch_out()
    server = ChatServer(
        options["address"],
        options["served_model"],
        key=_key_of(options["key_file"]),
        temperature=options["temperature"],
        max_new_tokens=options["max_new_tokens"],
        deadline_s=options["deadline_s"],
    )
    began = time.perf_counter()
    if isinstance(env, AgentHost) and env.agent_limits is not None:
        from rl_cli.agent_run import measure_agents  # noqa: PLC0415

        found = measure_agents(server, env, tasks, config)
    else:
        found = measure_address(server, env, tasks, config)
    return Measurement(options["served_model"], found, time.perf_counter() - began)


def _key_of(file: Path | None) -> str | None:
    """Read a key from a file; the key itself never appears in a message."""
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file} cannot be read: {error}") from error
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(f"--key-file {file} must contain one key and nothing else")
    return key
