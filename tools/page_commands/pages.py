"""The commands shown on the pages, in the order in which a reader meets them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "PageCommand", "block", "page_commands"]

ROOT = Path(__file__).resolve().parents[2]
_COMMENT = re.compile(r"\s+#\s.*$")
_SETTING = re.compile(r"export (\w+)=(\S*)")


@dataclass(frozen=True)
class PageCommand:
    """A line of a page that begins with `rl`."""

    page: str
    """Path of the page in the repository."""
    line: str
    """The command without its comment, on one line."""
    folder: str = "."
    """The page's current folder at this point, relative to the reader's first one."""
    settings: tuple[tuple[str, str], ...] = ()
    """Variables that the page has exported before, with their values."""

    @property
    def title(self) -> str:
        """Page and command, in which patterns are searched."""
        return f"{self.page}: {self.line}"


def page_commands() -> list[PageCommand]:
    """Return every command of every page, each once per page."""
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "packages").glob("*/README.md")),
    ]
    return [command for page in pages for command in _commands(page)]


def _commands(page: Path) -> list[PageCommand]:
    name = str(page.relative_to(ROOT))
    text = "\n".join(_blocks(page.read_text(), "sh"))
    found: dict[str, PageCommand] = {}
    settings: dict[str, str] = {}
    folder = Path()
    for line in text.replace("\\\n", " ").splitlines():
        plain = _COMMENT.sub("", line)
        if setting := _SETTING.match(plain):
            settings[setting[1]] = setting[2]
        for part in plain.split(" && "):
            command = " ".join(part.split())
            if command.startswith("cd "):
                folder /= command.removeprefix("cd ")
            if re.match(r"(?:\w+=\S+ )*rl [a-z]", command):
                one = PageCommand(name, command, str(folder), tuple(settings.items()))
                found.setdefault(command, one)
    return list(found.values())


def block(page: str, language: str, number: int = 0) -> str:
    """Return a block of code of a page.

    Args:
        page: Path of the page in the repository.
        language: The word after the backticks.
        number: Which one of this language.

    Raises:
        IndexError: There are fewer.
    """
    return _blocks((ROOT / page).read_text(), language)[number]


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
