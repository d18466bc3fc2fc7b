"""The map of names of NeMo RL, read from `names.toml`."""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rl_distributed.suggestion import did_you_mean

__all__ = ["ROOT", "MappedName", "NameMap", "read_name_map"]

ROOT = "nemo_rl"
"""Name of their package."""
_PAGE = "docs/guides/migrate.md"


@dataclass(frozen=True, slots=True)
class MappedName:
    """What became of one of their names."""

    module: str
    """Their module."""
    name: str
    """Their name in it."""
    ours: str = ""
    """Where it is here, `package.name`; empty: it is not."""
    via: str = ""
    """What the name is bound to while a program still imports it from there, where that
    takes their arguments; empty: `ours` itself."""
    differs: str = ""
    """What is different; empty: nothing."""
    absent: str = ""
    """What to use instead of a name that is not there."""

    @property
    def path(self) -> str:
        """Their name, complete."""
        return f"{self.module}.{self.name}"

    @property
    def kind(self) -> str:
        """`same`, `differs: why` or `absent: instead`."""
        if self.absent:
            return f"absent: {self.absent}"
        return f"differs: {self.differs}" if self.differs else "same"

    def load(self) -> Any:
        """Import what the name is bound to."""
        return _load(self.via or self.ours)

    def load_new_place(self) -> Any:
        """Import what the warning names."""
        return _load(self.ours)

    def warning(self) -> str:
        """Tell where the name is here."""
        text = f"{self.path} is {self.ours} here; import it from there"
        return f"{text} ({self.differs})" if self.differs else text

    def missing(self) -> str:
        """Tell that the name is not there, and what to use."""
        return f"{self.path} is not here: {self.absent} (see {_PAGE})"


@dataclass(frozen=True)
class NameMap:
    """All modules and names that are known."""

    modules: Mapping[str, Mapping[str, MappedName]]
    absent_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules that are not there, those below them included, and what to use."""

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """Modules that have others below them."""
        parents: set[str] = set()
        for module in (*self.modules, *self.absent_modules):
            parts = module.split(".")
            parents |= {".".join(parts[:n]) for n in range(1, len(parts))}
        return frozenset(parents)

    def has_module(self, module: str) -> bool:
        """Whether the module can be imported."""
        return module in self.modules or module in self.packages

    def find(self, module: str, name: str) -> MappedName | None:
        """Return a name of a module; None: it is not in the map."""
        return self.modules.get(module, {}).get(name)

    def missing_module(self, module: str) -> str:
        """Tell why a module cannot be imported."""
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            instead = self.absent_modules.get(".".join(parts[:end]))
            if instead is not None:
                return f"{module} is not here: {instead} (see {_PAGE})"
        known = [*self.modules, *self.packages]
        return (
            f"{module} is not in the map of rl_algorithms.compat.nemo_rl"
            f"{did_you_mean(module, known)}; {_PAGE} lists what is"
        )

    def missing_name(self, module: str, name: str) -> str:
        """Tell why a module has no such name."""
        found = self.find(module, name)
        if found is not None and found.absent:
            return found.missing()
        path = f"{module}.{name}"
        if any(f"{path}.".startswith(f"{m}.") for m in self.absent_modules):
            return self.missing_module(path)
        known = [n for n, e in self.modules.get(module, {}).items() if not e.absent]
        return (
            f"{path} is not in the map of rl_algorithms.compat.nemo_rl"
            f"{did_you_mean(name, known)}; {_PAGE} lists what is"
        )

    def to_markdown(self) -> str:
        """Write the map as a table for each module."""
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
    """Read the map that comes with this package."""
    file = resources.files("rl_algorithms.compat.nemo_rl") / "names.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    absent: dict[str, str] = data.pop("absent_modules")
    aliases: dict[str, str] = data.pop("same_as")
    modules = {module: _names(module, names) for module, names in data.items()}
    for alias, module in aliases.items():
        modules[alias] = _names(alias, data[module])
    return NameMap(dict(sorted(modules.items())), absent)


def _names(module: str, names: Mapping[str, Any]) -> dict[str, MappedName]:
    return {
        name: MappedName(module, name, **({"ours": e} if isinstance(e, str) else e))
        for name, e in names.items()
    }


def _load(path: str) -> Any:
    """Import `package.module.name`; what stands behind the module are attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        for name in parts[end:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(f"no module of {path!r} can be imported", name=path)
