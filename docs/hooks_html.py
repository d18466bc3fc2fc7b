"""Turns formulas into MathML and arXiv numbers into links, while the site is built.

Browsers show MathML by themselves, so the site needs no script for it. Formulas stand
between dollar signs, `$x$` in a line and `$$` on lines of their own, as GitHub reads
them too; docstrings may hold both.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)
VERBATIM = re.compile(r"(<(pre|code|a|math|script)\b.*?</\2>|<[^>]*>)", re.DOTALL)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Render the formulas and link the arXiv numbers of one page."""
    source = page.file.src_uri
    content = FORMULA.sub(lambda match: render(match, source), content)
    return link_papers(content)


def render(match: re.Match[str], source: str) -> str:
    """Return the MathML of one formula.

    Raises:
        PluginError: When the formula has a command that cannot be rendered.
    """
    tag, bracket, latex = match.groups()
    display = "block" if bracket == "[" else "inline"
    latex = html.unescape(latex).strip()
    mathml = convert(latex, display=display)
    # What the converter does not know it leaves as it is.
    if "\\" in mathml or "<mi>&</mi>" in mathml:
        raise PluginError(f"{source}: cannot render the formula {latex!r}: {mathml}")
    for name in ("log", "exp"):
        mathml = mathml.replace(
            f"<mi>{name}</mi>", f'<mi>{name}</mi><mspace width="0.17em"/>'
        )
    return f'<{tag} class="formula">{mathml}</{tag}>'


def link_papers(content: str) -> str:
    """Return the HTML with each arXiv number linked, outside code and other links."""
    parts = []
    end = 0
    link = r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>'
    for match in VERBATIM.finditer(content):
        parts += [ARXIV.sub(link, content[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, ARXIV.sub(link, content[end:])])
