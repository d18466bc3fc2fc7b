"""The sections `data` and `env` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from rl_cli.nemo_rl.their_recipe import TheirRecipe

__all__ = ["data_section", "env_section"]

_PROCESSORS = "rows are read by their columns; see `rl config explain data`"
_ENVIRONMENTS = ("math",)
_COLUMNS = {
    "input_key": "prompt",
    "output_key": "answer",
    "chat_key": "messages",
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}


@dataclass(frozen=True, slots=True)
class _HubDataset:
    """A dataset on the hub behind one of their names."""

    path: str
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    subset: str | None = None


_MATH = {"prompt": "problem", "answer": "expected_answer"}
_HUB: Mapping[str, _HubDataset] = {
    "OpenMathInstruct-2": _HubDataset("nvidia/OpenMathInstruct-2", _MATH, "train_1M"),
    "DeepScaler": _HubDataset(
        "agentica-org/DeepScaleR-Preview-Dataset",
        {"prompt": "problem", "answer": "answer"},
    ),
    "gsm8k": _HubDataset(
        "openai/gsm8k", {"prompt": "question", "answer": "answer"}, subset="main"
    ),
    "GSM8K": _HubDataset(
        "openai/gsm8k", {"prompt": "question", "answer": "answer"}, subset="main"
    ),
    "tulu3_sft_mixture": _HubDataset("allenai/tulu-3-sft-mixture"),
    "Tulu3Preference": _HubDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
}


def data_section(recipe: TheirRecipe, *, is_sampled: bool) -> dict[str, Any]:
    """Return our section `data`.

    Args:
        recipe: Their recipe.
        is_sampled: True if answers are sampled, so that prompts must leave room.
    """
    ours: dict[str, Any] = {}
    for name in ("shuffle", "add_bos", "add_eos"):
        if recipe.has(f"data.{name}"):
            ours[name] = recipe.take(f"data.{name}")
    length = "data.max_input_seq_length"
    if is_sampled:
        why = "what policy.generation.max_new_tokens leaves; longer prompts are dropped"
        recipe.change(length, why)
    elif recipe.has(length):
        ours["max_input_seq_length"] = recipe.take(length)
    ours["on_overlong"] = "drop"
    for part in ("train", "validation"):
        sources = _sources(recipe, part, ours)
        if sources:
            ours[part] = sources[0] if len(sources) == 1 else sources
    recipe.take("data.default.env_name")
    recipe.leave("data.default.processor", _PROCESSORS)
    recipe.leave("data.default", "has no counterpart here")
    return ours


def _entries(recipe: TheirRecipe, part: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the data sets of a part, with their defaults merged in."""
    given = recipe.peek(f"data.{part}")
    default = recipe.peek("data.default", {})
    if given is None:
        return []
    entries = given if isinstance(given, list) else [given]
    return [(f"data.{part}", {**default, **entry}) for entry in entries]


def _sources(
    recipe: TheirRecipe, part: str, ours: dict[str, Any]
) -> list[dict[str, Any]]:
    found = []
    for place, entry in _entries(recipe, part):
        if source := _source(recipe, place, entry):
            found.append(source)
        if part == "train":
            _prompts(recipe, place, entry, ours)
            if share := entry.get("split_validation_size"):
                ours["split_validation_size"] = share
    if part == "train" and recipe.peek("data.validation") is not None:
        ours.pop("split_validation_size", None)
    recipe.leave(f"data.{part}.seed", "the seed of the run sets rows aside")
    recipe.leave(f"data.{part}.processor", _PROCESSORS)
    recipe.take(f"data.{part}")
    return found


def _source(
    recipe: TheirRecipe, place: str, entry: Mapping[str, Any]
) -> dict[str, Any] | None:
    name = entry.get("dataset_name")
    known = _HUB.get(str(name))
    path = entry.get("data_path")
    if path is not None:
        source: dict[str, Any] = {"path": _resolved(recipe, str(path))}
    elif known is not None:
        source = {"path": known.path}
        if known.columns:
            source["columns"] = dict(known.columns)
    else:
        recipe.leave(
            f"{place}.dataset_name",
            f"{name!r} is made of its raw rows by code there: write a file with the "
            f"columns that `rl config explain data` names, and set {place} to it",
        )
        return None
    for key in ("split", "subset"):
        value = entry.get(key) or (known and getattr(known, key))
        # A file has no splits or subsets.
        if value and not (path and Path(source["path"]).suffix):
            source[key] = value
    columns = {
        new: entry[key]
        for key, new in _COLUMNS.items()
        if entry.get(key) and entry[key] != new
    }
    if columns:
        source["columns"] = {**source.get("columns", {}), **columns}
    return source


def _resolved(recipe: TheirRecipe, path: str) -> str:
    """Resolve a path relative to the recipe; leave a name on the hub unchanged."""
    beside = recipe.folder / path
    return str(beside) if not Path(path).exists() and beside.exists() else path


def _prompts(
    recipe: TheirRecipe, place: str, entry: Mapping[str, Any], ours: dict[str, Any]
) -> None:
    """Carry over the prompt templates from their files."""
    for key, our_key in (
        ("prompt_file", "prompt_template"),
        ("system_prompt_file", "system_prompt"),
    ):
        path = entry.get(key)
        if not path:
            continue
        at = f"{place}.{key}" if recipe.has(f"{place}.{key}") else f"data.default.{key}"
        file = Path(_resolved(recipe, str(path)))
        if not file.is_file():
            recipe.leave(at, f"the file does not exist; set data.{our_key} to its text")
            continue
        recipe.take(at)
        text = file.read_text(encoding="utf-8")
        if our_key == "prompt_template":
            text = _with_named_place(text)
        ours[our_key] = text


def _with_named_place(template: str) -> str:
    """Return a template whose positional place is called `prompt`, as here.

    Both are filled by `str.format`, so that literal braces stay double.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError:
        # A single brace: their program fails at it, too.
        return template
    found = []
    for text, name, form, conversion in pieces:
        found.append(text.replace("{", "{{").replace("}", "}}"))
        if name is not None:
            name = "prompt" if name in ("", "0") else name
            conversion = f"!{conversion}" if conversion else ""
            form = f":{form}" if form else ""
            found.append(f"{{{name}{conversion}{form}}}")
    return "".join(found)


def env_section(recipe: TheirRecipe) -> dict[str, Any] | None:
    """Return our section `env`; None if there is no such environment."""
    names = {
        entry.get("env_name")
        for part in ("train", "validation")
        for _, entry in _entries(recipe, part)
    } - {None}
    environments = recipe.peek("env", {})
    name = next(iter(names)) if len(names) == 1 else None
    if name is None and len(environments) == 1:
        name = next(iter(environments))
    if name not in _ENVIRONMENTS:
        recipe.leave(
            "env",
            f"{', '.join(map(str, names or environments)) or 'it'} is not here; `rl "
            "envs list` shows what is, and env.name names one",
        )
        return None
    settings: dict[str, Any] = {}
    for key in ("num_workers", "verifier_type", "stop_strings"):
        value = recipe.take(f"env.{name}.{key}")
        if value is not None:
            settings[key] = value
    recipe.leave(f"env.{name}.math_verify_impl", "answers are compared in one way")
    recipe.leave("env", "has no counterpart here")
    return {"name": name, "settings": settings}
