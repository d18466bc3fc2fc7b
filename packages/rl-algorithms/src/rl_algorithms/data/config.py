"""Settings of datasets. Imports neither torch nor a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config

__all__ = ["DataConfig", "DatasetConfig", "TasksConfig"]


class TasksConfig(Config):
    """Rows that a world of rl-envs generates: verifiable tasks."""

    world: str
    """Name of the world, such as `sorting`."""
    part: Literal["train", "held_out", "demonstrations"]
    """Which tasks: to practise, to measure with, or to imitate. Those to measure with
    never overlap with the others."""
    num_rows: int = Field(gt=0)
    """Number of tasks."""
    seed: int = 0
    """Which of the possible samples is drawn."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the world's task source."""


class DatasetConfig(Config):
    """Where rows come from: `path` or `tasks`."""

    path: str | None = None
    """A file (jsonl, json, parquet, csv), a folder, or a name on the hub."""
    split: str | None = None
    """Part of a folder or hub dataset; default `train` where there is one."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    tasks: TasksConfig | None = None
    """Tasks that a world generates, instead of `path`."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.path is None) == (self.tasks is None):
            raise ValueError("give either path or tasks, and not both")
        if self.tasks is not None and (self.split or self.subset):
            raise ValueError("split and subset belong to path, not to tasks")
        return self


class DataConfig(Config):
    """Which rows, how their columns are read, and how they become batches."""

    train: DatasetConfig | None = None
    """Rows to train on; a plain path will do."""
    validation: DatasetConfig | None = None
    """Rows to validate on; a plain path will do."""
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
    """Roles of messages that supervised training learns."""
    only_unmask_final: bool = False
    """Learn only the last of these messages."""

    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Longest prompt (demonstration) in tokens; default: what the context allows."""
    on_overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with longer ones; `truncate` cuts demonstrations at their end."""
    shuffle: bool = True
    """Draw training rows in an order that seed and epoch determine."""
    drop_last: bool = True
    """Leave out the last, smaller training batch of an epoch."""

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

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
        if not self.roles_to_train_on:
            raise ValueError("roles_to_train_on must name at least one role")
        return self
