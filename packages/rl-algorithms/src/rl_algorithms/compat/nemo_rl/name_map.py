"""The map of names of NeMo RL, read from `names.toml`."""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rl_distributed.suggestion import did_you_mean, nearest

__all__ = ["GUIDE", "ROOT", "MappedName", "NameMap", "read_name_map"]

ROOT = "nemo_rl"
"""Name of the package of NeMo RL."""
GUIDE = "the guide 'Migrate from NeMo RL'"
"""Title of the page of the documentation about moving."""
_TABLE = "python -m rl_algorithms.compat.nemo_rl --table"


@dataclass(frozen=True, slots=True)
class MappedName:
    """Counterpart of a name of NeMo RL in this project."""

    module: str
    """Module of NeMo RL."""
    name: str
    """Name in that module."""
    ours: str = ""
    """Counterpart here, as `package.name`; empty: none."""
    via: str = ""
    """Object that the import from `nemo_rl` gives, if it takes other arguments than
    `ours`; empty: `ours` itself."""
    differs: str = ""
    """Description of differences; empty: none."""
    absent: str = ""
    """Replacement of a name without counterpart."""

    @property
    def path(self) -> str:
        """Full name in NeMo RL."""
        return f"{self.module}.{self.name}"

    @property
    def kind(self) -> str:
        """`same`, `differs: why` or `absent: instead`."""
        if self.absent:
            return f"absent: {self.absent}"
        return f"differs: {self.differs}" if self.differs else "same"

    def load(self) -> Any:
        """Import the object that the name is bound to."""
        return _load(self.via or self.ours)

    def load_new_place(self) -> Any:
        """Import the object that the warning names."""
        return _load(self.ours)

    def warning(self) -> str:
        """Return the message with the name's location in this project."""
        text = f"{self.path} is {self.ours} here; import it from there"
        return f"{text} ({self.differs})" if self.differs else text

    def missing(self) -> str:
        """Return the message that the name is missing, with its replacement."""
        return f"{self.path} is not here: {self.absent} (see {GUIDE})"


@dataclass(frozen=True)
class NameMap:
    """All known modules and names."""

    modules: Mapping[str, Mapping[str, MappedName]]
    absent_modules: Mapping[str, str] = field(default_factory=dict)
    """Missing modules, including all their submodules, and their replacements."""

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """Modules with submodules."""
        parents: set[str] = set()
        for module in (*self.modules, *self.absent_modules):
            parts = module.split(".")
            parents |= {".".join(parts[:n]) for n in range(1, len(parts))}
        return frozenset(parents)

    def has_module(self, module: str) -> bool:
        """Return whether the module can be imported."""
        return module in self.modules or module in self.packages

    def find(self, module: str, name: str) -> MappedName | None:
        """Return the entry of a name, or None if it is not in the map."""
        return self.modules.get(module, {}).get(name)

    def missing_module(self, module: str) -> str:
        """Return the reason why a module cannot be imported."""
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            instead = self.absent_modules.get(".".join(parts[:end]))
            if instead is not None:
                return f"{module} is not here: {instead} (see {GUIDE})"
        # Without their common beginning, which would make any two of them alike.
        modules = (*self.modules, *self.packages, *self.absent_modules)
        known = {_below_root(m): m for m in modules}
        found = nearest(_below_root(module), known)
        hint = "" if found is None else f"; did you mean {known[found]!r}?"
        return (
            f"{module} is not in the map of rl_algorithms.compat.nemo_rl{hint}; "
            f"{_TABLE} lists what is"
        )

    def missing_name(self, module: str, name: str) -> str:
        """Return the reason why a module lacks a name."""
        found = self.find(module, name)
        if found is not None and found.absent:
            return found.missing()
        path = f"{module}.{name}"
        if any(f"{path}.".startswith(f"{m}.") for m in self.absent_modules):
            return self.missing_module(path)
        return (
            f"{path} is not in the map of rl_algorithms.compat.nemo_rl"
            f"{self._hint(module, name)}; {_TABLE} lists what is"
        )

    def _hint(self, module: str, name: str) -> str:
        """Return where a name may have been meant to come from, as a part of a text."""
        elsewhere = [m for m, names in self.modules.items() if name in names]
        if elsewhere:
            return f"; {elsewhere[0]} has {name}"
        known = [n for n, e in self.modules.get(module, {}).items() if not e.absent]
        return did_you_mean(name, known)

    def to_markdown(self) -> str:
        """Return the map as Markdown, with a table per module."""
        parts = []
        for module, names in self.modules.items():
            rows = [
                f"| `{e.name}` | {f'`{e.ours}`' if e.ours else ''} | {e.kind} |"
                for e in names.values()
            ]
            head = "| there | here | |\n|---|---|---|"
            parts.append("\n".join([f"### {module}", "", head, *rows]))
        rows = [f"| `{m}` | {why} |" for m, why in self.absent_modules.items()]
        head = "| there | instead |\n|---|---|"
        parts.append("\n".join(["### Modules that are not here", "", head, *rows]))
        return "\n\n".join(parts) + "\n"


@functools.cache
def read_name_map() -> NameMap:
    """Read the map shipped with this package."""
    file = resources.files("rl_algorithms.compat.nemo_rl") / "names.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    absent: dict[str, str] = data.pop("absent_modules")
    aliases: dict[str, str] = data.pop("same_as")
    modules = {module: _names(module, names) for module, names in data.items()}
    for alias, module in aliases.items():
        modules[alias] = _names(alias, data[module])
    return NameMap(dict(sorted(modules.items())), absent)


def _below_root(module: str) -> str:
    return module.removeprefix(f"{ROOT}.")


def _names(module: str, names: Mapping[str, Any]) -> dict[str, MappedName]:
    return {
        name: MappedName(module, name, **({"ours": e} if isinstance(e, str) else e))
        for name, e in names.items()
    }


def _load(path: str) -> Any:
    """Import `package.module.name`; parts after the module are attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A module that exists may fail to import another one: that error must be
            # seen.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        for name in parts[end:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(f"no module of {path!r} can be imported", name=path)
