"""Settings of datasets. Imports neither torch nor a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_algorithms.data.formats import data_formats
from rl_distributed.config import Config
from rl_distributed.errors import RegistryError

__all__ = [
    "ContaminationConfig",
    "DataConfig",
    "DatasetConfig",
    "PassRateFilterConfig",
    "SourceConfig",
    "TasksConfig",
]

_ROLES = ("system", "user", "assistant", "tool")


class TasksConfig(Config):
    """Rows that a world of rl-envs generates: verifiable tasks."""

    world: str
    """Name of the world, such as `sorting`."""
    part: Literal["train", "held_out", "demonstrations"]
    """Which tasks: to practise, to measure with, or to imitate. Those to measure with
    never overlap with the others."""
    num_rows: int = Field(gt=0)
    """Number of tasks."""
    seed: int = Field(0, ge=0)
    """Which of the possible samples is drawn."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the world's task source."""


class SourceConfig(Config):
    """Where rows come from: `path` or `tasks`."""

    path: str | None = None
    """A file (jsonl, json, parquet, csv), a folder, or a name on the hub."""
    split: str | None = None
    """Part of a folder or hub dataset; default `train` where there is one."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    tasks: TasksConfig | None = None
    """Tasks that a world generates, instead of `path`."""
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """What metrics call it in a mixture; default: the end of the path or the world."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Its share of the rows of a mixture, relative to the weights of the others; null
    (of all): as many rows as each has."""
    format: str | None = None
    """Published schema of the rows, such as `gsm8k` or `helpsteer3`, by which they are
    read into the columns that algorithms know. Alone it also names the data set on the
    hub; with `path`, files of that schema. null: columns are found by their names."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns to rename: the name to give, and the column that gets it, as in
    `{prompt: problem, answer: solution}`."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @model_validator(mode="before")
    @classmethod
    def _place_of_format(cls, value: Any) -> Any:
        """Fill in where the data set of a format lies on the hub."""
        if not isinstance(value, Mapping) or not isinstance(value.get("format"), str):
            return value
        try:
            form = data_formats.get(value["format"])
        except RegistryError as error:
            raise ValueError(f"format: {error}") from error
        if value.get("tasks") is not None or value.get("mixture") is not None:
            raise ValueError(
                "format belongs to path: tasks have their own columns, and each source "
                "of a mixture has its own format"
            )
        filled = dict(value)
        if filled.get("path") is None:
            filled["path"] = form.hub_name
        if filled["path"] == form.hub_name and filled.get("subset") is None:
            filled["subset"] = form.subset
        return filled

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(
                f"columns gives two names to one column: got {self.columns}"
            )
        return self

    @property
    def title(self) -> str:
        """What metrics and messages call the source."""
        if self.name is not None:
            return self.name
        if self.path is not None:
            return re.sub(r"[^\w.-]", "_", Path(self.path).stem)
        return self.tasks.world if self.tasks is not None else "mixture"


