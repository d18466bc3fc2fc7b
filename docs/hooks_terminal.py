"""Draws terminals with what the commands of the pages print, while the site is built.

A marker stands alone on its line; options are `exit`, `width`, `lines` and `last`:

| marker | becomes |
|---|---|
| `{{ terminal: rl runs \\| Two runs that have ended }}` | the command is run now |
| `{{ terminal exit=2 lines=9: rl ... \\| ... }}` | ends with 2, nine lines shown |
| `{{ terminal lines=9 last=4: rl ... \\| ... }}` | of the nine, four are the last |
| `{{ recorded: rl train quickstart \\| ... }}` | drawn from `docs/recordings` |

What stands behind the bar is the alternative text. Commands run in a folder that holds
the files of `docs/recordings/inputs`, the two recorded runs of `docs/recordings/runs`,
a key file and its audit log. `rl ... < FILE` reads its input from a file.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from tools.terminal_picture import (
    Shown,
    draw_terminal,
    private_texts,
    run_all_as_in_terminal,
    run_as_in_terminal,
)

ROOT = Path(__file__).resolve().parent.parent
RECORDINGS = ROOT / "docs" / "recordings"
MARKER = re.compile(
    r"^\{\{ (terminal|recorded)((?: \w+=\d+)*): (rl\b[^|\n]*?) \| ([^|\n]+?) \}\}$",
    re.MULTILINE,
)
_FOLDER = "assets/terminal"
# They write what the commands shown read.
_BEFORE = (
    "rl keys create --name alice --role viewer --expires 30d",
    "rl keys create --name ci --role operator --expires 7d",
    "rl keys create --name carol --role viewer --expires 30d --file old.json",
)


def file_name(command: str) -> str:
    """Return the name of a command's files, made of its words."""
    words = re.sub(r"[^a-z0-9]+", "-", command.removeprefix("rl").lower())
    return words.strip("-") or "rl"


@dataclass(frozen=True)
class Picture:
    """A terminal that a page shows."""

    kind: str
    options: str
    command: str

    @property
    def name(self) -> str:
        """Return the name of its file."""
        options = re.sub(r"[^a-z0-9]+", "-", self.options)
        return f"{file_name(self.command)}{options}.svg"

    def option(self, name: str, default: int) -> int:
        """Return the number of an option."""
        found = re.search(rf" {name}=(\d+)", self.options)
        return int(found[1]) if found else default


_IMAGE = re.compile(rf'(<img [^>]*src="[^"]*{_FOLDER}/([^"]+)")')
_SIZE = re.compile(r'viewBox="0 0 (\d+)[\d.]* (\d+)')
_drawn: dict[Picture, str] = {}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Draw the pictures of all pages, and add them to the files of the site."""
    wanted = {
        Picture(*match.groups()[:3])
        for file in files.documentation_pages()
        for match in MARKER.finditer(file.content_string)
    }
    # A server that rebuilds the site draws only what is new.
    _draw([picture for picture in sorted(wanted, key=str) if picture not in _drawn])
    for picture in wanted:
        name = f"{_FOLDER}/{picture.name}"
        files.append(File.generated(config, name, content=_drawn[picture]))
    return files


def _draw(pictures: list[Picture]) -> None:
    if not pictures:
        return
    with tempfile.TemporaryDirectory(prefix="terminal-") as made:
        folder = Path(made)
        shutil.copytree(RECORDINGS / "inputs", folder, dirs_exist_ok=True)
        shutil.copytree(RECORDINGS / "runs", folder / "runs")
        environment = {"RL_AUDIT_LOG": "audit.jsonl"}
        for command in _BEFORE:
            run_as_in_terminal(command, folder, environment=environment)
        texts = _outputs(pictures, folder)
        for picture, text in zip(pictures, texts, strict=True):
            if found := private_texts(text, folder):
                raise PluginError(f"{picture.command} shows this machine's {found}")
            _drawn[picture] = draw_terminal(
                picture.command,
                text,
                width=picture.option("width", 80),
                most_lines=picture.option("lines", 30),
                last_lines=picture.option("last", 0),
            )


def _outputs(pictures: list[Picture], folder: Path) -> list[str]:
    """Return what each command prints, or has printed when it was recorded."""
    now = [picture for picture in pictures if picture.kind == "terminal"]
    shown = [
        Shown(one.command, one.option("width", 80), one.option("exit", 0))
        for one in now
    ]
    try:
        printed = dict(zip(now, run_all_as_in_terminal(shown, folder), strict=True))
    except ValueError as error:
        raise PluginError(str(error)) from error
    return [printed.get(one) or _recorded(one) for one in pictures]


def _recorded(picture: Picture) -> str:
    path = RECORDINGS / f"{file_name(picture.command)}.txt"
    if not path.is_file():
        raise PluginError(f"no {path.name} in docs/recordings: nox -s pictures")
    return path.read_text()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers of one page by images."""
    up = "../" * page.file.src_uri.count("/")

    def shown(match: re.Match[str]) -> str:
        name = Picture(*match.groups()[:3]).name
        return f"![{match[4]}]({up}{_FOLDER}/{name})"

    return MARKER.sub(shown, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Give the images their size, so that text does not move while they load."""
    sizes = {picture.name: _SIZE.search(svg) for picture, svg in _drawn.items()}

    def sized(match: re.Match[str]) -> str:
        size = sizes[match[2]]
        assert size is not None
        return f'{match[1]} width="{size[1]}" height="{size[2]}" loading="lazy"'

    return _IMAGE.sub(sized, content)
