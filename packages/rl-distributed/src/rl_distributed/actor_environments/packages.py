"""Environments of packages from an index or from wheel folders."""

from __future__ import annotations

import functools
import hashlib
import site
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rl_distributed.actor_environments.base import as_texts, driver_facts
from rl_distributed.actor_environments.built import BuiltEnvironment
from rl_distributed.actor_environments.driver_wheel import carried_content, write_wheel
from rl_distributed.actor_environments.uv_tool import Uv, pip_sources
from rl_distributed.errors import ActorEnvironmentError, ConfigError

__all__ = ["InstalledEnvironment", "OverlayEnvironment"]


@dataclass(frozen=True)
class InstalledEnvironment(BuiltEnvironment):
    """Packages from an index or from wheel folders, and nothing of the driver's.

    The driver's version of Ray and its rl-distributed are added, with torch where the
    driver has it: batches then have the same columns on both sides. Indexes and wheel
    folders that uv or pip are configured for are used.
    """

    requirements: tuple[str, ...]
    """As in a requirements file: `"vllm==0.32"`."""
    find_links: tuple[str, ...] = ()
    """Folders of wheels, the same on each node."""
    no_index: bool = False
    """Take packages from `find_links` only: works without a network."""
    from_driver: tuple[str, ...] = ()
    """Distributions that are taken from the driver instead of being installed."""
    overrides: tuple[str, ...] = ()
    """Requirements that replace those of any package, as uv's `--overrides`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_requirements(self)
        for name in ("from_driver", "overrides"):
            object.__setattr__(self, name, as_texts(name, getattr(self, name)))

    @property
    def label(self) -> str:
        """The requirements."""
        return ", ".join(self.requirements)

    def fingerprint(self) -> dict[str, Any]:
        """List the requirements, the folders' wheels, and what the driver gives."""
        carried = sorted({*self.from_driver, "rl-distributed"})
        return {
            "requirements": sorted(self.requirements),
            "find_links": [_folder_hash(place) for place in self.find_links],
            "no_index": self.no_index,
            "own": _own_requirement(),
            "from_driver": {name: carried_content(name) for name in carried},
            "overrides": sorted(self.overrides),
        }

    def build(self, folder: Path, deadline_s: float) -> None:
        """Install the packages into an environment of its own."""
        uv = Uv(f"environment {self.label!r}", deadline_s)
        python = uv.create_venv(folder)
        facts = driver_facts()
        lines = [*self.requirements, f"ray=={facts['ray']}"]
        for name in sorted({*self.from_driver, "rl-distributed"}):
            wheel = write_wheel(name, folder / "from-driver")
            is_own = name == "rl-distributed"
            wanted = _own_requirement() if is_own else name
            if wheel is not None:
                lines.append(f"{wanted} @ {wheel.as_uri()}")
            elif is_own:
                lines.append(f"{wanted}=={facts['rl_distributed']}")
        arguments = ["pip", "install", "--python", str(python)]
        arguments += _source_arguments(self.find_links, self.no_index)
        if self.overrides:
            listed = _write_lines(folder / "overrides.txt", self.overrides)
            arguments += ["--overrides", str(listed)]
        listed = _write_lines(folder / "requirements.txt", lines)
        variables = {} if self.no_index else pip_sources()
        uv.run([*arguments, "-r", str(listed)], variables=variables)


