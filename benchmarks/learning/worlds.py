"""Worlds with programs as judges: imitation of a few solutions, then GRPO.

Each world has a file with its settings beside this one: `model`, `common`, and the
stages `warmup`, `grpo` and, where it is measured, `imitation`, which continues to
imitate the demonstrations of the warm-up instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning.experiment import Curve, Experiment, train, with_model
from benchmarks.learning.programs import ProgramTasks
from rl_algorithms import KeptWorkers
from rl_distributed import load_config
from rl_distributed.config import merge_configs
from rl_envs.registry import task_registry
from rl_models import build_model
from rl_models.build.model import ModelBuildConfig

__all__ = ["WORLDS", "World"]

_REJECTED = "val:env/second_check_rejected_rate"


class World:
    """The recipe of a world.

    Args:
        name: Name of its file, without the suffix.
        changes: Settings to change, for a shorter run.
    """

    def __init__(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        # Here and not on import, which would change the names of all task sources even
        # when the worlds are only listed.
        if "programs" not in task_registry:
            task_registry.register("programs")(ProgramTasks)
        path = Path(__file__).with_name(f"{name}.yaml")
        self._recipe = merge_configs(load_config(path), changes or {})

    def stage(self, name: str) -> dict[str, Any]:
        """Return the settings of a stage, without its algorithm."""
        common, stages = self._recipe["common"], self._recipe["stages"]
        stage = dict(merge_configs(common, stages[name]))
        del stage["algorithm"]
        return stage

    def run(self, folder: Path, seed: int, pool: KeptWorkers) -> Curve:
        """Return the held-out accuracy over the steps of GRPO.

        The curve also has the share of correct answers that the second check rejects,
        and the result of imitation alone from the same weights.
        """
        model = folder / "random"
        build_model(ModelBuildConfig.from_dict(self._recipe["model"]), model, seed=seed)
        warmup = with_model(self.stage("warmup"), model)
        begun = train("sft", warmup, folder / "warmup", seed, pool).model_path
        assert begun is not None
        start = Path(begun)
        settings = with_model(self.stage("grpo"), start)
        history = train("grpo", settings, folder / "run", seed, pool).history
        steps, values = history.column("val:accuracy")
        levels = {}
        if "imitation" in self._recipe["stages"]:
            control = with_model(self.stage("imitation"), start)
            result = train("sft", control, folder / "imitation", seed, pool)
            levels["imitation alone"] = result.metrics["val:accuracy"]
        return Curve(steps, values, levels, history.column(_REJECTED)[1])


def _experiment(name: str, title: str, label: str) -> Experiment:
    def run(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
        return World(name).run(folder, seed, pool)

    return Experiment(title, label, run, "grpo")


WORLDS: dict[str, Experiment] = {
    "countdown": _experiment(
        "countdown", "GRPO on countdown, three numbers", "held-out accuracy"
    ),
    "reasoning_gym": _experiment(
        "reasoning_gym", "GRPO on spell_backward of Reasoning Gym", "held-out accuracy"
    ),
    "code": _experiment(
        "code", "GRPO on small programs in the sandbox", "held-out programs right"
    ),
    "sliding_puzzle": _experiment(
        "sliding_puzzle",
        "GRPO on the sliding puzzle, up to 16 turns",
        "held-out boards solved",
    ),
}
