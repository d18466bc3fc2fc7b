"""Draw the pictures of a report that the guide shows, `docs/assets/report*.png`.

`python tools/report_picture.py RUN` needs the folder of a run that samples, and
Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
PICTURES = {"learning": "report.png", "samples": "report-answers.png"}
WIDTH, HEIGHT = 1180, 760
DEADLINE_S = 60


def draw(run: Path, view: str, picture: Path) -> None:
    """Write the page of a run, and what a browser shows of one of its views."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page([read_run(run)], page)
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH},{HEIGHT}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture}",
                f"{page.as_uri()}#{view}",
            ],
            check=True,
            timeout=DEADLINE_S,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="Folder of a run.")
    folder = parser.parse_args().run
    for name, file in PICTURES.items():
        draw(folder, name, ASSETS / file)
