"""Published datasets by name: hub location, licence, and conversion of a row.

A format converts a row of the published schema to the columns that algorithms read:

| column | holds | read by |
|---|---|---|
| `prompt` | text or messages | all |
| `answer` | the worked solution, where there is one | SFT |
| `ground_truth` | the final answer alone | `math`, `code_interpreter` |
| `messages` | a whole conversation | SFT |
| `chosen`, `rejected` | the better and the worse answer | DPO, reward models |

Other columns of the row are kept, so that rewards can use them.
Imports neither torch nor datasets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.data.types import Row
from rl_algorithms.errors import ColumnError
from rl_distributed.registry import Registry

__all__ = ["DataFormat", "data_formats", "read_row"]

RowReader = Callable[[Row], Mapping[str, Any] | None]
"""Returns the columns to add to a row, or None to leave the row out.

Raises:
    ValueError: A cell does not hold what the schema says; the message says which.
"""


@dataclass(frozen=True)
class DataFormat:
    """A published schema."""

    name: str
    hub_name: str
    """Hub name of the dataset with this schema."""
    licence: str
    """SPDX identifier of the licence stated on the dataset's page."""
    columns: tuple[str, ...]
    """Required columns of every row."""
    read: RowReader
    subset: str | None = None
    """Configuration of the hub dataset."""
    answer_column: str | None = None
    """Column of the final answer that a reward compares with; None: no such column."""
    drops_rows: bool = False
    """Whether `read` may drop rows, which a stream does not support."""


data_formats: Registry[DataFormat] = Registry("rl.data_formats", "data format")
"""Formats by name; other packages use the entry-point group `rl.data_formats`."""


def read_row(row: Row, index: int, format_name: str, name: str) -> Row | None:
    """Convert a row of a published format.

    Args:
        row: The row as published.
        index: Its index, for messages.
        format_name: Name of a registered format.
        name: Name of the dataset in messages.

    Returns:
        The row with the added columns, or None if the format drops it.

    Raises:
        ColumnError: The row lacks a column, or a cell holds another type.
        RegistryError: The format is unknown.
    """
    form = data_formats.get(format_name)
    missing = [column for column in form.columns if column not in row]
    if missing:
        raise ColumnError(
            f"dataset {name}: row {index} has no {missing[0]!r}, and rows of the "
            f"format {form.name} have {', '.join(map(repr, form.columns))}; it has "
            f"{', '.join(map(repr, row))}; set format to that of the data, or to null"
        )
    try:
        found = form.read(row)
    except (ValueError, TypeError, LookupError) as error:
        # Readers index cells without checking each, so another schema raises any of
        # these.
        raise ColumnError(
            f"dataset {name}: row {index} cannot be read by the format {form.name}: "
            f"{error}; correct the row, or set format to null"
        ) from error
    # Converted columns win: a dataset may use one of these names for something else.
    return None if found is None else {**row, **found}


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{column} must be a text that is not empty: got {value!r:.60}"
        )
    return value


def _gsm8k(row: Row) -> Mapping[str, Any]:
    answer = _text(row, "answer")
    _, mark, last = answer.rpartition("####")
    if not mark or not last.strip():
        raise ValueError(f"answer must end with '#### NUMBER': got {answer[-60:]!r}")
    # The published answers separate thousands with commas.
    return {
        "prompt": _text(row, "question"),
        "ground_truth": last.strip().replace(",", ""),
    }


def _math(row: Row) -> Mapping[str, Any]:
    solution = _text(row, "solution")
    given = row.get("answer")  # MATH-500 has the final answer in a column of its own
    # The column is the published answer; the last box is only a guess at it.
    final = given if isinstance(given, str) and given.strip() else _last_box(solution)
    return {
        "prompt": _text(row, "problem"),
        "answer": solution,
        "ground_truth": final,
    }


_BOX = re.compile(r"\\f?boxed\s*(?=\{)")


def _last_box(text: str) -> str:
    r"""Return the content of the last `\boxed{}`, which may contain nested braces."""
    places = list(_BOX.finditer(text))
    if not places:
        raise ValueError(f"solution must hold \\boxed{{}}: got {text[-60:]!r}")
    start, depth = places[-1].end(), 0
    for end in range(start, len(text)):
        # Escaped braces are printed ones, and do not nest.
        escaped = end > 0 and text[end - 1] == "\\"
        if text[end] in "{}" and not escaped:
            depth += 1 if text[end] == "{" else -1
        if depth == 0:
            return text[start + 1 : end].strip()
    raise ValueError(f"a brace of \\boxed stays open: {text[start:][:60]!r}")


def _dapo_math(row: Row) -> Mapping[str, Any]:
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        _check_messages(prompt, "prompt")
    scored = row.get("reward_model")
    final = scored.get("ground_truth") if isinstance(scored, Mapping) else None
    if final is None:
        final = row.get("solution")
    if not isinstance(final, str) or not final.strip():
        raise ValueError(
            "reward_model.ground_truth or solution must be a text: got "
            f"{scored!r:.60} and {row.get('solution')!r:.60}"
        )
    return {"answer": final, "ground_truth": final}


