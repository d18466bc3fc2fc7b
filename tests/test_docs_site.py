"""The built site: formulas are rendered and papers linked on every page."""

from __future__ import annotations

import functools
import html
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix_cells import cells
from rl_cli_chromium import Chromium, chromium_path
from rl_cli_page_checks import CONTROLS, FOCUSED, POOR_TEXTS

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site was built."""
    made = tmp_path_factory.mktemp("site")
    # For work on the pages: an already built site.
    if built := os.environ.get("RL_BUILT_SITE"):
        return Path(built)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pictures_have_a_text_and_name_nothing_elsewhere(
    folder: Path, site: dict[str, str]
) -> None:
    shown = set()
    for name, page in site.items():
        for image in re.findall(r"<img[^>]*>", page):
            alternative = re.search(r'alt="([^"]*)"', image)
            source = re.search(r'src="([^"]*)"', image)
            assert source, name
            # Material's own logo is decorative.
            if "assets/images/" in source[1] or "logo" in image:
                continue
            assert alternative is not None, image
            assert len(alternative[1].split()) >= 3, image
            if source[1].endswith(".svg"):
                assert re.search(r'width="\d+" height="\d+"', image), image
            shown.add(((folder / name).parent / source[1]).resolve())
    terminals = set((folder / "assets/terminal").glob("*.svg"))
    assert len(terminals) > 30
    assert {path.resolve() for path in terminals} <= shown
    for path in terminals:
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\s\"<)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"} | {
            found
            for found in addresses
            if "127.0.0.1" in found or "json-schema" in found
        }
        assert "url(" not in re.sub(r"url\(#", "", text)


# One page of each kind: home, terminals, key tables, docstrings, formulas, pictures.
PAGES = (
    "",
    "reference/cli/",
    "reference/config/",
    "reference/rl-envs/",
    "algorithms/grpo/",
    "guides/see-a-run/",
    "guides/troubleshooting/",
    "project/comparison/",
)
NEEDS_BROWSER = pytest.mark.skipif(chromium_path() is None, reason="no Chromium")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join(30)


def open_page(browser: Chromium, url: str) -> None:
    browser.call("Page.navigate", url=url)
    browser.wait(
        f"location.href === '{url}' && document.readyState === 'complete' && "
        "document.querySelector('article') !== null"
    )


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_of_the_site_has_contrast(address: str, dark: bool) -> None:
    with Chromium(dark=dark) as browser:
        poor = {}
        for page in PAGES:
            open_page(browser, address + page)
            found = browser.evaluate(POOR_TEXTS)
            assert found["checked"] > 50, page
            poor[page] = found["poor"]
        assert {page: texts for page, texts in poor.items() if texts} == {}


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_shows_whole_pages(address: str, dark: bool) -> None:
    with Chromium(width=400, height=800, dark=dark) as browser:
        for page in PAGES:
            open_page(browser, address + page)
            width = browser.evaluate("document.documentElement.scrollWidth")
            assert width <= 400, page


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "page",
    cells(["", "guides/see-a-run/", "algorithms/grpo/"], ["guides/see-a-run/"]),
)
def test_the_keyboard_reaches_every_control_of_the_site(
    address: str, page: str, dark: bool
) -> None:
    with Chromium(dark=dark) as browser:
        open_page(browser, address + page)
        wanted = set(browser.evaluate(CONTROLS))
        assert len(wanted) > 20
        reached: dict[int, bool] = {}
        for _ in range(2 * len(wanted) + 20):
            browser.press("Tab")
            number, is_shown = browser.evaluate(FOCUSED)
            reached[number] = reached.get(number, False) or is_shown
        missed = "((i) => window.controls[i].outerHTML.slice(0, 120))({})"
        assert [
            browser.evaluate(missed.format(i)) for i in wanted - reached.keys()
        ] == []
        unseen = [i for i in wanted if not reached[i]]
        assert [browser.evaluate(missed.format(i)) for i in unseen] == []