class DatasetConfig(SourceConfig):
    """Where rows come from: `path`, `tasks`, or several sources in `mixture`."""

    mixture: list[SourceConfig] | None = Field(default=None, min_length=1)
    """Several sources; a plain list in place of the section will do."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        given = [self.path, self.tasks, self.mixture]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give either path, tasks or mixture, and only one of them")
        if self.tasks is not None and (self.split or self.subset):
            raise ValueError("split and subset belong to path, not to tasks")
        self._check_mixture(self.mixture or [])
        return self

    def _check_mixture(self, sources: list[SourceConfig]) -> None:
        if sources and (self.split or self.subset or self.columns):
            raise ValueError(
                "split, subset and columns belong to the sources of a mixture, not to "
                "the mixture"
            )
        for index, source in enumerate(sources):
            if (source.path is None) == (source.tasks is None):
                raise ValueError(
                    f"mixture[{index}] needs either path or tasks, and not both"
                )
        weighted = [source.title for source in sources if source.weight is not None]
        if weighted and len(weighted) < len(sources):
            missing = [source.title for source in sources if source.weight is None]
            raise ValueError(
                "give a weight to every source of a mixture or to none: "
                f"{', '.join(missing)} has none"
            )
        titles = [source.title for source in sources]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(
                f"two sources of a mixture are called {twice[0]!r}: set their name"
            )


class ContaminationConfig(Config):
    """Section `data.contamination`: held-out rows that are trained on, too."""

    action: Literal["warn", "error", "drop", "ignore"] = "warn"
    """What to do: `warn`, stop with an `error`, `drop` those training rows, or
    `ignore`, which does not look for them."""
    ngram: int | None = Field(default=None, ge=5)
    """Look also for training rows that share a run of this many words and signs with a
    held-out prompt; 13 is usual for natural language. Null: for equal prompts alone."""


class PassRateFilterConfig(Config):
    """Section `data.pass_rate_filter`: skip prompts that are always or never solved.

    The pass rate of a prompt is the share of right ones among the answers that were
    sampled to it in its newest visits.
    """

    pass_threshold: float = Field(1.0, allow_inf_nan=False)
    """An answer is right if its reward, before scaling and shaping, is at least this.
    """
    easy_threshold: float | None = Field(1.0, ge=0.0, le=1.0)
    """A prompt is too easy if its pass rate is at least this; null: none is."""
    hard_threshold: float | None = Field(0.0, ge=0.0, le=1.0)
    """A prompt is too hard if its pass rate is at most this; null: none is."""
    num_visits: int = Field(2, ge=1)
    """Number of newest visits (groups of answers) that count; a prompt with fewer is
    never skipped."""
    revisit_epochs: int = Field(4, ge=2)
    """A skipped prompt is visited again this many epochs after its last visit."""
    difficulty_key: str | None = None
    """Column of numbers whose means over skipped and other prompts are reported, as are
    those of the prompts' length; null: none."""

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is None and hard is None:
            raise ValueError(
                "easy_threshold and hard_threshold are both null, so no prompt would "
                "be skipped: set one, or leave pass_rate_filter out (null)"
            )
        if easy is not None and hard is not None and hard >= easy:
            raise ValueError(
                f"hard_threshold must be below easy_threshold: got {hard} and {easy}"
            )
        return self


DataKind = Literal["prompts", "demonstrations", "preferences"]
"""What rows are read as: to sample answers, to imitate, or to compare."""


def _or_a_path(schema: dict[str, Any]) -> None:
    """Let editors know that a path, or a list of sources, stands for a section."""
    schema["anyOf"] += [{"type": "string"}, {"type": "array"}]


