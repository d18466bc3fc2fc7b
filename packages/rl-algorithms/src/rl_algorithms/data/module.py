"""`DataModule`: training and validation data of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rl_algorithms.data.collate import SFTCollator, rl_collate_fn
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.contamination import (
    NamedRows,
    describe_overlaps,
    find_overlaps,
    rows_without,
)
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.demonstrations import process_demonstrations
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.loading import LoadedSource, load_sources, set_aside
from rl_algorithms.data.mixture import MixtureOrder
from rl_algorithms.data.pass_rate_filter import PassRateFilter
from rl_algorithms.data.preferences import PreferenceCollator, process_preferences
from rl_algorithms.data.preflight import NO_SOURCE
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.data.provenance import (
    SourceRecord,
    joint_fingerprint,
    record_of,
)
from rl_algorithms.data.streaming import RowStream, StreamLoader
from rl_algorithms.data.types import Rows, Tokenizer
from rl_algorithms.data.unknown_tokens import unknown_prompts
from rl_algorithms.data.validation_sets import ValidationParts
from rl_algorithms.errors import ContaminationError
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_models.tokens.tokenizer import pad_token_id

__all__ = ["DataModule"]

_PROCESS: dict[str, Callable[..., ProcessedDataset]] = {
    "prompts": process_prompts,
    "demonstrations": process_demonstrations,
    "preferences": process_preferences,
}
_BATCH_KEYS = {
    "prompts": "num_prompts_per_step",
    "demonstrations": "train_global_batch_size (or num_prompts_per_step)",
    "preferences": "train_global_batch_size",
}
_logger = get_logger(__name__)


class DataModule:
    """Load, check, process and batch the data of a run.

    Args:
        config: Columns, templates, limits and default sources.
        tokenizer: The policy's tokenizer.
        kind: `prompts` for reinforcement learning, `demonstrations` for supervised
            training, `preferences` for pairs of answers; selects the processing and
            the columns of the batches.
        batch_size: Rows (of preferences: pairs) per training batch.
        val_batch_size: Rows per validation batch; default `batch_size`.
        max_length: Maximum row length in tokens; `config.max_input_seq_length` may
            lower it.
        seed: Seed of the order and of the validation split.
        train: A source in place of `config.train`, see `load_dataset_any`; also a
            `Mixture`, or a function that returns an iterable, which is then streamed.
        validation: A source in place of `config.validation`.
        max_val_rows: Maximum number of validation rows, taken from the start; several
            sources contribute equal parts.
        endless: Whether training batches never end and span epochs.
        make_sequence_length_divisible_by: Round the width of demonstrations up to a
            multiple of this.

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
        self._has_warned = False
        self._num_contaminated = 0
        self._batch_size, self._seed, self._endless = batch_size, seed, endless
        self._val_batch_size = val_batch_size or batch_size
        self.collate = self._collator(make_sequence_length_divisible_by)
        self.provenance: list[SourceRecord] = []
        """Provenance of each source, which the log records; streams have none."""
        self.pass_rates: PassRateFilter | None = None
        """Filter that records the rewards of each prompt's answers; None: no prompt is
        skipped."""
        self._check_pass_rates(is_stream=config.streaming or callable(train))
        held_out = load_sources(validation, config.validation)
        if config.streaming or callable(train):
            stream = self._stream(train)
            self.train_loader: BatchedDataLoader | StreamLoader = stream
            self.train_dataset: ProcessedDataset = stream.first_block
        else:
            sources = load_sources(train, config.train)
            if not sources:
                raise ConfigError(NO_SOURCE)
            if not held_out and config.split_validation_size:
                sources, held_out = set_aside(
                    sources, config.split_validation_size, seed
                )
            held_out = _limited(held_out, max_val_rows)
            self._note(sources, "train")
            # After the limit on validation rows: only those that are measured can be
            # leaked.
            sources = self._without_overlaps(sources, held_out)
            self._sources = {s.title: self._processed(s) for s in sources}
            self.train_dataset = _joined(self._sources.values())
            loader = self._train_loader(sources)
            loader.fingerprint = joint_fingerprint(self.provenance)
            self.train_loader = loader
        self._note(held_out, "validation")
        self.validation_datasets = {
            source.title: self._processed(source)
            for source in _limited(held_out, max_val_rows)
        }
        """The held-out rows of each source; "" is the name of a single one."""
        self.validation_dataset: ProcessedDataset | None = None
        """All held-out rows."""
        if held_out:
            self.validation_dataset = _joined(self.validation_datasets.values())
        _logger.info(
            "data: %s",
            ", ".join(f"{name} {count}" for name, count in self.counts().items()),
        )

    def _note(self, sources: list[LoadedSource], part: str) -> None:
        """Log which rows were read."""
        records = [record_of(source, part) for source in sources]
        self.provenance += records
        for record in records:
            _logger.info("data source: %s", record)

    def _without_overlaps(
        self, sources: list[LoadedSource], held_out: list[LoadedSource]
    ) -> list[LoadedSource]:
        """Return the sources, without leaking rows if the action is `drop`."""
        config = self.config.contamination
        if config.action == "ignore" or not held_out:
            return sources
        parts = _told_apart(sources)
        overlaps = find_overlaps(
            parts,
            _told_apart(held_out),
            self.config,
            ngram=config.ngram,
        )
        self._num_contaminated = len(overlaps)
        if not overlaps:
            return sources
        found = describe_overlaps(overlaps)
        if config.action == "error":
            raise ContaminationError(
                f"{found}; hold out other rows, or set data.contamination.action to "
                "drop, which removes these training rows"
            )
        if config.action == "warn":
            _logger.warning(
                "%s, so results on them also reflect memorised rows; "
                "data.contamination.action=drop removes these training rows",
                found,
            )
            return sources
        _logger.warning("%s; these training rows are left out", found)
        return [
            replace(source, rows=rows_without(part, overlaps))
            for source, part in zip(sources, parts, strict=True)
        ]

    def _check_pass_rates(self, *, is_stream: bool) -> None:
        if self.config.pass_rate_filter is None:
            return
        if is_stream:
            raise ConfigError(
                "data.pass_rate_filter knows prompts by their position in the data, "
                "which a stream does not have: give rows instead of a function, or "
                "leave it out (null)"
            )
        if self._kind != "prompts":
            raise ConfigError(
                "data.pass_rate_filter is for prompts whose answers are sampled: got "
                f"{self._kind}; leave it out (null)"
            )

    def _train_loader(self, sources: list[LoadedSource]) -> BatchedDataLoader:
        config, order = self.config, None
        weights = [source.weight for source in sources if source.weight is not None]
        if weights:
            sizes = [len(dataset) for dataset in self._sources.values()]
            order = MixtureOrder(
                sizes, weights, seed=self._seed, shuffle=config.shuffle
            )
        if config.pass_rate_filter is not None:
            self.pass_rates = PassRateFilter(
                config.pass_rate_filter, self.train_dataset
            )
        return BatchedDataLoader(
            self.train_dataset,
            self._batch_size,
            shuffle=config.shuffle,
            seed=self._seed,
            drop_last=self._drops_last(),
            endless=self._endless,
            collate_fn=self.collate,
            order=order,
            pass_rates=self.pass_rates,
            name=f"training dataset {self.train_dataset.name}",
        )

    def _drops_last(self) -> bool:
        num_rows = len(self.train_dataset)
        if self.config.drop_last is not None:
            return self.config.drop_last
        if 0 < num_rows < self._batch_size:
            _logger.warning(
                "dataset %s has %d rows, fewer than a step takes (%d): each step takes "
                "all of them; lower %s, or give it more rows",
                self.train_dataset.name,
                num_rows,
                self._batch_size,
                _BATCH_KEYS[self._kind],
            )
        # A dataset smaller than a batch would otherwise never give one.
        return num_rows >= self._batch_size

    def _stream(self, train: Any) -> StreamLoader:
        if train is None and (self.config.train is None or not self.config.train.path):
            raise ConfigError(f"{NO_SOURCE} (a stream has no tasks)")
        return StreamLoader(
            RowStream(train, self.config.train if train is None else None),
            self._batch_size,
            process=self._process,
            block_rows=self.config.streaming_shuffle_rows,
            shuffle=self.config.shuffle,
            seed=self._seed,
            drop_last=self.config.drop_last is not False or self._endless,
            collate_fn=self.collate,
        )

    def validation_loader(self) -> BatchedDataLoader | ValidationParts | None:
        """Return new loaders of the validation rows in their original order.

        Several sources give `ValidationParts`.
        """
        loaders = {
            title: self._held_out_loader(title) for title in self.validation_datasets
        }
        if len(loaders) < 2:
            return next(iter(loaders.values()), None)
        sizes = {title: len(rows) for title, rows in self.validation_datasets.items()}
        return ValidationParts(loaders, sizes)

    def _held_out_loader(self, title: str) -> BatchedDataLoader:
        return BatchedDataLoader(
            self.validation_datasets[title],
            self._val_batch_size,
            collate_fn=self.collate,
            name=f"validation dataset {title}".strip(),
        )

    def counts(self) -> dict[str, int]:
        """Return the numbers of rows used, dropped and truncated, as metrics.

        For a stream, only the rows currently held are counted.
        """
        counts = {
            "num_train_rows": len(self.train_dataset),
            "num_train_overlong": self.train_dataset.num_overlong,
        }
        if self.validation_dataset is not None:
            counts["num_validation_rows"] = len(self.validation_dataset)
            counts["num_validation_overlong"] = self.validation_dataset.num_overlong
        if self._num_contaminated:
            counts["num_train_contaminated"] = self._num_contaminated
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data."""
        return dict(self.train_loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position."""
        self.train_loader.load_state_dict(state)

    def _process(self, rows: Rows, name: str) -> ProcessedDataset:
        data = _PROCESS[self._kind](
            rows,
            self._tokenizer,
            self.config,
            max_length=self._max_length,
            name=name,
        )
        unknown = (
            # One warning is enough: all sources share the tokenizer.
            None if self._has_warned else unknown_prompts(data, self._tokenizer, name)
        )
        if unknown is not None:
            self._has_warned = True
            _logger.warning(unknown)
        return data

    def _processed(self, source: LoadedSource) -> ProcessedDataset:
        """Process one source; rows of a mixture carry the name of their source."""
        data = self._process(source.rows, source.name)
        if source.title:
            for datum in data:
                # A column of that name in the data wins.
                datum["extra_env_info"].setdefault("dataset_name", source.title)
        return data

    def _collator(self, multiple: int) -> Callable[[list[Any]], Any]:
        pad = pad_token_id(self._tokenizer)
        if self._kind == "prompts":
            return partial(rl_collate_fn, pad_token_id=pad)
        if self._kind == "preferences":
            return PreferenceCollator(pad, multiple)
        return SFTCollator(pad, multiple)


