"""Loading objects from standalone Python files, such as a user's reward function."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_distributed.errors import UserError
from rl_distributed.suggestion import did_you_mean, did_you_mean_file
from rl_envs.errors import EnvsError

__all__ = [
    "PythonFileError",
    "existing_file",
    "load_from_file",
    "load_module",
    "loaded_files",
]

_loaded: dict[str, str] = {}


class PythonFileError(EnvsError, UserError, ImportError):
    """A Python file cannot be run, or lacks a name.

    Args:
        message: The error message.
        is_name: True if the file is fine and only the name is wrong.
    """

    def __init__(self, message: str, *, is_name: bool = False) -> None:
        super().__init__(message)
        self.is_name = is_name


def existing_file(value: str) -> str:
    """Return the absolute path of a Python file, for a validator of settings.

    Absolute, because workers may run in another folder.

    Raises:
        ValueError: There is no such file.
    """
    path = Path(value).expanduser().resolve()
    if not path.is_file():
        kind = "does not exist" + did_you_mean_file(value)
        if path.is_dir():
            kind = "is a folder"
        raise ValueError(f"must be a Python file: {value!r} {kind}")
    return str(path)


def load_from_file(file: str | Path, name: str, *, kind: str, thing: str) -> Any:
    """Run a Python file and return a function or class of it.

    Args:
        file: Path of the file.
        name: Name of the object.
        kind: Kind of file, for messages and the module's name.
        thing: Kind of object, for messages.

    Raises:
        PythonFileError: The file cannot be run, or has no such object.
    """
    module = load_module(f"{kind}_file_{Path(file).stem}", file, kind=kind)
    found = getattr(module, name, None)
    if callable(found):
        return found
    # Only what the file itself defines: its imports would make poor suggestions.
    own = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and callable(value)
    ]
    has = f"it has {', '.join(own)}" if own else "it has none"
    raise PythonFileError(
        f"the {kind} file {file} has no {thing} {name!r}{did_you_mean(name, own)} "
        f"({has})",
        is_name=True,
    )


def load_module(name: str, file: str | Path, *, kind: str) -> ModuleType:
    """Run a Python file as a module that can import the modules beside it.

    Args:
        name: Name of the module.
        file: Path of the file.
        kind: Kind of file, for messages.

    Raises:
        PythonFileError: The file cannot be run.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PythonFileError(f"{path} must be a Python file: its name ends with .py")
    module = importlib.util.module_from_spec(spec)
    # As for a script. Appended, not removed afterwards: it may import when called.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Before it runs: dataclasses and pickle look the module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # A half-run module must not be found by a later import.
        del sys.modules[name]
        raise PythonFileError(
            f"the {kind} file {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    # Absolute, as another process may run in another folder.
    _loaded[name] = str(path.resolve())
    return module


def loaded_files() -> dict[str, str]:
    """Return the files loaded in this process, by module name.

    Another process must load them before it can unpickle objects that they define.
    """
    return dict(_loaded)
