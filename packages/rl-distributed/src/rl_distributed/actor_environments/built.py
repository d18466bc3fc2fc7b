"""`BuiltEnvironment`: the base of all environments that rl-distributed builds."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.actor_environments.base import (
    ActorEnvironment,
    PreparedEnvironment,
    check_positive,
    driver_facts,
    isolated_runtime_env,
)
from rl_distributed.actor_environments.preflight import check_python
from rl_distributed.actor_environments.store import (
    EnvironmentStore,
    StoredEnvironment,
)

__all__ = ["BuiltEnvironment"]


@dataclass(frozen=True, kw_only=True)
class BuiltEnvironment(ActorEnvironment):
    """An environment that is built, once per node, in a folder named by its content."""

    build_deadline_s: float = 1_800.0
    """How long building it, or waiting for another process to do so, may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("build_deadline_s", self.build_deadline_s)

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return everything that its content depends on, as JSON values."""

    @abstractmethod
    def build(self, folder: Path, deadline_s: float) -> None:
        """Make it in `folder`, which does not exist yet and is renamed later."""

    def key(self) -> str:
        """Name of its folder: the label and a hash of all that it depends on."""
        content = {
            "way": type(self).__name__,
            **driver_facts(),
            # A virtual environment depends on the base interpreter that
            # it was made from.
            "base": str(Path(sys.base_prefix).resolve()),
            **self.fingerprint(),
        }
        text = json.dumps(content, sort_keys=True)
        name = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")[:48]
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Build it if it is not there, and check it.

        Raises:
            ActorEnvironmentError: it cannot be built, or is not fit for a worker.
            DeadlineExceededError: another process builds it for too long.
        """
        stored, build_s = EnvironmentStore(root).ensure(self)
        preflight_s = self._check(stored, recheck)
        return PreparedEnvironment(
            self.label,
            isolated_runtime_env(stored.python),
            stored.key,
            build_s,
            preflight_s,
        )

    def _check(self, stored: StoredEnvironment, recheck: bool) -> float:
        """Check it once, as it does not change when ready; return the seconds taken."""
        wanted = hashlib.sha256(json.dumps(self.imports).encode()).hexdigest()[:16]
        # Stored in the environment's folder, so that it is removed along with it.
        passed = stored.path / f".passed-{wanted}"
        if passed.exists() and not recheck:
            return 0.0
        took = check_python(
            [str(stored.python)],
            self.imports,
            self.preflight_deadline_s,
            self.label,
            recheck=recheck,
        )
        # The root may be read-only for this user.
        with suppress(OSError):
            passed.touch()
        return took
