"""Train small models by each method and draw what they learn.

    python -m benchmarks.learning grpo dapo --seeds 1 2 3

Each NAME is trained once per seed, in minutes on two cores. The curves of held-out data
go to `docs/assets/learning/NAME.json`, and `docs/assets/learning-NAME.png` is drawn of
them; `--draw-only` draws what was measured before. Seeds that were measured before stay
in the file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rl_algorithms import TrainResult, WorkerPool, get_algorithm
from rl_algorithms.api import algorithm_settings
from rl_algorithms.data.config import DatasetConfig, TasksConfig
from rl_algorithms.data.sources import load_configured
from rl_algorithms.evaluation import evaluate
from rl_algorithms.presets import find_preset
from rl_distributed import load_config, merge_configs
from rl_models import build_model
from rl_models.modelbuild import ModelBuildConfig

NUM_STEPS = 120
ASSETS = Path(__file__).parents[1] / "docs" / "assets"


@dataclass(frozen=True)
class Curve:
    """One run: a number over the steps, and levels to compare it with."""

    steps: list[int]
    values: list[float]
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines by label, for example what the teacher reaches."""


@dataclass(frozen=True)
class Experiment:
    """A method on its small task."""

    title: str
    label: str
    """What the curve shows."""
    run: Callable[[Path, int, WorkerPool], Curve]
    """Trains in an empty folder with a seed, in the processes of a pool."""


def train(
    algorithm: str,
    settings: Mapping[str, Any],
    folder: Path,
    seed: int,
    pool: WorkerPool,
) -> TrainResult:
    """Train once by an algorithm or preset; the data sets come from the settings."""
    cls = get_algorithm(algorithm)
    own = {"output_dir": str(folder), "seed": seed}
    tree = algorithm_settings(algorithm, merge_configs(settings, own))
    trainer = cls(cls.config_class.from_dict(tree, source=algorithm), pool=pool)
    return trainer.fit()


def curve_of(result: TrainResult, metric: str, **levels: float) -> Curve:
    """Return a metric of a run's history."""
    steps, values = result.history.column(metric)
    return Curve(steps, values, levels)


