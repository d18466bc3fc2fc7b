from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_distributed

SOURCE = Path(rl_distributed.__file__).parent


@pytest.mark.parametrize("name", rl_distributed.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(rl_distributed, name) is not None
    assert name in dir(rl_distributed)


def test_names_are_listed_once() -> None:
    assert len(set(rl_distributed.__all__)) == len(rl_distributed.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"rl_distributed.*NoSuchThing"):
        _ = rl_distributed.NoSuchThing


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, rl_distributed; "
        "print([m for m in ('ray', 'torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_source_knows_nothing_of_its_users() -> None:
    words = re.compile("reward|rollout|advantage|prompt|tokenizer", re.IGNORECASE)
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if words.search(line)
    ]
    assert found == []
