"""The page of a report: one HTML file with its style, its program and its data.

Whatever a model, a data set or a log has written is data: it stands in the page as
escaped JSON, the program shows it as text only, and the policy in the page's head lets
no script run but the page's own, known by its hash, and the files that this one loads.
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
    "timing.js",
    "trust.js",
    "setup.js",
    "live.js",
    "main.js",
)


def write_page(runs: Sequence[ReadRun], path: Path) -> ChunkStore:
    """Write the page of one run, or of several to be compared.

    Args:
        runs: At least one.
        path: The file. Answers that are too many for it go into `files_folder(path)`.

    Returns:
        Where the answers are.

    Raises:
        ConfigError: The file or the folder beside it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store = ChunkStore(files_folder(path))
        data = page_data(runs, store.put)
        data["files"] = store.folder.name if store.in_files else None
        # The chunks are JSON already: they are joined, and not written again.
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
    """Return the folder beside a page for what it loads when it is looked at."""
    return path.with_name(f"{path.stem}_files")


def render_page(data: str, names: Sequence[str], *, may_ask: bool = False) -> str:
    """Return the text of a page.

    Args:
        data: What it shows, as `script_json` writes it.
        names: Of the runs.
        may_ask: Whether its program may ask the server that it came from for more.
    """
    style, script = _assets(_STYLES), _assets(_SCRIPTS)
    policy = (
        f"default-src 'none'; script-src 'strict-dynamic' {_hash(script)}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    ) + ("; connect-src 'self'" if may_ask else "")
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(", ".join(names)),
        "style": style,
        "data": data,
        "script": script,
    }
    # Split before anything is put in: no text that comes in is looked at for a place.
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