@dataclass(frozen=True)
class OverlayEnvironment(BuiltEnvironment):
    """The driver's packages, and on top of them those that differ.

    It is made in about a second. Only the named packages are installed, without what
    they depend on: that is taken from the driver's environment, which must stay in its
    place. Where that is not enough, use `InstalledEnvironment`.
    """

    requirements: tuple[str, ...]
    """As in a requirements file: `"transformers==5.19"`."""
    find_links: tuple[str, ...] = ()
    """Folders of wheels, the same on each node."""
    no_index: bool = False
    """Take packages from `find_links` only: works without a network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_requirements(self)

    @property
    def label(self) -> str:
        """The requirements, on top of the driver's."""
        return f"driver + {', '.join(self.requirements)}"

    def fingerprint(self) -> dict[str, Any]:
        """List the requirements, the folders' wheels, and where the driver's are."""
        return {
            "requirements": sorted(self.requirements),
            "find_links": [_folder_hash(place) for place in self.find_links],
            "no_index": self.no_index,
            "driver": _driver_packages(),
        }

    def build(self, folder: Path, deadline_s: float) -> None:
        """Install the named packages; a path file adds the driver's after them."""
        uv = Uv(f"environment {self.label!r}", deadline_s)
        python = uv.create_venv(folder)
        packages = next(folder.glob("lib/python*/site-packages"))
        # `addsitedir` also reads path files there, such as those of editable packages.
        lines = [f"import site; site.addsitedir({p!r})" for p in _driver_packages()]
        _write_lines(packages / "_driver_packages.pth", lines)
        arguments = ["pip", "install", "--no-deps", "--python", str(python)]
        arguments += _source_arguments(self.find_links, self.no_index)
        listed = _write_lines(folder / "requirements.txt", self.requirements)
        variables = {} if self.no_index else pip_sources()
        uv.run([*arguments, "-r", str(listed)], variables=variables)


def _check_requirements(environment: InstalledEnvironment | OverlayEnvironment) -> None:
    for name in ("requirements", "find_links"):
        texts = as_texts(name, getattr(environment, name))
        object.__setattr__(environment, name, texts)
    for text in environment.requirements:
        # uv would parse it as an option, such as another index.
        if text.lstrip().startswith("-"):
            raise ConfigError(
                f"requirements must name packages, no options: got {text!r}"
            )
    places = [
        p if "://" in p else str(Path(p).resolve()) for p in environment.find_links
    ]
    object.__setattr__(environment, "find_links", tuple(places))
    if not environment.requirements:
        raise ConfigError(
            f"requirements of {type(environment).__name__} must name a package: got "
            "none; use DriverEnvironment where nothing differs"
        )
    if environment.no_index and not environment.find_links:
        raise ConfigError(
            f"no_index of {type(environment).__name__} leaves no source of packages; "
            "name folders of wheels by find_links"
        )


def _own_requirement() -> str:
    """Return the requirement of rl-distributed that fits the driver's batches."""
    try:
        distribution("torch")
    except PackageNotFoundError:
        return "rl-distributed"
    return "rl-distributed[torch]"


def _source_arguments(find_links: Sequence[str], no_index: bool) -> list[str]:
    arguments = ["--no-index"] if no_index else []
    for place in find_links:
        arguments += ["--find-links", place]
    return arguments


def _driver_packages() -> list[str]:
    """Return the folders in which the driver's installed packages lie."""
    folders = [*site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in folders if Path(folder).is_dir()]


def _folder_hash(place: str) -> str:
    """Return a hash of the wheels of a folder; of an address, the address."""
    if "://" in place:
        return place
    if not Path(place).is_dir():
        raise ActorEnvironmentError(
            f"find_links names {place!r}, which is no folder on this node"
        )
    digest = hashlib.sha256()
    for wheel in sorted(Path(place).glob("*.whl")):
        stat = wheel.stat()
        digest.update(wheel.name.encode() + b"\0")
        digest.update(_wheel_hash(wheel, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


@functools.lru_cache(maxsize=10_000)
def _wheel_hash(wheel: Path, size: int, changed: int) -> bytes:
    """Return a hash of a wheel's directory, which holds a checksum of each file in it.

    The directory of a folder of 226 wheels is read in 0.2 s.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            start = archive.start_dir
    except (OSError, zipfile.BadZipFile):
        # An unfinished copy: uv says so where it matters.
        return f"{size} {changed}".encode()
    with wheel.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read()).digest()


def _write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
