"""The import finder that resolves `nemo_rl` by the map of names."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rl_algorithms.compat.nemo_rl.name_map import ROOT, read_name_map

__all__ = ["STAND_IN", "install", "uninstall"]

STAND_IN = str(Path(__file__).parent / "stand_in")
"""Folder of a package `nemo_rl` that installs the finder, for other processes."""
_PATH = "PYTHONPATH"

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


class _MappedModule(types.ModuleType):
    """A module of NeMo RL, whose names are resolved, with a warning, at first use."""

    def __getattr__(self, name: str) -> Any:
        names = read_name_map()
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = names.find(self.__name__, name)
        if found is not None and not found.absent:
            value = found.load()
            warnings.warn(found.warning(), DeprecationWarning, stacklevel=2)
            # Stored, so that later lookups bypass `__getattr__` and do not warn again.
            setattr(self, name, value)
            return value
        if names.has_module(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        message = names.missing_name(self.__name__, name)
        # `from ... import` replaces the message of an AttributeError by its own, but
        # not that of an ImportError.
        kind = ImportError if _is_from_import(sys._getframe(1)) else AttributeError
        raise kind(message)

    def __dir__(self) -> list[str]:
        names = read_name_map().modules.get(self.__name__, {})
        return sorted({*vars(self), *(n for n, e in names.items() if not e.absent)})

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled functions may reference this module object, so workers reimport it.
        return _import, (self.__name__,)


class _NameFinder(MetaPathFinder, Loader):
    """Meta path finder of the modules in the map, with clear errors for all others."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        names = read_name_map()
        if not names.has_module(fullname):
            message = names.missing_module(fullname)
            raise ModuleNotFoundError(message, name=fullname)
        return ModuleSpec(fullname, self, is_package=fullname in names.packages)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _MappedModule(spec.name, f"Names of {spec.name} that are here.")

    def exec_module(self, module: types.ModuleType) -> None:
        return


def install() -> None:
    """Let `import nemo_rl...` find the names of this project; idempotent.

    Processes started later find them too, by PYTHONPATH: Ray's workers import the
    modules of the program.

    Raises:
        ImportError: The real `nemo_rl` is installed, or imported already.
    """
    if any(isinstance(finder, _NameFinder) for finder in sys.meta_path):
        return
    # It is there in processes started by one like this.
    sys.path[:] = [path for path in sys.path if path != STAND_IN]
    loaded = sys.modules.get(ROOT)
    spec = importlib.util.find_spec(ROOT) if loaded is None else loaded.__spec__
    if loaded is not None or spec is not None:
        origin = getattr(spec, "origin", None) or "somewhere"
        raise ImportError(
            f"{ROOT} is installed in this environment ({origin}), and only one package "
            "can have the name: run the program without rl_algorithms.compat.nemo_rl, "
            f"or uninstall {ROOT}",
            name=ROOT,
        )
    sys.meta_path.insert(0, _NameFinder())
    # Last, so that a real `nemo_rl` on the path wins in processes that have it.
    os.environ[_PATH] = os.pathsep.join([*_other_folders(), STAND_IN])


def uninstall() -> None:
    """Remove the finder and the modules that it created."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _NameFinder)]
    folders = _other_folders()
    if folders:
        os.environ[_PATH] = os.pathsep.join(folders)
    else:
        os.environ.pop(_PATH, None)
    # A list, as the loop removes entries.
    for name, module in list(sys.modules.items()):
        if isinstance(module, _MappedModule):
            del sys.modules[name]


def _other_folders() -> list[str]:
    """Return the folders of PYTHONPATH without the stand-in's."""
    folders = os.environ.get(_PATH, "").split(os.pathsep)
    return [folder for folder in folders if folder not in ("", STAND_IN)]


def _import(name: str) -> types.ModuleType:
    """Import a module of NeMo RL in a process that may lack the finder."""
    install()
    return importlib.import_module(name)


def _is_from_import(frame: types.FrameType) -> bool:
    """Return whether a frame is executing a `from ... import` statement."""
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
