"""Extension of vLLM's workers in a server: weights from a model folder.

vLLM imports this module in the process that holds the model.
"""

from __future__ import annotations

from typing import Any

from rl_models.errors import WeightSyncError
from rl_models.generation.vllm.extension import WeightExtension
from rl_models.serving.folder_weights import verified_tensors
from rl_models.serving.recent_errors import RecentErrors

__all__ = ["ServingExtension"]

# Installed at import, because an engine may fail on its first request.
_errors = RecentErrors("vllm")


class ServingExtension(WeightExtension):
    """Methods that vLLM mixes into its worker; called by `collective_rpc`."""

    def rl_load_folder(self, folder: str, entries: list[tuple[str, list[Any]]]) -> str:
        """Replace all weights by those of a model folder, verified.

        Args:
            folder: The folder.
            entries: Its expected tensors, see `FolderWeights.to_plain`.

        Returns:
            The problem, or an empty string once all are loaded. It is no exception,
            because that would lose its type between processes.
        """
        try:
            self.rl_load_weights(verified_tensors(folder, entries))
        except WeightSyncError as error:
            return str(error)
        return ""

    def rl_errors_since(self, time_s: float) -> list[str]:
        """Return the engine's error lines since a time of `time.time()`."""
        return _errors.since(time_s)
