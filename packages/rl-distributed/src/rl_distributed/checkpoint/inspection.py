"""Find the step folders that hold a whole checkpoint; nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_distributed.checkpoint.folders import StepFolders
from rl_distributed.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify
from rl_distributed.checkpoint.storage import read_bytes
from rl_distributed.errors import CheckpointError
from rl_distributed.logs.logging import get_logger
from rl_distributed.security.audit import audit

__all__ = ["Inspector", "read_training_info"]

_logger = get_logger(__name__)


class Inspector:
    """Distinguishes whole checkpoints from damaged ones; reports each damage once.

    Args:
        folders: The step folders.
    """

    def __init__(self, folders: StepFolders) -> None:
        self._folders = folders
        # Steps whose content this process wrote or has compared with its digests.
        self._verified: dict[Path, int] = {}
        self._reported: set[str] = set()

    def mark_verified(self, path: Path) -> None:
        """Note that the content of a checkpoint is known to be whole."""
        # With the manifest's modification time, as a step may be
        # rewritten under its name.
        self._verified[path] = (path / MANIFEST_NAME).stat().st_mtime_ns

    def newest_whole(self, *, digests: bool) -> Path | None:
        """Return the newest whole checkpoint; report the damaged ones passed over."""
        candidates = self._folders.candidates()
        damages: list[str] = []
        found = None
        for step in sorted(candidates, reverse=True):
            damage = self._damage(candidates[step], digests=digests)
            if damage is None:
                found = candidates[step]
                break
            damages.append(damage)
        instead = (
            "there is no whole one"
            if found is None
            else f"{found} is the newest whole one"
        )
        self._report(damages, instead)
        return found

    def whole(self) -> dict[int, Path]:
        """Return the checkpoints whose files are all there, oldest first.

        Their contents are not read.
        """
        return {
            step: path
            for step, path in self._folders.candidates().items()
            if self.is_whole(path, digests=False)
        }

    def training_infos(self, whole: Mapping[int, Path]) -> dict[int, dict[str, Any]]:
        """Return the training information of checkpoints; report those it is lost of.

        Args:
            whole: The result of `whole`.
        """
        found: dict[int, dict[str, Any]] = {}
        for step, path in whole.items():
            try:
                found[step] = read_training_info(path)
            # Sizes alone were compared, or the writer has removed it since.
            except (CheckpointError, FileNotFoundError) as error:
                self._report([str(error)], "it does not count")
        return found

    def is_whole(self, path: Path, *, digests: bool) -> bool:
        """Return whether a checkpoint is whole; damage is reported."""
        damage = self._damage(path, digests=digests)
        if damage is not None:
            self._report([damage], "it does not count")
        return damage is None

    def _report(self, damages: list[str], instead: str) -> None:
        for damage in damages:
            if damage not in self._reported:
                self._reported.add(damage)
                audit("checkpoint.refused", outcome="refused", damage=damage)
                _logger.warning("left out: %s; %s", damage, instead)

    def _damage(self, path: Path, *, digests: bool) -> str | None:
        """Return the damage of a checkpoint in words; None: it is whole."""
        try:
            read_manifest(path)
            known = self._verified.get(path)
            seen = known == (path / MANIFEST_NAME).stat().st_mtime_ns
            verify(path, digests=digests and not seen)
            if digests and not seen:
                self.mark_verified(path)
        # The writer may remove an old step during the inspection.
        except (CheckpointError, FileNotFoundError) as error:
            return str(error)
        return None


def read_training_info(root: Path) -> dict[str, Any]:
    """Read the training information of a checkpoint whose files are all there.

    Raises:
        CheckpointError: The checkpoint is incomplete, or the file is damaged.
    """
    file = root / "training_info.json"
    verify(root, digests=False)
    try:
        info = json.loads(read_bytes(file))
    except ValueError as error:
        raise CheckpointError(f"checkpoint file {file} is damaged") from error
    if not isinstance(info, dict):
        raise CheckpointError(f"checkpoint file {file} holds no mapping")
    return info
