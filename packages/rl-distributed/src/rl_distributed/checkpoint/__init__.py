"""Checkpoints that are whole or not there."""

from __future__ import annotations

from rl_distributed.checkpoint.config import CheckpointingConfig
from rl_distributed.checkpoint.manager import CheckpointManager
from rl_distributed.checkpoint.manifest import FileEntry, read_manifest, verify
from rl_distributed.checkpoint.storage import fsync_tree, write_bytes_durably

__all__ = [
    "CheckpointManager",
    "CheckpointingConfig",
    "FileEntry",
    "fsync_tree",
    "read_manifest",
    "verify",
    "write_bytes_durably",
]
