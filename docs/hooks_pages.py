"""Draws the page of a run while the site is built, if Chromium is installed.

The run is that of `docs/recordings/page.tar.xz`, which `nox -s pictures` makes. So the
pictures show the page as it is now. Without Chromium the site has those of
`docs/assets`, as the files on a code host have.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
RUN_OF_THE_PAGE = ROOT / "docs" / "recordings" / "page.tar.xz"
_DEADLINE_S = 300
_logger = logging.getLogger("mkdocs.hooks.pages")
_drawn: dict[str, bytes] = {}


def drawn_pages(archive: Path) -> dict[str, bytes]:
    """Return the pictures of a run's page by the names of their files.

    Args:
        archive: The run, `runs/NAME` in a tar file.

    Raises:
        PluginError: The page cannot be drawn.
    """
    with tempfile.TemporaryDirectory(prefix="pages-") as made:
        folder, pictures = Path(made), Path(made) / "pictures"
        pictures.mkdir()
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (run,) = (folder / "runs").iterdir()
        # In the folder with the runs, as the page names the run as it is named there.
        command = [sys.executable, "-m", "tools.report_picture"]
        done = subprocess.run(
            [*command, str(run.relative_to(folder)), "--to", str(pictures)],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=_DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise PluginError(f"the page of {archive.name}: {done.stderr}")
        return {path.name: path.read_bytes() for path in pictures.iterdir()}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Put the pictures in place of those that are kept in `docs/assets`."""
    if shutil.which("chromium") is None:
        _logger.info("no chromium: the pictures of a run's page are those kept")
        return files
    # A server that rebuilds the site draws them once.
    if not _drawn:
        _drawn.update(drawn_pages(RUN_OF_THE_PAGE))
    for name, content in _drawn.items():
        place = f"assets/{name}"
        kept = files.get_file_from_path(place)
        if kept is None:
            raise PluginError(f"{place} is drawn, but not kept: nox -s pictures")
        files.remove(kept)
        files.append(File.generated(config, place, content=content))
    return files
