"""`DataModule`: training and validation data of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from rl_algorithms.data.collate import SFTCollator, rl_collate_fn
from rl_algorithms.data.config import DataConfig, DatasetConfig
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.demonstrations import process_demonstrations
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.preferences import PreferenceCollator, process_preferences
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.data.sources import (
    describe_source,
    load_configured,
    load_dataset_any,
)
from rl_algorithms.data.types import Rows, Tokenizer
from rl_algorithms.errors import EmptyDatasetError
from rl_algorithms.seeds import permutation
from rl_distributed.errors import ConfigError

__all__ = ["DataModule"]

_PROCESS: dict[str, Callable[..., ProcessedDataset]] = {
    "prompts": process_prompts,
    "demonstrations": process_demonstrations,
    "preferences": process_preferences,
}
_SPLIT_EPOCH = -1
"""The permutation that sets validation rows aside is that of no training epoch."""


class DataModule:
    """Loads, checks, processes and batches the data of a run.

    Args:
        config: Columns, templates, limits and default sources.
        tokenizer: The policy's tokenizer.
        kind: `prompts` for reinforcement learning, `demonstrations` for supervised
            training, `preferences` for pairs of answers; it decides about processing
            and columns of the batches.
        batch_size: Rows (of preferences: pairs) per training batch.
        val_batch_size: Rows per validation batch; default `batch_size`.
        max_length: Longest row in tokens; `config.max_input_seq_length` may be less.
        seed: Seed of the order, and of the rows set aside.
        train: A source in place of `config.train`, see `load_dataset_any`.
        validation: A source in place of `config.validation`.
        max_val_rows: Use only that many validation rows, the first ones.
        endless: Training batches never end, and run across epochs.
        make_sequence_length_divisible_by: Round the width of demonstrations up.

    Raises:
        ConfigError: There is no source to train on.
        DataError: A source cannot be read or processed.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        kind: Literal["prompts", "demonstrations", "preferences"],
        batch_size: int,
        val_batch_size: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
        train: Any = None,
        validation: Any = None,
        max_val_rows: int | None = None,
        endless: bool = False,
        make_sequence_length_divisible_by: int = 1,
    ) -> None:
        self.config = config
        self._tokenizer, self._kind = tokenizer, kind
        self._max_length = _smaller(config.max_input_seq_length, max_length)
        rows = _load(train, config.train)
        if rows is None:
            raise ConfigError(
                "data.train is not set and no dataset was given: set data.train to a "
                "file, folder or hub name, or pass dataset="
            )
        train_rows, train_name = rows
        held_out = _load(validation, config.validation)
        if held_out is None and config.split_validation_size:
            train_rows, val_rows = _split(
                train_rows, config.split_validation_size, seed, train_name
            )
            held_out = (val_rows, f"{train_name} (validation part)")
        self.train_dataset = self._process(train_rows, train_name)
        self.validation_dataset: ProcessedDataset | None = None
        if held_out is not None:
            val_rows, val_name = held_out
            if max_val_rows is not None:
                val_rows = _take(val_rows, range(min(max_val_rows, len(val_rows))))
            self.validation_dataset = self._process(val_rows, val_name)
        self.collate = self._collator(make_sequence_length_divisible_by)
        self.train_loader = BatchedDataLoader(
            self.train_dataset,
            batch_size,
            shuffle=config.shuffle,
            seed=seed,
            drop_last=config.drop_last,
            endless=endless,
            collate_fn=self.collate,
            name=f"training dataset {train_name}",
        )
        self._val_batch_size = val_batch_size or batch_size

    def validation_loader(self) -> BatchedDataLoader | None:
        """Return a fresh loader of the validation rows in their own order."""
        if self.validation_dataset is None:
            return None
        return BatchedDataLoader(
            self.validation_dataset,
            self._val_batch_size,
            collate_fn=self.collate,
            name="validation dataset",
        )

    def counts(self) -> dict[str, int]:
        """Return numbers of rows, used and left out, as metrics."""
        counts = {
            "num_train_rows": len(self.train_dataset),
            "num_train_overlong": self.train_dataset.num_overlong,
        }
        if self.validation_dataset is not None:
            counts["num_validation_rows"] = len(self.validation_dataset)
            counts["num_validation_overlong"] = self.validation_dataset.num_overlong
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return where the training data stand."""
        return dict(self.train_loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved."""
        self.train_loader.load_state_dict(state)

    def _process(self, rows: Rows, name: str) -> ProcessedDataset:
        return _PROCESS[self._kind](
            rows,
            self._tokenizer,
            self.config,
            max_length=self._max_length,
            name=name,
        )

    def _collator(self, multiple: int) -> Callable[[list[Any]], Any]:
        pad = self._tokenizer.pad_token_id
        pad = pad if pad is not None else self._tokenizer.eos_token_id or 0
        if self._kind == "prompts":
            return partial(rl_collate_fn, pad_token_id=pad)
        if self._kind == "preferences":
            return PreferenceCollator(pad, multiple)
        return SFTCollator(pad, multiple)


def _smaller(a: int | None, b: int | None) -> int | None:
    given = [value for value in (a, b) if value is not None]
    return min(given) if given else None


def _load(source: Any, config: DatasetConfig | None) -> tuple[Rows, str] | None:
    """Load a given source, or else the configured one."""
    if source is not None:
        return load_dataset_any(source), describe_source(source)
    if config is None:
        return None
    return load_configured(config)


def _take(rows: Rows, indices: Any) -> Rows:
    return [rows[int(index)] for index in indices]


def _split(rows: Rows, size: float, seed: int, name: str) -> tuple[Rows, Rows]:
    """Set validation rows aside: `size` rows, or that part of them."""
    count = int(size) if size >= 1 else round(size * len(rows))
    if not 0 < count < len(rows):
        raise EmptyDatasetError(
            f"data.split_validation_size={size} sets {count} of the {len(rows)} rows "
            f"of dataset {name} aside: at least one row must be left on either side"
        )
    order = permutation(len(rows), seed=seed, epoch=_SPLIT_EPOCH)
    return _take(rows, sorted(order[count:])), _take(rows, sorted(order[:count]))