def with_model(settings: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Return settings that train this model."""
    return dict(merge_configs(settings, {"policy": {"model_name": str(model)}}))


class Sorting:
    """The task of the quickstart: sort six digits, begun by imitation.

    All methods begin with the same weights for the same seed: those of a model that
    imitated 120 demonstrations, and sorts about a third of the held-out digits.
    """

    recipe: Mapping[str, Any] = load_config(
        Path(str(resources.files("rl_cli") / "recipes" / "quickstart.yaml"))
    )

    @classmethod
    def stage(cls, name: str) -> dict[str, Any]:
        """Return the settings of a stage of the recipe."""
        stage = dict(merge_configs(cls.recipe["common"], cls.recipe["stages"][name]))
        del stage["algorithm"]
        return stage

    @classmethod
    def start(cls, folder: Path, seed: int, pool: WorkerPool) -> Path:
        """Return the model that imitated."""
        model = folder / "random"
        build_model(ModelBuildConfig.from_dict(cls.recipe["model"]), model, seed=seed)
        settings = with_model(cls.stage("warmup"), model)
        result = train("sft", settings, folder / "warmup", seed, pool)
        assert result.model_path is not None
        return Path(result.model_path)

    @classmethod
    def sampling(cls, num_generations: int = 4) -> dict[str, Any]:
        """Return what all methods that sample have in common: 512 answers a step."""
        shared = {
            "num_prompts_per_step": 512 // num_generations,
            "num_generations_per_prompt": num_generations,
            "max_num_steps": NUM_STEPS,
            "max_num_epochs": None,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
        }
        stage = cls.stage("grpo")
        schedule = {"kwargs": {"total_steps": NUM_STEPS}}
        kept = {name: stage[name] for name in ("policy", "data", "env", "cluster")}
        changes = {
            "policy": {"scheduler": schedule},
            "checkpointing": {"enabled": False},
            "grpo": shared,
        }
        return dict(merge_configs(kept, changes))


def on_sorting(
    algorithm: str, title: str, num_generations: int = 4, **changes: Any
) -> Experiment:
    """Return the experiment of a member of the GRPO family on the sorting task."""

    def run(folder: Path, seed: int, pool: WorkerPool) -> Curve:
        start = Sorting.start(folder / "start", seed, pool)
        settings = merge_configs(Sorting.sampling(num_generations), changes)
        result = train(
            algorithm, with_model(settings, start), folder / "run", seed, pool
        )
        return curve_of(result, "val:accuracy")

    return Experiment(title, "held-out accuracy", run)


def preferences(folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """Return the data of pairs: the right answer, and a wrong one of the model's."""
    files = {}
    for part, num_rows in (("train", 2048), ("held_out", 512)):
        tasks = {"world": "sorting", "part": part, "num_rows": num_rows}
        found = evaluate(
            model,
            config={
                "datasets": {part: {"tasks": {**tasks, "settings": {"num_digits": 6}}}},
                "env": {"name": "sorting"},
                "generation": {"max_new_tokens": 8},
                "num_generations": 4,
                "seed": seed,
            },
        )
        pairs: dict[int, dict[str, str]] = {}
        for sample in found.samples:
            right = "".join(sorted(sample["prompt"].removesuffix("=")))
            if sample["response"].strip() not in ("", right):
                answers = {"chosen": right, "rejected": sample["response"]}
                pairs.setdefault(sample["idx"], {"prompt": sample["prompt"], **answers})
        files[part] = folder / f"{part}.jsonl"
        lines = "\n".join(json.dumps(pair) for pair in pairs.values())
        files[part].write_text(lines)
    return {"train": str(files["train"]), "validation": str(files["held_out"])}


def dpo(folder: Path, seed: int, pool: WorkerPool) -> Curve:
    """Prefer right answers to wrong ones, beginning with the model that imitated."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = {
        "policy": {
            **Sorting.stage("grpo")["policy"],
            "train_global_batch_size": 128,
            "train_micro_batch_size": 256,
            "optimizer": {"kwargs": {"lr": 5e-4, "betas": [0.9, 0.99]}},
            "scheduler": {"warmup_steps": 10},
            "generation": None,
        },
        "data": preferences(folder, start, seed),
        "dpo": {
            "max_num_epochs": None,
            "max_num_steps": NUM_STEPS,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
            "val_global_batch_size": 512,
            "val_batches": None,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.1},
        "checkpointing": {"enabled": False},
    }
    result = train("dpo", with_model(settings, start), folder / "run", seed, pool)
    return curve_of(result, "val:policy_accuracy")


def distillation(folder: Path, seed: int, pool: WorkerPool) -> Curve:
    """Learn from a model that saw many demonstrations, beginning with one that saw few.

    The student practises on prompts that neither has seen.
    """
    start = Sorting.start(folder / "start", seed, pool)
    changes = {
        "policy": {"model_name": str(folder / "start" / "random")},
        "data": {"train": {"tasks": {"num_rows": 12000}}},
        "sft": {
            "max_num_steps": 800,
            "val_period": 50,
            "stop_at_validation_threshold": 0.95,
        },
        "checkpointing": {"save_period": 800},
    }
    lesson = merge_configs(Sorting.stage("warmup"), changes)
    taught = train("sft", lesson, folder / "teacher", seed, pool)
    settings = Sorting.sampling(num_generations=1)
    settings["distillation"] = settings.pop("grpo")
    settings = merge_configs(
        with_model(settings, start),
        {
            "teacher": {"model_name": str(taught.model_path)},
            "distillation": {"topk_logits_k": 8},
            "loss_fn": {"kl_type": "reverse", "bucket_outside_topk": True},
        },
    )
    result = train("distillation", settings, folder / "run", seed, pool)
    return curve_of(result, "val:accuracy", teacher=taught.metrics["val:accuracy"])


def ppo(folder: Path, seed: int, pool: WorkerPool) -> Curve:
    """Sort better by what a critic says of each token; both begin with one model."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = Sorting.sampling()
    settings["ppo"] = settings.pop("grpo")
    passes, rows = 2, 256
    num_updates = NUM_STEPS * passes * 512 // rows
    changes = {
        "policy": {
            "train_global_batch_size": rows,
            "optimizer": {"kwargs": {"lr": 1e-3}},
            "scheduler": {"kwargs": {"total_steps": num_updates}},
        },
        "critic": {"optimizer": {"kwargs": {"lr": 2e-3}}},
        "ppo": {"ppo_epochs": passes, "critic_warmup_steps": 4},
    }
    settings = merge_configs(with_model(settings, start), changes)
    return curve_of(train("ppo", settings, folder / "run", seed, pool), "val:accuracy")


def orders(folder: Path, seed: int) -> dict[str, Any]:
    """Return the data of pairs: the digits in their order, and in any other one."""
    rng = random.Random(seed)
    files = {}
    for part, num_rows in (("train", 4096), ("held_out", 512)):
        tasks = TasksConfig(
            world="sorting", part=part, num_rows=num_rows, settings={"num_digits": 6}
        )
        rows, _ = load_configured(DatasetConfig(tasks=tasks))
        lines = []
        for row in rows:
            right = sorted(row["prompt"].removesuffix("="))
            wrong = rng.sample(right, len(right))
            if wrong != right:
                pair = {"chosen": "".join(right), "rejected": "".join(wrong)}
                lines.append(json.dumps({"prompt": row["prompt"], **pair}))
        files[part] = folder / f"{part}.jsonl"
        files[part].write_text("\n".join(lines))
    return {"train": str(files["train"]), "validation": str(files["held_out"])}


def reward_model(folder: Path, seed: int, pool: WorkerPool) -> Curve:
    """Tell digits in their order from digits in another one."""
    start = Sorting.start(folder / "start", seed, pool)
    settings = {
        "policy": {
            "max_total_sequence_length": 16,
            "train_global_batch_size": 128,
            "train_micro_batch_size": 256,
            "optimizer": {"kwargs": {"lr": 2e-3, "betas": [0.9, 0.99]}},
            "scheduler": {"warmup_steps": 10},
        },
        "data": orders(folder, seed),
        "rm": {
            "max_num_epochs": None,
            "max_num_steps": NUM_STEPS,
            "val_period": NUM_STEPS // 10,
            "val_at_start": True,
            "val_at_end": True,
            "val_global_batch_size": 512,
            "val_batches": None,
        },
        "checkpointing": {"enabled": False},
    }
    result = train("rm", with_model(settings, start), folder / "run", seed, pool)
    return curve_of(result, "val:accuracy")


EXPERIMENTS: dict[str, Experiment] = {
    "grpo": on_sorting(
        "grpo",
        "GRPO",
        grpo={"drop_zero_variance_groups": True},
        loss_fn={"reference_policy_kl_penalty": 0.0},
    ),
    # The answer and its end take seven of the eight tokens, of which none is too many.
    "dapo": on_sorting(
        "dapo",
        "DAPO",
        grpo={
            "reward_shaping": {"overlong_buffer_fraction": 0.125},
            "dynamic_sampling_max_gen_batches": 20,
        },
    ),
    "drgrpo": on_sorting("drgrpo", "Dr. GRPO"),
    # Their ratios say something only where a batch is used for several steps.
    "gspo": on_sorting("gspo", "GSPO", policy={"train_global_batch_size": 128}),
    "cispo": on_sorting("cispo", "CISPO", policy={"train_global_batch_size": 128}),
    "rloo": on_sorting("rloo", "RLOO"),
    "reinforce_plus_plus": on_sorting(
        "reinforce_plus_plus", "REINFORCE++", num_generations=1
    ),
    "ppo": Experiment("PPO", "held-out accuracy", ppo),
    "rm": Experiment("Reward model", "held-out pairs in the right order", reward_model),
    "dpo": Experiment("DPO", "held-out pairs in the right order", dpo),
    "distillation": Experiment(
        "On-policy distillation", "held-out accuracy", distillation
    ),
}


def measure(name: str, seeds: list[int], path: Path) -> None:
    """Train by one method once per seed, and write each run down when it has ended."""
    experiment = EXPERIMENTS[name]
    preset = find_preset(name)
    record: dict[str, Any] = {
        "name": name,
        "title": experiment.title,
        "label": experiment.label,
        "algorithm": preset.algorithm if preset is not None else name,
        "seeds": json.loads(path.read_text())["seeds"] if path.exists() else {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            began_s = time.monotonic()
            curve = experiment.run(Path(folder) / str(seed), seed, pool)
            record["seeds"][str(seed)] = {
                "steps": curve.steps,
                "values": curve.values,
                "levels": dict(curve.levels),
                "wall_s": round(time.monotonic() - began_s, 1),
            }
            print(name, seed, json.dumps(record["seeds"][str(seed)]), flush=True)
            record["seeds"] = dict(sorted(record["seeds"].items()))
            path.write_text(json.dumps(record, indent=1) + "\n")


def draw(record: Mapping[str, Any], target: Path) -> None:
    """Draw a line per seed, their mean, and the levels."""
    figure = Figure(figsize=(7, 3.6), dpi=120, layout="tight")
    axes = figure.subplots()
    runs = list(record["seeds"].values())
    label: str | None = f"seeds {', '.join(record['seeds'])}"
    for run in runs:
        axes.plot(
            run["steps"], run["values"], "C0", alpha=0.45, linewidth=1.2, label=label
        )
        label = None
    if len({tuple(run["steps"]) for run in runs}) == 1 and len(runs) > 1:
        columns = zip(*(run["values"] for run in runs), strict=True)
        mean = [sum(column) / len(runs) for column in columns]
        axes.plot(runs[0]["steps"], mean, color="C0", linewidth=2.5, label="mean")
    for number, label in enumerate(runs[0]["levels"]):
        level = sum(run["levels"][label] for run in runs) / len(runs)
        axes.axhline(level, color=f"C{number + 1}", linestyle="--", label=label)
    axes.set_title(record["title"])
    axes.set_xlabel("training step")
    axes.set_ylabel(record["label"])
    if all(0 <= value <= 1 for run in runs for value in run["values"]):
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target)


def main() -> None:
    """Measure and draw the named experiments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(EXPERIMENTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="file; default see above")
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        path = options.out or ASSETS / "learning" / f"{name}.json"
        if not options.draw_only:
            measure(name, options.seeds, path)
        picture = path.with_suffix(".png")
        if options.out is None:
            picture = ASSETS / f"learning-{name}.png"
        draw(json.loads(path.read_text()), picture)


if __name__ == "__main__":
    main()