def _limited(held_out: list[LoadedSource], max_rows: int | None) -> list[LoadedSource]:
    """Return equal parts of the sources, together at most a number of rows."""
    if max_rows is None or not held_out:
        return held_out
    # At least one row each, as a set without rows has no metrics.
    each = max(max_rows // len(held_out), 1)
    return [source.first(each) for source in held_out]


def _told_apart(sources: list[LoadedSource]) -> list[NamedRows]:
    """Return the rows of the sources under names that differ."""
    counts = Counter(source.name for source in sources)
    return [
        NamedRows(
            # Two parts of a mixture may be of one path, as two splits of a data set.
            f"{source.name} ({source.title})"
            if counts[source.name] > 1
            else source.name,
            source.rows,
        )
        for source in sources
    ]


def _smaller(a: int | None, b: int | None) -> int | None:
    given = [value for value in (a, b) if value is not None]
    return min(given) if given else None


def _joined(datasets: Iterable[ProcessedDataset]) -> ProcessedDataset:
    """Concatenate datasets."""
    parts = list(datasets)
    if len(parts) == 1:
        return parts[0]
    return ProcessedDataset(
        [row for part in parts for row in part],
        name=" + ".join(part.name for part in parts),
        num_source_rows=sum(part.num_source_rows for part in parts),
        num_overlong=sum(part.num_overlong for part in parts),
        max_length=parts[0].max_length,
    )
