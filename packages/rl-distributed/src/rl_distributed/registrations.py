"""Send implementations that were registered in code to another process.

```
driver:  @register("mine") class Mine  --Registration-->  worker: adopt, get("mine")
```
A class of a module that other processes can import goes by its path, as it is imported
where it is used. One of the program itself, a notebook or a function goes by value.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rl_distributed.errors import RegistryError

__all__ = ["Registration"]


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered implementation, as another process gets it."""

    kind: str
    """What it is called in messages."""
    name: str
    path: str
    """`module:qualified.name`."""
    pickled: bytes | None = None
    """The implementation itself; None: it is imported from `path`."""

    @classmethod
    def of(cls, kind: str, name: str, implementation: Any) -> Registration:
        """Describe an implementation so that it can be sent.

        Raises:
            RegistryError: It goes by value, and something that it uses cannot be
                pickled.
        """
        module = str(getattr(implementation, "__module__", "") or "")
        qualname = str(getattr(implementation, "__qualname__", "") or "")
        path = f"{module}:{qualname}"
        if _can_be_imported(implementation, module, qualname):
            return cls(kind, name, path)
        try:
            return cls(kind, name, path, _pickle_by_value(implementation, module))
        except Exception as error:
            raise RegistryError(
                f"{kind} {name!r} ({path}) cannot be sent to workers: "
                f"{type(error).__name__}: {error}; define it in a module that workers "
                "can import, or make what it uses inside its methods"
            ) from error

    def resolve(self) -> Any:
        """Import or unpickle the implementation in this process.

        Raises:
            RegistryError: Something that it needs is missing here.
        """
        try:
            if self.pickled is not None:
                return pickle.loads(self.pickled)
            module, _, qualname = self.path.partition(":")
            return reduce(getattr, qualname.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise RegistryError(
                f"{self.kind} {self.name!r} is registered in the program as "
                f"{self.path}, but it cannot be loaded in this process (Python of "
                f"{sys.prefix}): {error}; install what is missing in the environment "
                "of these workers"
            ) from error


def _can_be_imported(implementation: Any, module: str, qualname: str) -> bool:
    """Whether another process finds the same object by its path."""
    loaded = sys.modules.get(module)
    if loaded is None or module == "__main__":
        return False
    try:
        # A decorator or a later definition may have taken the name.
        if reduce(getattr, qualname.split("."), loaded) is not implementation:
            return False
    except AttributeError:
        return False
    # A module that was loaded from a file by hand is known here and nowhere else.
    parent, _, _ = module.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None)
    if parent and folders is None:
        return False
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(module, folders)
        if spec is not None:
            return bool(spec.origin == getattr(loaded, "__file__", spec.origin))
    return False


def _pickle_by_value(implementation: Any, module: str) -> bytes:
    # Imported here: Ray takes a while, and most programs register nothing.
    from ray import cloudpickle  # noqa: PLC0415

    loaded = sys.modules.get(module)
    by_name = loaded is not None and module != "__main__"
    if by_name:
        cloudpickle.register_pickle_by_value(loaded)
    try:
        pickled: bytes = cloudpickle.dumps(implementation)
    finally:
        if by_name:
            cloudpickle.unregister_pickle_by_value(loaded)
    return pickled
