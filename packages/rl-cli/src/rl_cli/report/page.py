"""The page of a report: one HTML file with its style, script and data.

Text from a model, a data set or a log is data: it is embedded as escaped JSON, the
script displays it as text only, and the policy in the page's head permits only the
page's own script, identified by its hash, and the files that it loads.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rl_cli.report.page_data import page_data
from rl_cli.report.run_reader import ReadRun
from rl_cli.report.sample_chunks import ChunkStore, script_json
from rl_distributed.errors import ConfigError
from rl_distributed.private_files import write_private_text

__all__ = ["files_folder", "render_page", "write_page"]

_PLACE = re.compile(r"\{\{(policy|title|style|data|script)\}\}")
_STYLES = ("uplot/uPlot.min.css", "report.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "page.js",
    "charts.js",
    "learning.js",
    "tokens.js",
    "samples.js",
    "timeline.js",
    "timing.js",
    "trust.js",
    "setup.js",
    "live.js",
    "main.js",
)


def write_page(runs: Sequence[ReadRun], path: Path) -> ChunkStore:
    """Write the page of a run, or of several runs to compare.

    Args:
        runs: At least one run.
        path: The file. If there are too many answers for it, they are written to
            `files_folder(path)`.

    Returns:
        The store of the answers and time lines.

    Raises:
        ConfigError: The file or the folder beside it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store = ChunkStore(files_folder(path))
        data = page_data(runs, store.put, store.put_timeline)
        data["files"] = store.folder.name if store.in_files else None
        # The chunks are JSON already; serializing them again would double the memory.
        chunks = ",".join(
            f"{script_json(name)}:{text}" for name, text in store.inline.items()
        )
        text = f'{script_json(data)[:-1]},"chunks":{{{chunks}}}}}'
        write_private_text(path, render_page(text, [r["name"] for r in data["runs"]]))
    except OSError as error:
        raise ConfigError(
            f"the report {path} cannot be written: {error.strerror or error}; name "
            "another file, as in --output FILE"
        ) from error
    return store


def files_folder(path: Path) -> Path:
    """Return the folder beside a page for files that it loads on demand."""
    return path.with_name(f"{path.stem}_files")


def render_page(data: str, names: Sequence[str], *, may_ask: bool = False) -> str:
    """Return the text of a page.

    Args:
        data: Data of the page, from `script_json`.
        names: Names of the runs.
        may_ask: Allow its script to request more from its own server.
    """
    style, script = _assets(_STYLES), _assets(_SCRIPTS)
    # A page in a file has no server, so only a live one may ask for more.
    policy = (
        f"default-src 'none'; script-src 'strict-dynamic' {_hash(script)}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    ) + ("; connect-src 'self'" if may_ask else "")
    parts = {
        "policy": html.escape(policy),
        # Names of folders may hold any character.
        "title": html.escape(", ".join(names)),
        "style": style,
        "data": data,
        "script": script,
    }
    # Split first and fill in afterwards: inserted text must not be parsed for marks.
    pieces = _PLACE.split(_asset("report.html"))
    return "".join(
        parts[piece] if index % 2 else piece for index, piece in enumerate(pieces)
    )


def _assets(names: Sequence[str]) -> str:
    return "\n".join(_asset(name) for name in names)


def _asset(name: str) -> str:
    return (
        resources.files("rl_cli.report")
        .joinpath("assets", *name.split("/"))
        .read_text(encoding="utf-8")
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
