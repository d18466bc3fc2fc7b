"""Draw the pictures of a run's page that the guide shows, `docs/assets/report*.png`.

`python tools/report_picture.py RUN` needs the folder of a run that samples, and
Chromium. Each question of the report is a picture, one of them in dark mode;
`watch.png` is the page that `rl watch` serves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
PICTURES = {
    "learning": "report.png",
    "samples": "report-answers.png",
    "timing": "report-time.png",
    "trust": "report-trust.png",
    "setup": "report-setup.png",
}
WIDTH, HEIGHT = 1180, 760
# The time line is below the phases.
HEIGHTS = {"timing": 1640}
DEADLINE_S = 60


def draw(url: str, picture: Path, *, dark: bool = False, height: int = HEIGHT) -> None:
    """Save a browser screenshot of a page."""
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                *options,
                f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH},{height}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture}",
                url,
            ],
            check=True,
            timeout=DEADLINE_S,
            stderr=subprocess.DEVNULL,
        )


def draw_report(run: Path, assets: Path) -> None:
    """Draw each question of the report."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page([read_run(run)], page)
        # As seen from the folder of the runs, not from this machine's root.
        above = f"{run.resolve().parent.parent}/"
        page.write_text(page.read_text().replace(above, ""))
        for view, name in PICTURES.items():
            height = HEIGHTS.get(view, HEIGHT)
            draw(f"{page.as_uri()}#{view}", assets / name, height=height)
        draw(f"{page.as_uri()}#learning", assets / "report-dark.png", dark=True)


@contextlib.contextmanager
def watched(run: Path) -> Iterator[str]:
    """Serve the live page; yield its address.

    Raises:
        TimeoutError: The server does not start in time.
    """
    command = [sys.executable, "-m", "rl_cli", "watch", str(run), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        deadline_s = time.monotonic() + DEADLINE_S
        said = b""
        while b"\n" not in said:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise TimeoutError(f"rl watch said no address in {DEADLINE_S} s")
            if not (part := os.read(process.stdout.fileno(), 4096)):
                raise RuntimeError(f"rl watch ended: {process.wait(DEADLINE_S)}")
            said += part
        yield json.loads(said)["url"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)


def main(run: Path, assets: Path) -> None:
    """Draw all pictures."""
    draw_report(run, assets)
    with watched(run) as url:
        draw(f"{url}#samples", assets / "watch.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="Folder of a run.")
    parser.add_argument("--to", type=Path, default=ASSETS, help="Folder of pictures.")
    arguments = parser.parse_args()
    main(arguments.run, arguments.to)