def _deepscaler(row: Row) -> Mapping[str, Any]:
    final, solution = _text(row, "answer"), row.get("solution")
    worked = isinstance(solution, str) and bool(solution.strip())
    return {
        "prompt": _text(row, "problem"),
        # Rows without a worked solution have only the final answer to imitate.
        "answer": solution if worked else final,
        "ground_truth": final,
    }


def _openmathinstruct2(row: Row) -> Mapping[str, Any]:
    return {
        "prompt": _text(row, "problem"),
        "answer": _text(row, "generated_solution"),
        "ground_truth": _text(row, "expected_answer"),
    }


def _helpsteer3(row: Row) -> Mapping[str, Any] | None:
    score = row["overall_preference"]
    # bool is a subclass of int.
    if isinstance(score, bool) or not isinstance(score, int) or not -3 <= score <= 3:
        raise ValueError(
            f"overall_preference must be a whole number from -3 to 3: got {score!r:.60}"
        )
    if score == 0:  # as good as each other: nothing to prefer
        return None
    answers = [_text(row, "response1"), _text(row, "response2")]
    # A negative score prefers the first response.
    better, worse = answers if score < 0 else reversed(answers)
    _check_messages(row["context"], "context")
    return {"prompt": row["context"], "chosen": better, "rejected": worse}


def _tulu3(row: Row) -> Mapping[str, Any]:
    _check_messages(row["messages"], "messages")
    return {}


def _check_messages(value: Any, column: str) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and value
    if not is_list or not all(
        isinstance(message, Mapping) and {"role", "content"} <= set(message)
        for message in value
    ):
        raise ValueError(
            f"{column} must be a list of messages with role and content: got "
            f"{value!r:.60}"
        )


def _humaneval(row: Row) -> Mapping[str, Any]:
    for column in ("test", "entry_point"):
        _text(row, column)
    return {"prompt": _text(row, "prompt"), "answer": _text(row, "canonical_solution")}


def _mbpp(row: Row) -> Mapping[str, Any]:
    tests = row["test_list"]
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f"test_list must be a list of texts: got {tests!r:.60}")
    # The sanitised part calls the task `prompt`, the full one `text`. Without a test
    # the name of the function would have to be guessed.
    task = _text(row, "text" if row.get("text") is not None else "prompt")
    shown = "\n".join(str(test) for test in tests)
    return {
        "prompt": f"{task}\nYour code should pass these tests:\n{shown}",
        "answer": _text(row, "code"),
    }


def _ifeval(row: Row) -> Mapping[str, Any]:
    names, settings = row["instruction_id_list"], row["kwargs"]
    if len(names) != len(settings):
        raise ValueError(
            "kwargs must have one entry for each of instruction_id_list: got "
            f"{len(settings)} and {len(names)}"
        )
    return {"prompt": _text(row, "prompt")}


for _format in (
    DataFormat(
        "gsm8k",
        "openai/gsm8k",
        "MIT",
        ("question", "answer"),
        _gsm8k,
        "main",
        "ground_truth",
    ),
    DataFormat(
        "math",
        "DigitalLearningGmbH/MATH-lighteval",
        "MIT",
        ("problem", "solution"),
        _math,
        answer_column="ground_truth",
    ),
    DataFormat(
        "dapo_math",
        "open-r1/DAPO-Math-17k-Processed",
        "Apache-2.0",
        ("prompt",),
        _dapo_math,
        "en",
        "ground_truth",
    ),
    DataFormat(
        "deepscaler",
        "agentica-org/DeepScaleR-Preview-Dataset",
        "MIT",
        ("problem", "answer"),
        _deepscaler,
        answer_column="ground_truth",
    ),
    DataFormat(
        "openmathinstruct2",
        "nvidia/OpenMathInstruct-2",
        "CC-BY-4.0",
        ("problem", "generated_solution", "expected_answer"),
        _openmathinstruct2,
        answer_column="ground_truth",
    ),
    DataFormat(
        "helpsteer3",
        "nvidia/HelpSteer3",
        "CC-BY-4.0",
        ("context", "response1", "response2", "overall_preference"),
        _helpsteer3,
        "preference",
        drops_rows=True,
    ),
    DataFormat(
        "tulu3", "allenai/tulu-3-sft-mixture", "ODC-By-1.0", ("messages",), _tulu3
    ),
    DataFormat(
        "humaneval",
        "openai/openai_humaneval",
        "MIT",
        ("prompt", "canonical_solution", "test", "entry_point"),
        _humaneval,
    ),
    DataFormat(
        "mbpp",
        "google-research-datasets/mbpp",
        "CC-BY-4.0",
        ("code", "test_list"),
        _mbpp,
        "full",
    ),
    DataFormat(
        "ifeval",
        "google/IFEval",
        "Apache-2.0",
        ("prompt", "instruction_id_list", "kwargs"),
        _ifeval,
    ),
):
    data_formats.register(_format.name)(_format)
