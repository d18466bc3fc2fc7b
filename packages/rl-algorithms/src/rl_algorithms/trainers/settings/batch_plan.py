"""`BatchPlan`: the batch sizes of a step, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rl_distributed.errors import ConfigError

__all__ = ["BatchPlan"]


@dataclass(frozen=True)
class BatchPlan:
    """Division of a step's rows into optimizer steps, ranks and micro-batches.

    Raises:
        ConfigError: The sizes do not divide.
    """

    num_prompts: int
    """Number of rows that the data loader returns per step."""
    num_generations: int
    """Number of answers per row; 1 if nothing is sampled."""
    global_batch_size: int
    """Number of rows per optimizer step, over all ranks."""
    num_ranks: int
    """Number of data-parallel training workers."""
    micro_batch_size: int
    """Number of rows per forward pass on one rank."""

    def __post_init__(self) -> None:
        samples, size = self.num_samples, self.global_batch_size
        if samples % size:
            lower = max(d for d in range(1, min(size, samples) + 1) if samples % d == 0)
            raise ConfigError(
                "policy.train_global_batch_size must divide the samples of a step "
                f"({self._samples_text()}): got {size}; use {lower} or {samples}"
            )
        if size % self.num_ranks:
            below = size - size % self.num_ranks
            near = f"{below} or " if below else ""
            raise ConfigError(
                "policy.train_global_batch_size must be a multiple of the number of "
                f"training workers: got {size} with {self.num_ranks}; use {near}"
                f"{below + self.num_ranks}"
            )

    @property
    def num_samples(self) -> int:
        """Number of rows to train on per step."""
        return self.num_prompts * self.num_generations

    @property
    def num_optimizer_steps(self) -> int:
        """Number of optimizer steps per step of the algorithm."""
        return self.num_samples // self.global_batch_size

    def rows_for(self, num_rows: int) -> tuple[int, int]:
        """Return (rows with padding, rows per optimizer step) for a smaller batch.

        A step may have fewer rows than planned: at the end of an epoch, or because
        groups were dropped. The number of optimizer steps stays the same as long as
        each gets a row, so that learning rate schedules do not depend on drops.

        Args:
            num_rows: Actual number of rows, at least one.
        """
        steps = min(self.num_optimizer_steps, num_rows)
        per_step = -(-num_rows // steps)
        # Rounded up, as each rank gets the same number of rows.
        per_step += -per_step % self.num_ranks
        return per_step * steps, per_step

    def describe(self) -> str:
        """Return a one-line description of the sizes."""
        per_rank = self.global_batch_size // self.num_ranks
        micro = -(-per_rank // self.micro_batch_size)
        return (
            f"a step has {self._samples_text()}; {self.num_optimizer_steps} optimizer "
            f"step(s) of {self.global_batch_size} rows; {self.num_ranks} training "
            f"worker(s) with {per_rank} rows each, in about {micro} micro-batch(es) "
            f"of {self.micro_batch_size}"
        )

    def _samples_text(self) -> str:
        if self.num_generations == 1:
            return f"{self.num_samples} samples"
        return (
            f"{self.num_prompts} prompts x {self.num_generations} generations = "
            f"{self.num_samples} samples"
        )
