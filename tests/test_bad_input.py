"""Wrong input yields one message with the cause and the remedy, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_inputs import (
    CASES,
    BadInput,
    make_files,
    page_rows,
    row_of,
    said,
    taken_port,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    make_files(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace(" ", "-"))
def test_a_mistake_is_named_as_the_page_says(case: BadInput, folder: Path) -> None:
    with taken_port() as port:
        code, message = said(case, folder, port)
    assert code == case.code
    assert case.core in message
    assert "Traceback" not in message
    assert "unexpected" not in message
    assert row_of(case, code, message) in page_rows()
    assert not (folder / "runs").exists()


def test_the_page_has_every_mistake_once() -> None:
    assert len(page_rows()) == len(CASES) == len({case.what for case in CASES}) >= 40


@pytest.mark.parametrize(
    ("change", "core"),
    [
        ("data.train=long.jsonl", "prompt"),
        ("cluster.workers_per_node=64", "needs 64 CPUs on one node"),
    ],
)
def test_what_only_the_start_of_a_run_can_find(
    change: str, core: str, folder: Path
) -> None:
    command = f"train grpo --config grpo.yaml {change} output_dir=started"
    code, message = said(BadInput("late", command, core), folder, 0)
    assert (code, core in message) == (2, True), message
