"""Replies that are kept, so that a repeated question costs nothing."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_envs.errors import JudgeError

__all__ = ["KeptReplies", "key_of"]

# Another process that writes is done long before.
_LOCK_DEADLINE_S = 30.0


def key_of(request: Mapping[str, Any], vote: int) -> str:
    """Return what a request is known by: everything that the reply depends on.

    Args:
        request: Address, model, messages and sampling.
        vote: Which of several replies to the same request.
    """
    text = json.dumps({"request": request, "vote": vote}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class KeptReplies:
    """A table of replies, in a file that processes of one machine may share.

    Args:
        folder: Where the file is; None: in memory.

    Raises:
        JudgeError: The folder cannot be written, or holds something else.
    """

    def __init__(self, folder: str | None) -> None:
        place = ":memory:"
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                place = str(Path(folder) / "judge-replies.sqlite")
            # Requests run in a thread of their own, one batch after the other.
            self._table = sqlite3.connect(
                place, timeout=_LOCK_DEADLINE_S, check_same_thread=False
            )
            self._table.execute(
                "create table if not exists replies (key text primary key, reply text)"
            )
            self._table.commit()
        except (OSError, sqlite3.Error) as error:
            raise JudgeError(
                f"cache_folder must be a folder that can be written: got {folder!r} "
                f"({error}); name another one, or leave it out"
            ) from error

    def get(self, key: str) -> str | None:
        """Return the reply to a request; None: it is not there."""
        row = self._table.execute(
            "select reply from replies where key = ?", (key,)
        ).fetchone()
        return None if row is None else str(row[0])

    def keep(self, replies: Mapping[str, str]) -> None:
        """Keep replies by their keys."""
        with self._table:
            self._table.executemany(
                "insert or ignore into replies values (?, ?)", list(replies.items())
            )

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._table.close()
