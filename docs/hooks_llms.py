"""Writes `llms.txt`: the pages of the site as one list, for programs that read it.

The form is that of llmstxt.org: a title, a summary, and sections of links, each with
what the page is about. A page is described by its first sentence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_TAGS = re.compile(r"<[^>]*>")
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)", re.DOTALL)
_LONGEST = 200

_first: dict[str, str] = {}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Note the first sentence of one page."""
    paragraph = _PARAGRAPH.search(content)
    text = " ".join(_TAGS.sub("", paragraph[1]).split()) if paragraph else ""
    sentence = _SENTENCE.match(text)
    found = (sentence[1] if sentence else text).rstrip(":")
    _first[page.file.src_uri] = found if len(found) <= _LONGEST else ""
    return content


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the order of the pages."""
    _sections[:] = [item for item in nav.items if item.is_section]


_sections: list[Any] = []


def on_post_build(config: Any, **_: Any) -> None:
    """Write the list beside the home page."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in _sections:
        lines += ["", f"## {section.title}", ""]
        lines += [_line(page) for page in section.children]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def _line(page: Any) -> str:
    about = _first.get(page.file.src_uri, "")
    return f"- [{page.title}]({page.url})" + (f": {about}" if about else "")
