"""The number passed to hooks, which callbacks of an earlier form use as the state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.trainers.run.state import TrainerState

__all__ = ["CountWithState", "takes_state_only"]

_WITHOUT_METRICS = 2


class CountWithState(int):
    """Number of a step or an epoch; works as the state once did, with a warning."""

    _state: TrainerState

    def __new__(cls, number: int, state: TrainerState) -> CountWithState:
        """Create the number for a run in this state."""
        made = super().__new__(cls, number)
        object.__setattr__(made, "_state", state)
        return made

    def __getattr__(self, name: str) -> Any:
        """Return the state's attribute of this name."""
        if name.startswith("__") or not hasattr(self._state, name):
            raise AttributeError(
                f"a hook gets the number of the step or epoch, which has no {name!r}",
                name=name,
                obj=self,
            )
        _warn(name)
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the state's attribute of this name."""
        _warn(name)
        setattr(self._state, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain number."""
        return int, (int(self),)


def _warn(name: str) -> None:
    warnings.warn(
        f"hooks get a number in place of the state: read trainer.state.{name}; the "
        "next release has no other way",
        DeprecationWarning,
        stacklevel=3,
    )


def takes_state_only(method: Callable[..., Any]) -> bool:
    """Detect an `on_epoch_end` of the earlier form, (trainer, state), and warn."""
    try:
        inspect.signature(method).bind(*[None] * (_WITHOUT_METRICS + 1))
    except TypeError:
        warnings.warn(
            f"{method.__qualname__} must take (trainer, epoch, metrics); without "
            "metrics it works in this release only",
            DeprecationWarning,
            stacklevel=2,
        )
        return True
    return False
