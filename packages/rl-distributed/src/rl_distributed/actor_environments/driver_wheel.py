"""Carrying a package of the driver into another environment as it is.

An environment must hold the driver's own rl-distributed, which may come from a
checkout, a wheel file or an index. The wheel written here needs none of them again: it
holds the installed files, or, for a package installed in editable mode, a pointer to
its sources, so that both environments run the same code.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

__all__ = ["carried_content", "editable_folder", "normal_name", "write_wheel"]

# Written by installers about one installation.
_OF_INSTALLATION = {
    "INSTALLER",
    "RECORD",
    "REQUESTED",
    "direct_url.json",
    "uv_build.json",
    "uv_cache.json",
}


def editable_folder(name: str) -> Path | None:
    """Get the project folder of a distribution installed in editable mode, or None."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    record: dict[str, Any] = json.loads(text) if text else {}
    if not record.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(record["url"]).path))


def carried_content(name: str) -> str:
    """Return what the wheel of a distribution would hold, as a hash.

    Sources of an editable package do not count: they are read where they are.
    """
    digest = hashlib.sha256()
    for path, content in sorted(_contents(name).items()):
        digest.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def write_wheel(name: str, folder: Path) -> Path | None:
    """Write a wheel of an installed distribution; its path.

    Returns None where it cannot be carried: it has compiled parts, or is not installed
    as a distribution.
    """
    contents = _contents(name)
    if not contents:
        return None
    dist = distribution(name)
    stem = f"{_wheel_name(dist.name)}-{dist.version}"
    record = f"{stem}.dist-info/RECORD"
    lines = []
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(content)}")
    contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return wheel


def _contents(name: str) -> dict[str, bytes]:
    """Path in the wheel -> content; empty where it cannot be carried."""
    try:
        dist = distribution(name)
    except PackageNotFoundError:
        return {}
    # Compiled parts may not work in another environment.
    if "py3-none-any" not in (dist.read_text("WHEEL") or ""):
        return {}
    stem = f"{_wheel_name(dist.name)}-{dist.version}"
    files = _installed_files(dist, f"{stem}.dist-info")
    # A path file replaces the modules, so that both environments run the same sources.
    if editable_folder(name) is not None:
        files = {k: v for k, v in files.items() if ".dist-info/" in k}
        sources = [str(path) for path in _source_folders(dist)]
        files[f"_carried_{_wheel_name(dist.name)}.pth"] = (
            "\n".join(sources) + "\n"
        ).encode()
    return files


def _installed_files(dist: Distribution, info: str) -> dict[str, bytes]:
    found = {}
    for file in dist.files or []:
        parts = file.parts
        # Scripts lie outside; they are generated from the entry points.
        if ".." in parts or "__pycache__" in parts or file.name in _OF_INSTALLATION:
            continue
        # The installed folder may be spelled differently from what a wheel requires.
        if parts[0].endswith(".dist-info"):
            parts = (info, *parts[1:])
        found["/".join(parts)] = Path(str(file.locate())).read_bytes()
    return found


def _source_folders(dist: Distribution) -> list[Path]:
    """Folders that must be on the path for the modules of an editable package."""
    named = (dist.read_text("top_level.txt") or "").split()
    folders = []
    for module in named or [_wheel_name(dist.name)]:
        found = importlib.util.find_spec(module)
        places = list(found.submodule_search_locations or []) if found else []
        if places:
            folders.append(Path(places[0]).parent)
        elif found and found.origin:
            folders.append(Path(found.origin).parent)
    return list(dict.fromkeys(folders))


def normal_name(name: str) -> str:
    """Return the name of a distribution or extra in the form all spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _wheel_name(name: str) -> str:
    return normal_name(name).replace("-", "_")
