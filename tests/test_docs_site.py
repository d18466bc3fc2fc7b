"""The site as it is built: formulas are rendered and papers linked on every page."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site was built."""
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, str]:
    """The HTML of every page but the 404 page."""
    pages = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("index.html")
    }
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    return pages


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_formulas_are_rendered(site: dict[str, str]) -> None:
    for name, page in site.items():
        assert "arithmatex" not in page, name
        prose = html.unescape(re.sub(r"<[^>]*>", "", BLOCKS.sub("", page)))
        assert not re.search(r"\\[a-z]+\{|\$\$|\\[([]", prose), name
    for path in (ROOT / "docs/algorithms").glob("*.md"):
        # The equations of DAPO to SFT; each page has at least one.
        assert "<math" in site[f"algorithms/{path.stem}/index.html"], path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_papers_are_linked(site: dict[str, str]) -> None:
    found = 0
    for name, page in site.items():
        body = re.search(r"<article.*?</article>", page, re.DOTALL)
        assert body is not None, name
        links = re.compile(r'<a href="https://arxiv\.org/abs/[\d.]+">.*?</a>')
        found += len(links.findall(body[0]))
        rest = BLOCKS.sub("", links.sub("", body[0]))
        assert not re.search(r"arXiv:\d", rest), name
    assert found >= 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_find_every_page(folder: Path, site: dict[str, str]) -> None:
    listed = (folder / "llms.txt").read_text()
    links = re.findall(r"^- \[(.+?)\]\((.+?)\)", listed, re.MULTILINE)
    assert len(dict(links)) == len(links)
    pages = {name.removesuffix("index.html") for name in site}
    assert {address for _, address in links} == pages - {""}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_loads_nothing_from_elsewhere(site: dict[str, str]) -> None:
    for name, page in site.items():
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(http[^"]*)', page)
        assert not loaded, name
