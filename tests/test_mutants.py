"""The mutants match the sources, and the runner distinguishes the verdicts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 200.0

SOURCE = """
def larger(a, b):
    return a if a > b else b
"""
TESTS = """
import subprocess
import sys

import small_package


def test_larger():
    assert small_package.larger(1, 2) == 2


def test_larger_in_another_process():
    code = "import small_package; print(small_package.larger(1, 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"2"
"""
GROUP = """
[[group]]
file = "packages/small/src/small_package/__init__.py"
tests = ["packages/small/tests/test_small.py{test}"]
"""
MUTANT = """
[[group.mutant]]
name = "{name}"
old = "a > b"
new = "{new}"
"""


def catalog() -> ModuleType:
    path = ROOT / "tools/mutants/catalog.py"
    spec = importlib.util.spec_from_file_location("mutants_catalog", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_fits_the_sources() -> None:
    module = catalog()
    mutants = module.load_mutants(ROOT / "tools/mutants/changes")
    assert module.problems(mutants, ROOT) == []
    assert len(mutants) >= 150
    assert 10 <= sum(mutant.subset for mutant in mutants) < len(mutants) / 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a >= b", "a < b", "exactly once .* 0 times"),
        ("a", "b", r"exactly once .* \d+ times"),
        ("a > b", "(a > b)", "says the same"),
        ("a > b", "a >", "is no Python"),
    ],
)
def test_mutants_that_do_not_fit_are_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    module = catalog()
    (tmp_path / "source.py").write_text(SOURCE)
    (tmp_path / "test_source.py").write_text("")
    mutant = module.Mutant("odd", "source.py", old, new, ("test_source.py::test",))
    (problem,) = module.problems([mutant], tmp_path)
    assert problem.startswith("odd: ")
    assert re.search(message, problem)


def list_of_all_kinds() -> str:
    """Two that are killed, one that survives, and three without a verdict."""
    near = GROUP.format(test="::test_larger")
    near += MUTANT.format(name="smaller", new="a < b")
    near += MUTANT.format(name="survivor", new="a >= b")
    near += MUTANT.format(name="no-import", new="a > b else 0\\n1 / 0\\n0 if 1")
    near += MUTANT.format(name="endless", new="[0 for _ in iter(int, 1)]")
    far = GROUP.format(test="::test_larger_in_another_process")
    far += MUTANT.format(name="other-process", new="a < b")
    absent = GROUP.format(test="::test_absent")
    absent += MUTANT.format(name="no-test", new="a < b")
    return near + far + absent


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one package, whose sources are found only by path."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "packages/small/src/small_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    tests = folder / "packages/small/tests"
    tests.mkdir()
    (tests / "test_small.py").write_text(TESTS)
    (folder / "changes").mkdir()
    (folder / "changes/all.toml").write_text(list_of_all_kinds())
    return folder


def run(project: Path, *options: str) -> tuple[int, str]:
    """Run the session on the list; return its exit code and its output."""
    before = {path: path.read_bytes() for path in project.rglob("*.py")}
    command = [sys.executable, "-m", "tools.mutants", "--changes", "changes", *options]
    done = subprocess.run(
        command,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    after = {path: path.read_bytes() for path in project.rglob("*.py")}
    assert after == before, "the working tree is only read"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_survivors_and_missing_verdicts_fail(project: Path) -> None:
    code, said = run(project, "--timeout", "30")
    shown = {
        "smaller": r"killed .* test_small\.py::test_larger$",
        "other-process": r"killed .*_in_another_process$",
        "survivor": r"SURVIVED",
        "no-import": r"no verdict: the tests cannot be collected",
        "endless": r"no verdict: time is up",
    }
    for name, verdict in shown.items():
        assert re.search(rf"^{name} +{verdict}", said, re.M), said
    assert "6 mutants: 2 killed, 1 SURVIVED, 3 no verdict" in said
    assert code == 1


@pytest.mark.matrix
@pytest.mark.slow
def test_a_run_without_survivors_succeeds(project: Path) -> None:
    code, said = run(project, "--only", "smaller", "--only", "other-*")
    assert "2 mutants: 2 killed, 0 SURVIVED, 0 no verdict" in said
    assert code == 0
