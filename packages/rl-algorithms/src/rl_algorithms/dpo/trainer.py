"""The trainer of direct preference optimization.

```
pairs -> [log-probs of the reference, once] -> rows -> train
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.dpo.config import DPOConfig, DPOSettings
from rl_algorithms.dpo.reference import (
    ReferenceLogprobs,
    answer_logprobs,
    reference_identity,
)
from rl_algorithms.losses.dpo import DPOLossFn
from rl_algorithms.trainers.pair_trainer import PairTrainer
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.setup.starting import resume_paths
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_models.types import TrainingRows

__all__ = ["DPOTrainer"]

_logger = get_logger(__name__)
_CACHE_FILE = "reference_logprobs.npz"
# An interruption loses the results of one call at most.
_PAIRS_PER_CALL = 512


class DPOTrainer(PairTrainer[DPOConfig]):
    """Direct preference optimization and variants (Rafailov, arXiv:2305.18290)."""

    algorithm: ClassVar[str] = "dpo"
    config_class: ClassVar[type[DPOConfig]] = DPOConfig
    loss_parts: ClassVar[tuple[str, ...]] = ("loss", "preference_loss", "sft_loss")

    @property
    def _pairs(self) -> DPOSettings:
        return self.config.dpo

    def _needs(self, has_environment: bool) -> Needs:
        return Needs(reference_policy=not self._precomputes)

    @property
    def _precomputes(self) -> bool:
        return self.config.dpo.precompute_reference_logprobs

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        if self._precomputes and (self.config.data.streaming or callable(dataset)):
            raise ConfigError(
                "dpo.precompute_reference_logprobs needs all pairs before the first "
                "step, which a stream (data.streaming) does not have: set it to false"
            )
        return super()._load_data(dataset, val_dataset)

    def _build_loss(self) -> DPOLossFn:
        return DPOLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._reference: ReferenceLogprobs | None = None

    def _complete(self, rows: TrainingRows) -> None:
        rows["reference_policy_logprobs"] = self._reference_logprobs(rows)

    # The reference --------------------------------------------------------------

    def _reference_logprobs(self, rows: TrainingRows) -> Tensor:
        """Return [2 B], the reference's sums over the answers."""
        if not self._precomputes:
            with self.phase("reference_logprobs"):
                policy = self.components.required.policy
                found = policy.get_reference_policy_logprobs(rows)
                return answer_logprobs(found["reference_logprobs"], rows)
        if self._reference is None:
            self._reference = self._precompute()
        return self._reference.column(rows)

    def _precompute(self) -> ReferenceLogprobs:
        """Compute log-probs that the run folder lacks, with the initial weights."""
        config = self.config.policy
        known = ReferenceLogprobs(
            self.run_dir / _CACHE_FILE, reference_identity(config)
        )
        if known.knows(self._all_pairs()):
            return known
        with self.phase("reference_logprobs"):
            policy = self.components.required.policy
            checkpoint = self.state.last_checkpoint
            resumed = self.state.step > 0 and checkpoint is not None
            if resumed:
                # A resumed policy has been trained: load the initial weights for this,
                # and its own again afterwards.
                policy.load_checkpoint(config.model_name)
            try:
                added = known.add(self._all_pairs(), self._policy_logprobs)
            finally:
                if checkpoint is not None and resumed:
                    # In `finally`: an error must not leave the initial weights in the
                    # policy.
                    policy.load_checkpoint(*resume_paths(Path(checkpoint)))
        _logger.info("computed reference log-probs of %d rows", added)
        return known

    def _policy_logprobs(self, rows: TrainingRows) -> Tensor:
        found = self.components.required.policy.get_logprobs(rows)
        return answer_logprobs(found["logprobs"], rows)

    def _all_pairs(self) -> Iterator[TrainingRows]:
        """Yield all pairs of the run, ordered by length to save padding."""
        # Validation pairs too: later the policy is trained, and their reference would
        # be gone.
        for dataset in (self._data.train_dataset, self._data.validation_dataset):
            pairs: Sequence[Any] = sorted(dataset or (), key=lambda p: p["length"])
            for first in range(0, len(pairs), _PAIRS_PER_CALL):
                yield self._data.collate(list(pairs[first : first + _PAIRS_PER_CALL]))
