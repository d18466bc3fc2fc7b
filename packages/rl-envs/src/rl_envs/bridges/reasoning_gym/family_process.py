"""One process that makes and scores tasks of Reasoning Gym.

Requests have `do`: `list` names the families, `levels` describes a curriculum, `make`
makes a task and `score` scores an answer to it. The last three have `task`: `family`,
`level`, `levels` and `settings`; the last two also its `seed`. A task is rebuilt from
these where it is scored, because scorers want objects that no data set can hold.

Several scorers evaluate answers as Python (`eval`, or sympy's `parse_expr`, which does
the same). Answers are written by a model: here they may hold literals, or formulas of
known names, and nothing else is evaluated.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["answer"]

_MEMORY_BYTES = 4 << 30
_PROBES = (11, 12, 1_000_003)
# Scorers of these call `eval` with what a model wrote.
_EVALUATING = (
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
# These have imported `parse_expr` by its name; others take it from sympy.
_PARSING = ("games.countdown", "games.puzzle24")
_FORMULA = re.compile(r"[\w\s+\-*/^(),.|!]*", re.ASCII)
_ATTRIBUTE = re.compile(r"[^\W\d]\w*\s*\.|\.\s*[^\W\d]|\)\s*\.", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_FUNCTIONS = frozenset(
    [
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "abs", "Abs"),
        *("erf", "Si", "Ci", "Ei", "li", "pi"),
    ]
)
# They need settings that hold other families.
_NOT_OFFERED = frozenset({"composite"})


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a request."""
    families, curricula = _loaded()
    if request["do"] == "list":
        names = sorted(set(families) - _NOT_OFFERED)
        return {"families": {name: name in curricula for name in names}}
    task = request["task"]
    name = task["family"]
    if name not in families or name in _NOT_OFFERED:
        return {"unreadable": f"there is no family {name!r}"}
    if request["do"] == "levels":
        return {"levels": _levels_of(name)}
    try:
        # As text, which the cache can hash; sorted, so that equal tasks share an entry.
        dataset, entry = _made(json.dumps(task, sort_keys=True))
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return {"unreadable": f"family {name!r} cannot make the task: {reason}"}
    # Only the question: it is what the policy has seen, and what must still be the
    # same.
    digest = hashlib.blake2b(entry["question"].encode(), digest_size=8).hexdigest()
    if request["do"] == "make":
        gold = entry["answer"]
        return {
            "question": entry["question"],
            "answer": "" if gold is None else str(gold),
            "digest": digest,
        }
    if digest != request["digest"]:
        said = f"family {name!r} of this version makes another task of its seed"
        return {"unreadable": f"{said}; make the rows again"}
    return {"score": _score(dataset, request["answer"], entry)}


def _score(dataset: Any, text: str, entry: Any) -> float:
    """Return the score that the family's own scorer gives, at most 1."""
    try:
        score = float(dataset.score_answer(text, entry))
    except Exception:
        # Some scorers fail on texts that they cannot read: such an answer is wrong.
        return 0.0
    # Some scorers leave the range or return NaN; neither may reach the training.
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Import the package, and let its scorers evaluate nothing but data."""
    import reasoning_gym.factory as factory  # noqa: PLC0415
    import sympy  # noqa: PLC0415

    original = sympy.parse_expr

    def parse(text: str, *arguments: Any, **named: Any) -> Any:
        return original(_checked_formula(text), *arguments, **named)

    # Before the modules below are imported, which may bind the name.
    sympy.parse_expr = parse
    for name in _PARSING:
        importlib.import_module(f"reasoning_gym.{name}").parse_expr = parse  # type: ignore[attr-defined]
    for name in _EVALUATING:
        module = importlib.import_module(f"reasoning_gym.{name}")
        # A global of the module comes before the builtin when its functions look up
        # `eval`.
        module.eval = ast.literal_eval  # type: ignore[attr-defined]
    return factory.DATASETS, factory.CURRICULA


def _checked_formula(text: str) -> str:
    """Return a formula of numbers, short names and elementary functions.

    Raises:
        ValueError: It has anything else in it.
    """
    # Single letters are variables, which have no value to call or read.
    names = {name for name in _NAME.findall(text) if len(name) > 1}
    if (
        not _FORMULA.fullmatch(text)
        or _ATTRIBUTE.search(text)
        or not names <= _FUNCTIONS
    ):
        raise ValueError("no formula")
    return text


@functools.lru_cache(maxsize=256)
def _made(task_json: str) -> tuple[Any, Any]:
    """Return a data set of one task, and the task."""
    task = json.loads(task_json)
    seed = task.pop("seed")
    made_json = json.dumps(task, sort_keys=True)
    kept = _kept_dataset(made_json)
    if kept is not None:
        return kept, _reseeded(kept, seed)
    fresh = _fresh_dataset(made_json, seed)
    return fresh, fresh[0]


@functools.lru_cache(maxsize=256)
def _kept_dataset(made_json: str) -> Any:
    """Return a data set that can be given another seed; None: it must be rebuilt.

    Making one may take long, where it reads a corpus. Which families use their seed
    while they are made cannot be told but by trying.
    """
    # Made with another seed than the first probes, so that a seed used while making
    # shows.
    kept = _fresh_dataset(made_json, _PROBES[-1])
    for seed in _PROBES:
        fresh = _fresh_dataset(made_json, seed)[0]
        again = _reseeded(kept, seed)
        if any(fresh[key] != again[key] for key in ("question", "answer")):
            return None
    return kept


def _reseeded(dataset: Any, seed: int) -> Any:
    dataset.seed = dataset.config.seed = seed
    return dataset[0]


def _fresh_dataset(made_json: str, seed: int) -> Any:
    task = json.loads(made_json)
    families, curricula = _loaded()
    name = task["family"]
    dataset_class, config_class = families[name]
    settings = {**task["settings"], "size": 1, "seed": seed}
    if task["level"] is None and not task["levels"]:
        config = config_class(**settings)
    else:
        config = _at_level(task, curricula.get(name), settings)
    if hasattr(config, "validate"):
        config.validate()
    return dataset_class(config=config)


def _at_level(task: Any, curriculum_class: Any, settings: Mapping[str, Any]) -> Any:
    """Return the configuration of a level; settings win over it."""
    if curriculum_class is None:
        raise ValueError("it has no curriculum: leave level and levels out")
    curriculum = curriculum_class()
    for attribute, definition in curriculum.attributes.items():
        if task["level"] is not None:
            top = len(definition.levels) - 1
            # Attributes have different numbers of levels; a short one stays at its
            # hardest.
            curriculum.set_attr_level(attribute, min(task["level"], top))
    for attribute, level in task["levels"].items():
        if attribute not in curriculum.attributes:
            known = ", ".join(sorted(curriculum.attributes))
            raise ValueError(f"no attribute {attribute!r} (it has {known})")
        curriculum.set_attr_level(attribute, level)
    config = curriculum.generate_configuration(settings)
    # Last: settings win over what the curriculum chose.
    for key, value in settings.items():
        setattr(config, key, value)
    return config


def _levels_of(name: str) -> dict[str, list[str]] | None:
    """Return the values of each attribute of a curriculum, easiest first."""
    _, curricula = _loaded()
    if name not in curricula:
        return None
    attributes = curricula[name]().attributes
    return {key: [str(v) for v in each.levels] for key, each in attributes.items()}


def _main() -> None:
    # The package that this file is of, wherever the program that asks found it.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from rl_envs.limited_server import run_server  # noqa: PLC0415

    run_server(answer, {"do": "list"}, memory_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    _main()