class DataConfig(Config):
    """Which rows, how their columns are read, and how they become batches."""

    train: DatasetConfig | None = Field(None, json_schema_extra=_or_a_path)
    """Rows to train on; a plain path will do, or a list of sources."""
    validation: DatasetConfig | None = Field(None, json_schema_extra=_or_a_path)
    """Rows to validate on; a plain path will do, or a list of sources: each is then
    measured by itself, too."""
    split_validation_size: float = Field(default=0.0, ge=0.0)
    """Without `validation`: rows (if 1 or more) or part (if less) of the training rows
    to set aside, chosen by the seed."""

    input_key: str | None = None
    """Column of the prompt: text or messages; default: the first usual name found."""
    output_key: str | None = None
    """Column of the answer; default: the first usual name found."""
    messages_key: str | None = None
    """Column of whole conversations; default `messages` or `conversations`."""
    text_key: str | None = None
    """Column of plain text to learn as it is; default `text`."""
    chosen_key: str | None = None
    """Column of the better answer of a pair; default `chosen`."""
    rejected_key: str | None = None
    """Column of the worse answer of a pair; default `rejected`."""

    prompt_template: str | None = None
    """Text around the prompt: `{prompt}` and any `{column}` are filled in; literal
    braces are doubled."""
    prompt_file: str | None = None
    """File that holds the prompt template."""
    system_prompt: str | None = None
    """First message of each conversation that has no system message."""
    system_prompt_file: str | None = None
    """File that holds the system prompt."""
    apply_chat_template: bool | None = None
    """Format prompts with the tokenizer's chat template; default: if it has one."""
    add_bos: bool | None = None
    """Begin plain text with the tokenizer's BOS token; default: if it does so."""
    add_eos: bool = True
    """End plain-text answers with the EOS token, and learn it."""
    roles_to_train_on: list[str] = Field(default_factory=lambda: ["assistant"])
    """Roles of messages that supervised training learns; `all` means all of them."""
    only_unmask_final: bool = False
    """Learn only the last of these messages."""

    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Longest prompt (demonstration) in tokens; default: what the context allows."""
    on_overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with longer ones; `truncate` cuts demonstrations at their end."""
    shuffle: bool = True
    """Draw training rows in an order that seed and epoch determine."""
    streaming: bool = False
    """Read training rows while training and hold only a few of them; their number need
    not be known, so `max_num_steps` must be set."""
    streaming_shuffle_rows: int = Field(default=1000, ge=1)
    """Rows of a stream that are held, processed and shuffled together."""
    contamination: ContaminationConfig = Field(default_factory=ContaminationConfig)
    """Held-out rows that are trained on, too."""
    pass_rate_filter: PassRateFilterConfig | None = None
    """Skip prompts that were always or never solved, for some epochs; null: every epoch
    has all prompts."""
    drop_last: bool | None = None
    """Leave out the last, smaller training batch of an epoch; null: unless it is the
    only one."""

    @property
    def sources(self) -> list[SourceConfig]:
        """Every source by itself, those of mixtures too."""
        given = [part for part in (self.train, self.validation) if part is not None]
        return [source for part in given for source in part.mixture or [part]]

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        # Checked one by one, so that a message names the source and its nearest key.
        return {
            "mixture": [
                SourceConfig.from_dict(dict(source), source=f"source {number}")
                if isinstance(source, Mapping)
                else source
                for number, source in enumerate(value, start=1)
            ]
        }

    @field_validator("roles_to_train_on", mode="before")
    @classmethod
    def _all_roles(cls, value: Any) -> Any:
        return list(_ROLES) if value == "all" else value

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        for text, file in (
            ("prompt_template", "prompt_file"),
            ("system_prompt", "system_prompt_file"),
        ):
            if getattr(self, text) is not None and getattr(self, file) is not None:
                raise ValueError(f"{text} and {file} exclude each other: set one")
        if self.split_validation_size and self.validation is not None:
            raise ValueError(
                "split_validation_size and validation exclude each other: set one"
            )
        if (
            self.split_validation_size > 1
            and not self.split_validation_size.is_integer()
        ):
            raise ValueError(
                "split_validation_size must be a part below 1 or a whole number of "
                f"rows: got {self.split_validation_size}"
            )
        if self.streaming and self.split_validation_size:
            raise ValueError(
                "split_validation_size needs the number of rows, which streaming does "
                "not know: set validation instead"
            )
        if self.streaming and self.train is not None and self.train.mixture:
            raise ValueError(
                "streaming takes one source and not a mixture: set streaming to false"
            )
        if self.streaming and self.pass_rate_filter is not None:
            raise ValueError(
                "pass_rate_filter knows prompts by their position in the data, which a "
                "stream does not have: set streaming to false, or leave it out (null)"
            )
        action = self.contamination.action
        if self.streaming and action in ("error", "drop"):
            raise ValueError(
                f"contamination.action={action} needs all training rows, which "
                "streaming does not hold: set warn or ignore, or streaming to false"
            )
        if not self.roles_to_train_on:
            raise ValueError("roles_to_train_on must name at least one role")
        return self

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        name = self.train.format if self.train is not None else None
        if self.streaming and name is not None and data_formats.get(name).drops_rows:
            raise ValueError(
                f"the format {name} leaves rows out, which a stream cannot count: set "
                "streaming to false"
            )
        return self
