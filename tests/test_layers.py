"""Rules for all packages: layers, public surfaces, start-up time, config keys."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["rl_distributed", "rl_models", "rl_envs", "rl_algorithms", "rl_cli"]
HEAVY = ["torch", "ray", "transformers", "datasets", "matplotlib", "vllm"]
RL_WORDS = re.compile(
    r"reward|rollout|advantage|prompt|tokenizer|reinforcement|policy_loss", re.I
)


def source(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


@pytest.mark.parametrize(
    "path", sorted(source("rl_distributed").rglob("*.py")), ids=str
)
def test_rl_distributed_has_no_word_of_reinforcement_learning(path: Path) -> None:
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if RL_WORDS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_surface_exists_and_is_sorted_out(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


PUBLIC_NAMES = tomllib.loads((ROOT / "tests/public_names.toml").read_text())


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_those_that_were_agreed(module: str) -> None:
    """A new name is added to the file as well, so that growth is visible."""
    assert set(PACKAGES) <= set(PUBLIC_NAMES)
    assert sorted(importlib.import_module(module).__all__) == PUBLIC_NAMES[module]


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_nothing_heavy(package: str) -> None:
    code = (
        f"import sys, {package}; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rl_cli.main import _run\n_run(['--help'], False)\n"
        f"print([n for n in {[*HEAVY, 'pydantic', 'rich']!r} if n in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_type_marker_and_changelog_exist(package: str) -> None:
    folder = ROOT / "packages" / package.replace("_", "-")
    version = importlib.import_module("importlib.metadata").version(folder.name)
    assert (source(package) / "py.typed").exists()
    assert f"[{version}]" in (folder / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    undocumented = []
    for path in source(package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            undocumented.append(str(path))
    assert undocumented == []


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_not_named_make(package: str) -> None:
    """CONTRIBUTING has one prefix per purpose; batches keep NeMo RL's names."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in source(package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match(r"_*make_(?!microbatch_iterator)", node.name)
    ]
    assert found == []
