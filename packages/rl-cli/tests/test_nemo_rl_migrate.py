"""`rl config migrate`: imports in scripts written for NeMo RL."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_cli.nemo_rl.script_imports import rewrite_imports
from rl_distributed.errors import ConfigError

SCRIPTS = Path(__file__).parents[2] / "rl-algorithms/tests/nemo_rl_scripts"


def rewritten(tmp_path: Path, text: str) -> tuple[str, list[str], list[str]]:
    script = tmp_path / "script.py"
    script.write_bytes(text.encode())
    result = rewrite_imports(script)
    ast.parse(result.after.removeprefix("\ufeff"))
    return result.after, result.notes, result.remaining


def test_names_go_to_their_places(tmp_path: Path) -> None:
    after, notes, remaining = rewritten(
        tmp_path,
        "import torch\n"
        "from nemo_rl.utils.timer import Timer, TimeoutChecker as Checker\n"
        "from nemo_rl.algorithms.loss_functions import NLLLoss, masked\n"
        "x = Timer()\n",
    )
    assert after == (
        "import torch\n"
        "from rl_distributed import Timer\n"
        "from rl_distributed.timing import TimeoutChecker as Checker\n"
        "from nemo_rl.algorithms.loss_functions import masked\n"
        "from rl_algorithms.compat.nemo_rl.losses import NLLLossFn as NLLLoss\n"
        "x = Timer()\n"
    )
    assert [line.partition(":")[0] for line in notes] == ["line 2", "line 3"]
    assert "rl_algorithms.NLLLossFn" in notes[1]
    assert len(remaining) == 1
    assert "line 3: nemo_rl.algorithms.loss_functions.masked is not in" in remaining[0]


def test_the_trap_of_dpo_is_not_sprung(tmp_path: Path) -> None:
    after, notes, _ = rewritten(
        tmp_path, "from nemo_rl.algorithms.loss import DPOLossFn\n"
    )
    # This package's loss would read the same column differently.
    assert after == "from rl_algorithms.compat.nemo_rl.losses import DPOLossFn\n"
    assert "roll the column back" in notes[0]


@pytest.mark.parametrize(
    ("line", "remains"),
    [
        ("import nemo_rl.utils.timer as t", "import nemo_rl.utils.timer stays"),
        ("from nemo_rl.utils import timer", "nemo_rl.utils.timer stays"),
        ("x = 1; from nemo_rl.utils.timer import Timer", "a line of its own"),
        ("from nemo_rl.utils.timer import *", "is not in the map"),
        ("from nemo_rl.algorithms.grpo import grpo_train", "rl train grpo"),
        ("from nemo_rl.weight_sync import Any", "rl_models.WeightSynchronizer"),
        ("NAME = 'nemo_rl.environments.math_environment.MathEnvironment'", "the text"),
    ],
)
def test_what_stays_is_named(tmp_path: Path, line: str, remains: str) -> None:
    after, _, remaining = rewritten(tmp_path, f"{line}\n")
    assert after == f"{line}\n"
    assert len(remaining) == 1
    assert remaining[0].startswith("line 1: ")
    assert remains in remaining[0]


def test_the_form_of_a_script_stays(tmp_path: Path) -> None:
    text = (
        "\ufeff# a page \x0c\r\n"
        "try:\r\n"
        "\tfrom nemo_rl.distributed.worker_groups import (  # the group\r\n"
        "\t\tMultiWorkerFuture as Future,\r\n"
        "\t)\r\n"
        "except ImportError:\r\n"
        "\tFuture = None  # nothing\r\n"
        "s = 'from nemo_rl.utils.timer import Timer'\r\n"
    )
    after, _, remaining = rewritten(tmp_path, text)
    assert after == (
        "\ufeff# a page \x0c\r\n"
        "try:\r\n"
        "\t# the group\r\n"
        "\tfrom rl_distributed import MultiWorkerFuture as Future\r\n"
        "except ImportError:\r\n"
        "\tFuture = None  # nothing\r\n"
        "s = 'from nemo_rl.utils.timer import Timer'\r\n"
    )
    assert remaining == []


def test_long_imports_are_put_on_lines(tmp_path: Path) -> None:
    names = "GenerationDatumSpec, GenerationOutputSpec, GenerationInterface"
    line = f"from nemo_rl.models.generation.interfaces import {names}"
    after, _, _ = rewritten(tmp_path, f"{line}\nif True:\n     {line}\n")
    assert after == (
        f"from rl_models import {names}\n"
        "if True:\n"
        "     from rl_models import (\n"
        "         GenerationDatumSpec,\n"
        "         GenerationOutputSpec,\n"
        "         GenerationInterface,\n"
        "     )\n"
    )


def test_a_diff_is_shown_and_the_file_is_changed_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    text = "from nemo_rl.utils.timer import Timer\n"
    script.write_text(text)
    assert _run(["config", "migrate", str(script)], False) == 0
    assert "-from nemo_rl.utils.timer import Timer" in capsys.readouterr().out
    assert script.read_text() == text
    assert _run(["config", "migrate", str(script), "--write"], False) == 0
    assert script.read_text() == "from rl_distributed import Timer\n"
    capsys.readouterr()
    assert _run(["config", "migrate", str(script), "--write"], False) == 0
    assert "no import to rewrite" in capsys.readouterr().out
    script.write_text("import nemo_rl.utils.timer\n")
    assert _run(["config", "migrate", str(script)], False) == 1
    assert "still needs nemo_rl" in capsys.readouterr().err


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    for content, message in (
        (b"def (:\n", "script.py:1 is not valid Python"),
        (b"\xff\xfe", "cannot read the script"),
    ):
        (tmp_path / "script.py").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            rewrite_imports(tmp_path / "script.py")
    with pytest.raises(ConfigError, match="cannot read the script"):
        rewrite_imports(tmp_path / "nothing.py")


def test_a_migrated_script_computes_what_it_did(tmp_path: Path) -> None:
    results = []
    for number, runner in enumerate(([], ["-m", "rl_algorithms.compat.nemo_rl"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = folder / "losses.py"
        result = rewrite_imports(SCRIPTS / "losses.py")
        assert result.remaining == []
        script.write_text(result.before if runner else result.after)
        done = subprocess.run(
            [sys.executable, *runner, str(script), str(folder)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("DeprecationWarning" in done.stderr) == bool(runner)
        found = json.loads((folder / "found.json").read_text())
        results.append({k: found[k] for k in ("loss", "gradient", "preference")})
    assert results[0] == results[1]
