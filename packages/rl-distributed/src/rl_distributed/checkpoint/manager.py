"""`CheckpointManager`: atomic step folders.

A step folder appears by a single rename, after everything in it is durable. The process
may be killed at any moment: a folder found afterwards is whole, has no manifest, or is
not named as a step (`folders` has the names). Leftovers are removed when the next
checkpoint is begun, so that reading a folder never changes it.

A lock (`writer_lock`) ensures that one process writes to a folder; any number may read.
`begin_finalization` moves the end of the work to a thread (`finalization_thread`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from rl_distributed.checkpoint.config import CheckpointingConfig
from rl_distributed.checkpoint.finalization_thread import FinalizationThread
from rl_distributed.checkpoint.folders import StepFolders
from rl_distributed.checkpoint.inspection import Inspector, read_training_info
from rl_distributed.checkpoint.manifest import verify, write_manifest
from rl_distributed.checkpoint.retention import (
    RankingMetric,
    metric_of,
    rank,
    steps_to_keep,
)
from rl_distributed.checkpoint.storage import (
    disk_is_full,
    encode_training_info,
    fsync_path,
    fsync_tree,
    remove_tree,
    write_error,
)
from rl_distributed.checkpoint.writer_lock import FolderWriter
from rl_distributed.errors import CheckpointError, ConfigError
from rl_distributed.logs.logging import get_logger
from rl_distributed.process.closing import close_after
from rl_distributed.redaction import redacted
from rl_distributed.security.audit import audit

__all__ = ["CheckpointManager"]

PathLike = str | os.PathLike[str]

_logger = get_logger(__name__)


class CheckpointManager:
    """Writes, finds, ranks and prunes the checkpoints of one run.

    Leaving it as a context manager finishes a pending checkpoint; if that fails after
    the block has raised, the block's error stays and the failure becomes a warning.

    The first checkpoint makes this the folder's only writer, until `shutdown` or the
    end of the process; reading needs no such right.

    Args:
        config: The settings.
        checkpoint_dir: The folder to use where the configuration names none.

    Raises:
        ConfigError: No folder is known.
    """

    def __init__(
        self, config: CheckpointingConfig, checkpoint_dir: PathLike | None = None
    ) -> None:
        folder = (
            config.checkpoint_dir
            if config.checkpoint_dir is not None
            else checkpoint_dir
        )
        if folder is None:
            raise ConfigError(
                "checkpointing.checkpoint_dir must name a folder: got None, and the "
                "program gave none"
            )
        self.config = config
        self.checkpoint_dir = Path(folder)
        self._folders = StepFolders(self.checkpoint_dir)
        self._inspector = Inspector(self._folders)
        self._ranking = RankingMetric(config.metric_name)
        # Changed by the finalization thread too; each change is one atomic operation.
        self._open: set[Path] = set()
        self._writer = FolderWriter(self.checkpoint_dir, self._open)
        self._background = FinalizationThread(self.checkpoint_dir)

    # Writing ------------------------------------------------------------------

    def init_tmp_checkpoint(
        self,
        step: int,
        training_info: Mapping[str, Any],
        run_config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Begin the checkpoint of a step and return the folder to write to.

        Args:
            step: The step, not negative.
            training_info: State of the training loop and metrics, as plain values. A
                ranking metric that is None was not measured at this step, and the
                checkpoint ranks last; a missing one causes a single warning.
            run_config: The resolved configuration of the run, for readers; secrets
                in it are replaced by `***`.

        Raises:
            CheckpointError: The folder cannot be written, another process writes to it
                (the message names that), or a value has no JSON form.
        """
        if step < 0:
            raise CheckpointError(f"checkpoint step must not be negative: got {step}")
        self._ranking.check(step, training_info)
        path = self._folders.being_written(step)
        info = encode_training_info(training_info)
        # Before anything is removed, as another process may be writing it.
        with self._naming(path):
            self._writer.claim()
        with self._cleaning_up(path):
            self._folders.remove_leftovers(self._open)
            remove_tree(path)
            path.mkdir()
            (path / "training_info.json").write_bytes(info)
            if run_config is not None:
                text = yaml.safe_dump(redacted(dict(run_config)), sort_keys=False)
                (path / "config.yaml").write_text(text, encoding="utf-8")
        self._open.add(path)
        return path

    def finalize_checkpoint(self, checkpoint_path: PathLike) -> Path:
        """Make a begun checkpoint durable and valid, then prune old ones.

        A valid checkpoint of the same step is replaced. If anything fails, the begun
        one is removed and all older ones stay.

        Returns:
            The step folder.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        path = Path(checkpoint_path)
        step = self._folders.step_being_written(path)
        final, old = self._folders.final(step), self._folders.replaced(step)
        with self._naming(path):
            # Claimed again, as another manager of this process may have
            # taken over since.
            self._writer.claim()
        with self._cleaning_up(path):
            # The files must be on disk before the manifest that vouches for them.
            fsync_tree(path)
            write_manifest(path)
            if final.exists():
                remove_tree(old)
                # One rename cannot replace a folder; in between,
                # `candidates` finds the old one.
                final.rename(old)
            path.rename(final)
            # Without this, a power failure could undo the renames.
            fsync_path(self.checkpoint_dir)
        try:
            # Its digests were just computed from these files.
            self._inspector.mark_verified(final)
            audit("checkpoint.saved", str(final), step=step)
            if old.exists():
                self._remove(old, step)
            self.remove_old_checkpoints()
        finally:
            # The new step is valid, even if the old ones cannot be removed.
            self._open.discard(path)
        return final

    @contextlib.contextmanager
    def writing(
        self,
        step: int,
        training_info: Mapping[str, Any],
        run_config: Mapping[str, Any] | None = None,
    ) -> Iterator[Path]:
        """Write a checkpoint in a block: finalized at its end, removed if it raises.

        Raises:
            CheckpointError: The disk is full, in this process or in a worker that
                writes to the folder, or the checkpoint cannot be written.
        """
        path = self.init_tmp_checkpoint(step, training_info, run_config)
        with self._cleaning_up(path):
            yield path
        self.finalize_checkpoint(path)

    @contextlib.contextmanager
    def _cleaning_up(self, path: Path) -> Iterator[None]:
        """Remove a begun checkpoint if the block fails; name the path and a remedy."""
        with self._naming(path):
            try:
                yield
            except BaseException:
                # The failed write is the error to report.
                with contextlib.suppress(OSError):
                    remove_tree(path)
                self._open.discard(path)
                raise

    @contextlib.contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        """Turn a failed write into an error that names the path and a remedy."""
        try:
            yield
        except Exception as error:
            own = isinstance(error, CheckpointError)
            if not own and (isinstance(error, OSError) or disk_is_full(error)):
                last = self._inspector.newest_whole(digests=False)
                raise write_error(path, error, last) from error
            raise

    # Writing in the background --------------------------------------------------

    @property
    def has_pending_finalization(self) -> bool:
        """Whether a checkpoint was handed over and not waited for yet."""
        return self._background.is_pending

    def begin_finalization(
        self, checkpoint_path: PathLike, wait_fn: Callable[[], object] | None = None
    ) -> None:
        """Finalize in a thread, once `wait_fn` (say, of an asynchronous save) returns.

        A checkpoint that is still pending is waited for first.

        Raises:
            CheckpointError: The pending one could not be written.
        """
        self.finalize_pending()

        def finalize() -> Path:
            if wait_fn is not None:
                with self._cleaning_up(Path(checkpoint_path)):
                    wait_fn()
            return self.finalize_checkpoint(checkpoint_path)

        self._background.begin(finalize)

    def finalize_pending(self, deadline_s: float = 1800.0) -> Path | None:
        """Wait for the pending checkpoint and return its folder; None if there is none.

        Raises:
            CheckpointError: It could not be written.
            DeadlineExceededError: It is not finished in time; it stays pending.
        """
        return self._background.wait(deadline_s)

    def shutdown(self, deadline_s: float = 1800.0) -> None:
        """Finish the pending checkpoint, end the thread and let others write.

        Raises:
            CheckpointError: The pending checkpoint could not be written.
            DeadlineExceededError: It is not finished in time; it stays pending, and
                nobody else can write.
        """
        try:
            self.finalize_pending(deadline_s)
        finally:
            self._background.end()
            if not self._background.is_pending:
                self._writer.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        what = f"the checkpoints in {self.checkpoint_dir}"
        close_after(error, self.shutdown, what)

    # Finding --------------------------------------------------------------------

    def get_latest_checkpoint_path(self) -> Path | None:
        """Return the newest whole checkpoint, or None.

        Contents are compared with their digests. A damaged checkpoint is left in place
        and reported together with the one used instead, the next older whole one.
        """
        return self._inspector.newest_whole(digests=True)

    def get_best_checkpoint_path(self) -> Path | None:
        """Return the whole checkpoint with the best metric, or None.

        Ties go to the newer one. Without the metric, or where no checkpoint has it,
        this is the newest.
        """
        whole = self._inspector.whole()
        metrics = self._metrics(whole)
        name = self.config.metric_name
        if name is not None and metrics and set(metrics.values()) == {None}:
            _logger.warning(
                "no checkpoint in %s has the metric %r: the newest counts as the best",
                self.checkpoint_dir,
                name,
            )
        for step in rank(metrics, higher_is_better=self.config.higher_is_better):
            # The writer may have removed it since.
            if self._inspector.is_whole(whole[step], digests=True):
                return whole[step]
        return None

    def load_training_info(
        self, checkpoint_path: PathLike | None = None
    ) -> dict[str, Any] | None:
        """Return the training information of a checkpoint; None if there is none.

        Args:
            checkpoint_path: The checkpoint; None: the newest whole one.

        Raises:
            CheckpointError: The checkpoint is incomplete or damaged. Contents of other
                files are not compared; `verify` does that.
        """
        if checkpoint_path is None:
            checkpoint_path = self.get_latest_checkpoint_path()
            if checkpoint_path is None:
                return None
        return read_training_info(Path(checkpoint_path))

    def get_resume_paths(
        self,
        last_checkpoint_path: PathLike | None,
        model_component: str = "policy",
    ) -> tuple[Path | None, Path | None]:
        """Return the folders of weights and optimizer to resume from.

        Args:
            last_checkpoint_path: The checkpoint; None: nothing to resume from.
            model_component: The model's folder in the checkpoint.

        Returns:
            Both paths; the second is None where no optimizer was saved.

        Raises:
            CheckpointError: The checkpoint has no weights of this component.
        """
        if last_checkpoint_path is None:
            return None, None
        root = Path(last_checkpoint_path)
        weights = root / model_component / "weights"
        optimizer = root / model_component / "optimizer"
        if not weights.exists():
            found = sorted(path.parent.name for path in root.glob("*/weights"))
            raise CheckpointError(
                f"checkpoint {root} has no weights of {model_component!r}; it has "
                f"{found or 'none at all'}"
            )
        audit("checkpoint.restored", str(root), component=model_component)
        return weights, optimizer if optimizer.exists() else None

    def verify(self, checkpoint_path: PathLike) -> None:
        """Check that a checkpoint is whole, contents included.

        Raises:
            CheckpointError: It is incomplete or damaged; the message names the file.
        """
        verify(Path(checkpoint_path))

    def list_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by step, oldest first.

        Incomplete ones are reported and left out; contents are not compared with their
        digests.
        """
        return self._inspector.whole()

    # Pruning --------------------------------------------------------------------

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> list[Path]:
        """Remove the checkpoints that are neither among the best nor the newest.

        Damaged folders do not count and stay, as somebody may want to rescue
        something from them.

        Args:
            exclude_latest: Keep the newest ones even if they are not among the best.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: Another process writes to the folder.
        """
        with self._naming(self.checkpoint_dir):
            self._writer.claim()
        whole = self._inspector.whole()
        metrics = self._metrics(whole)
        keep = steps_to_keep(
            metrics,
            keep_top_k=self.config.keep_top_k,
            keep_latest_k=self.config.keep_latest_k,
            exclude_latest=exclude_latest,
            higher_is_better=self.config.higher_is_better,
        )
        gone: list[Path] = []
        for step in sorted(set(metrics) - keep):
            path = whole[step]
            if not self._remove(path, step):
                continue
            audit("checkpoint.deleted", str(path), step=step)
            gone.append(path)
        return gone

    def _remove(self, path: Path, step: int) -> bool:
        """Remove the folder of a step that is no longer needed; warn if that fails."""
        # Renamed first: a removal that is killed must not leave half a step.
        removed = self._folders.removed(step)
        try:
            # Leftovers of a killed removal would block the rename.
            remove_tree(removed)
            path.rename(removed)
            remove_tree(removed)
        except OSError as error:
            # A leftover step only takes up space; the save itself has succeeded.
            _logger.warning("old checkpoint %s cannot be removed: %s", path, error)
            return False
        return True

    def _metrics(self, whole: Mapping[int, Path]) -> dict[int, float | None]:
        """Return the ranking metric of each checkpoint whose files are all there.

        One whose training information is damaged is reported and left out.
        """
        infos = self._inspector.training_infos(whole)
        name = self.config.metric_name
        return {step: metric_of(info, name) for step, info in infos.items()}
