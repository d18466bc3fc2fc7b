"""Cache of the answers' log-probs under the reference policy.

```
rows --digest--> known? --no--> the policy, while its weights are the reference's
                   |                                 |
                   +---- yes ---> column <--- sums --+--> file in the run folder
```

A row's digest covers its tokens and its mask. Other epochs, a resumed run and other
batch sizes therefore find earlier results, but other data do not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from rl_distributed.logs.logging import get_logger
from rl_models.config import PolicyConfig
from rl_models.types import TrainingRows

__all__ = ["ReferenceLogprobs", "answer_logprobs", "reference_identity"]

_logger = get_logger(__name__)
_DIGEST_BYTES = 16


class ReferenceLogprobs:
    """Sums of log-probs over answers, by the content of the rows.

    Args:
        file: File of the cache.
        identity: Identity of the reference, see `reference_identity`; a file of another
            reference is ignored.
    """

    def __init__(self, file: Path, identity: str) -> None:
        self._file, self._identity = file, identity
        self._sums = self._read()

    def __len__(self) -> int:
        return len(self._sums)

    def add(
        self,
        batches: Iterable[TrainingRows],
        compute: Callable[[TrainingRows], Tensor],
    ) -> int:
        """Compute missing log-probs, and write the file.

        Args:
            batches: Rows that will be needed.
            compute: Returns the [N] sums of N rows.

        Returns:
            Number of computed rows.
        """
        before = len(self._sums)
        try:
            for batch in batches:
                missing: dict[bytes, int] = {}
                for row, digest in enumerate(_digests(batch)):
                    if digest not in self._sums:
                        # The same answer may occur several times in a batch, and is
                        # computed once.
                        missing.setdefault(digest, row)
                if missing:
                    rows = batch.select_indices(list(missing.values()))
                    values = compute(rows).double().tolist()
                    self._sums.update(zip(missing, values, strict=True))
        finally:
            # Also after an interruption, so that the work so far is not repeated.
            if len(self._sums) > before:
                self._write()
        return len(self._sums) - before

    def column(self, rows: TrainingRows) -> Tensor:
        """Return the [N] float64 sums of rows.

        Raises:
            KeyError: A row has not been computed.
        """
        values = [self._sums[digest] for digest in _digests(rows)]
        return torch.tensor(values, dtype=torch.float64)

    def knows(self, batches: Iterable[TrainingRows]) -> bool:
        """Return whether all rows are known."""
        return all(d in self._sums for batch in batches for d in _digests(batch))

    def _read(self) -> dict[bytes, float]:
        if not self._file.exists():
            return {}
        try:
            with np.load(self._file) as stored:
                if str(stored["identity"]) != self._identity:
                    _logger.warning(
                        "%s belongs to another reference policy: log-probs are "
                        "computed again",
                        self._file,
                    )
                    return {}
                digests, sums = stored["digests"], stored["sums"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            _logger.warning("%s cannot be read (%s)", self._file, error)
            return {}
        return {
            digest.tobytes(): float(value)
            for digest, value in zip(digests, sums, strict=True)
        }

    def _write(self) -> None:
        """Write the file atomically."""
        temporary = self._file.with_name(self._file.name + ".tmp")
        digests = np.frombuffer(b"".join(self._sums), dtype=np.uint8)
        with open(temporary, "wb") as file:
            np.savez(
                file,
                identity=np.array(self._identity),
                digests=digests.reshape(-1, _DIGEST_BYTES),
                sums=np.array(list(self._sums.values()), dtype=np.float64),
            )
            file.flush()
            # Before the rename: after a crash the new name might otherwise hold an
            # empty file.
            os.fsync(file.fileno())
        os.replace(temporary, self._file)


def _digests(rows: TrainingRows) -> list[bytes]:
    """Return one digest per row, independent of padding and of other rows."""
    # One dtype, so that the digest does not depend on how a collator stored the tokens.
    ids = rows["input_ids"].numpy().astype(np.int64, copy=False)
    mask = (rows["token_mask"] != 0).numpy()
    lengths = rows["input_lengths"].tolist()
    found = []
    for row, length in enumerate(lengths):
        digest = hashlib.blake2b(ids[row, :length].tobytes(), digest_size=_DIGEST_BYTES)
        digest.update(mask[row, :length].tobytes())
        found.append(digest.digest())
    return found


def answer_logprobs(logprobs: Tensor, rows: TrainingRows) -> Tensor:
    """Return [N] float64 sums of [N, S] log-probs over each row's trained tokens."""
    learned = rows["token_mask"] != 0
    # float64, because sums over long answers are large compared to their differences.
    return torch.where(learned, logprobs, 0.0)[:, 1:].sum(-1, dtype=torch.float64)


def reference_identity(config: PolicyConfig) -> str:
    """Return a string that identifies weights and computation of the log-probs.

    A model folder is identified by the names, sizes and times of its files, because
    hashing the weights would take longer than loading them.
    """
    folder = Path(config.model_name).expanduser()
    files = []
    if folder.is_dir():
        # iterdir has no order, and the identity must be the same in a resumed run.
        for path in sorted(folder.iterdir()):
            # Only weights and configuration: a README that changes must not cost the
            # cache.
            if path.suffix in (".safetensors", ".json", ".bin"):
                stat = path.stat()
                files.append([path.name, stat.st_size, stat.st_mtime_ns])
    return json.dumps(
        {
            "model": config.model_name,
            "files": files,
            "overrides": config.hf_config_overrides,
            "precision": config.precision,
            "temperature": config.logprob_temperature,
        },
        sort_keys=True,
    )
