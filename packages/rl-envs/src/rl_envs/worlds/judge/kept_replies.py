"""Storage of replies, so that repeated questions cost nothing."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_envs.errors import JudgeError

__all__ = ["KeptReplies", "key_of"]

# Writes are short; another process holds the lock for milliseconds.
_LOCK_DEADLINE_S = 30.0


def key_of(request: Mapping[str, Any], vote: int) -> str:
    """Return the key of a request, a hash of everything that the reply depends on.

    Args:
        request: Address, model, messages and sampling.
        vote: Index among several replies to the same request.
    """
    # Sorted: the key must not depend on the order in which a request was built.
    text = json.dumps({"request": request, "vote": vote}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class KeptReplies:
    """A table of replies in a file that processes of one machine may share.

    Args:
        folder: Folder of the file; None: in memory.

    Raises:
        JudgeError: The folder cannot be written, or the file is not a database.
    """

    def __init__(self, folder: str | None) -> None:
        place = ":memory:"
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                place = str(Path(folder) / "judge-replies.sqlite")
            # The thread of the requests uses it, too, but never at the same time.
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
        """Return the kept reply to a request; None: there is none."""
        row = self._table.execute(
            "select reply from replies where key = ?", (key,)
        ).fetchone()
        return None if row is None else str(row[0])

    def keep(self, replies: Mapping[str, str]) -> None:
        """Store replies by their keys."""
        with self._table:
            # "or ignore": another process may have asked the same question meanwhile.
            self._table.executemany(
                "insert or ignore into replies values (?, ?)", list(replies.items())
            )

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._table.close()
