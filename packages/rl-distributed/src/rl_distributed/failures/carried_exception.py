"""Carry the exception of a method to the driver as bytes.

An error loses its cause when it is pickled, and a class that only the worker can import
would take the whole error with it. So the cause travels beside the error, where it can.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from ray import cloudpickle

from rl_distributed.secret_variables import scrubbed

__all__ = ["pack_exception", "unpack_exception"]

# An exception that holds a batch, say, is not worth sending; the message has its text.
_MOST_BYTES = 1 << 20


def pack_exception(error: BaseException, variables: Mapping[str, str]) -> bytes:
    """Pickle an exception.

    Args:
        error: What was raised. Its own cause, context and traceback stay behind.
        variables: Those of the process. An exception that says the value of a secret
            among them is not carried: whoever handles it would show it.

    Returns:
        Empty where it cannot be pickled and read again, is large, or says a secret.
    """
    try:
        said = repr((error, str(error), vars(error)))
        if scrubbed(said, variables) != said:
            return b""
        # Classes of the driver's own program travel by value, and are the same there.
        packed: bytes = cloudpickle.dumps(error)
        if len(packed) > _MOST_BYTES or type(pickle.loads(packed)) is not type(error):
            return b""
    except Exception:
        # Its own methods may raise anything; without it, the error still says it all.
        return b""
    return packed


def unpack_exception(packed: bytes) -> BaseException | None:
    """Return the exception; None where there is none, or its class is not here."""
    if not packed:
        return None
    try:
        error = pickle.loads(packed)
    except Exception:
        # The worker's environment has packages that this one lacks.
        return None
    return error if isinstance(error, BaseException) else None
