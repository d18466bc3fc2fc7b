"""Builds the parts of the site that are taken from the code.

A marker stands alone on its line:

| marker | becomes |
|---|---|
| `{{ config: module.Class }}` | the keys of that class, one table per section |
| `{{ config: module.Class - module.Base }}` | those that the other class lacks |
| `{{ command: name }}` | the help of that command |
| `{{ file: path }}` | a file of the repository; Markdown as it is, else as a block |
"""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of one page."""
    return re.sub(
        r"^\{\{ (config|command|file): (.+?) \}\}$", _replace, markdown, flags=re.M
    )


def _replace(match: re.Match[str]) -> str:
    kind, name = match.groups()
    if kind == "config":
        return _config_tables(*name.split(" - "))
    if kind == "command":
        return _command_help(name)
    path = ROOT / name
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"```{LANGUAGES[path.suffix]}\n{text.rstrip()}\n```"


def _rows(name: str) -> list[Any]:
    from rl_algorithms.trainers.settings.config import TrainerConfig  # noqa: PLC0415
    from rl_algorithms.trainers.settings.keywords import changeable_in  # noqa: PLC0415
    from rl_distributed.config import explain_config  # noqa: PLC0415

    module, _, attribute = name.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    # Only a training takes updates; other programs have sections of the same classes.
    live = changeable_in(cls) if issubclass(cls, TrainerConfig) else []
    return [
        row
        if any(f"{key}.".startswith(f"{row.path}.") for key in live)
        else replace(row, changes="")
        for row in explain_config(cls)
    ]


def _config_tables(name: str, base: str | None = None) -> str:
    """One table per top-level section; the keys that have none come first."""
    known = _rows(base) if base else []
    rows = [row for row in _rows(name) if row not in known]
    sections = {row.path.split(".")[0] for row in rows if "." in row.path}

    def section(row: Any) -> str:
        first: str = row.path.split(".")[0]
        return first if first in sections else ""

    order = list(dict.fromkeys(["", *(section(row) for row in rows)]))
    rows.sort(key=lambda row: order.index(section(row)))
    parts = []
    for title, group in itertools.groupby(rows, key=section):
        heading = f"### {title}" if title else ""
        parts.append("\n".join([heading, "", *_table(list(group))]))
    return "\n\n".join(parts)


def _table(rows: list[Any]) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = "*required*" if row.required else _code(row.default)
        doc = row.doc.replace("|", "&#124;").replace("\n", " ")
        if row.changes:
            what = "" if row.changes == "yes" else f" ({row.changes})"
            doc = f"{doc} *Live{what}.*"
        lines.append(f"| {_code(row.path)} | {_code(row.type)} | {default} | {doc} |")
    return lines


def _code(text: str) -> str:
    """Return inline code for a table's cell, where a bar would begin the next cell."""
    if not text:
        return ""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character, entity in (("|", "&#124;"), ("*", "&#42;"), ("_", "&#95;")):
        escaped = escaped.replace(character, entity)
    if text.replace(".", "").replace("_", "").isalnum():  # a key: breaks at its dots
        escaped = escaped.replace(".", ".<wbr>").replace("&#95;", "&#95;<wbr>")
    return f"<code>{escaped}</code>"


def _command_help(name: str) -> str:
    import click  # noqa: PLC0415

    from rl_cli.main import cli  # noqa: PLC0415

    settings: dict[str, Any] = {"max_content_width": 80}
    context = click.Context(cli, info_name="rl", **settings, **cli.context_settings)
    command: click.Command | None = cli
    for part in name.split("."):
        if part == "rl":
            continue
        assert isinstance(command, click.Group)
        command = command.get_command(context, part)
        assert command is not None, f"no command {name}"
        context = click.Context(command, info_name=part, parent=context, **settings)
    assert command is not None
    return f"```text\n{command.get_help(context)}\n```"
