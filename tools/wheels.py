"""Build the five wheels, install each alone in an empty environment, import it.

Everything comes from `wheelhouse/` and from the wheels just built, so no network is
needed. The examples of rl-distributed run with its wheel alone, and the `rl` command
from its installed wheel, outside the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / "wheelhouse"
DIST = ROOT / "dist"
PACKAGES = ["rl-distributed", "rl-models", "rl-envs", "rl-algorithms", "rl-cli"]
LAYER = {
    "rl-distributed": 0,
    "rl-models": 1,
    "rl-envs": 1,
    "rl-algorithms": 2,
    "rl-cli": 3,
}
# Nothing of the repository's environment; and of what is installed for a minute, only
# the modules that are imported are compiled, beside their sources.
LEFT_OUT = (
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONPYCACHEPREFIX",
    "UV_COMPILE_BYTECODE",
)
ENV = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}


def run(*command: str | Path, cwd: Path = ROOT, **variables: str | Path) -> str:
    """Run a command; on failure show its output and stop."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=ENV | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(f"wheels: failed: {' '.join(map(str, command))}")
    return done.stdout


def build() -> None:
    """Build one wheel per package into `dist/`."""
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        run("uv", "build", "--wheel", "--out-dir", DIST, "--no-index",
            "--find-links", WHEELHOUSE, folder)  # fmt: skip


def install_and_import(package: str, scratch: Path) -> None:
    """Install one wheel in an empty environment and check what came with it."""
    venv = scratch / package
    run("uv", "venv", "--quiet", "--python", sys.executable, venv)
    python = venv / "bin" / "python"
    wheel = next(DIST.glob(f"{package.replace('-', '_')}-*.whl"))
    # uv keeps the wheels of a folder by name and version, which stay the same here.
    fresh = [f"--refresh-package={name}" for name in PACKAGES]
    run("uv", "pip", "install", "--quiet", "--python", python, "--no-index", *fresh,
        "--find-links", WHEELHOUSE, "--find-links", DIST, wheel)  # fmt: skip
    module = package.replace("-", "_")
    code = f"import {module}; [getattr({module}, name) for name in {module}.__all__]"
    run(python, "-c", code, cwd=scratch)
    listed = run("uv", "pip", "list", "--python", python, "--format", "freeze")
    names = {line.split("==")[0] for line in listed.split()}
    above = [
        other
        for other in PACKAGES
        if other in names and other != package and LAYER[other] >= LAYER[package]
    ]
    if above:
        raise SystemExit(f"wheels: {package} pulled in {', '.join(above)}")
    if package == "rl-distributed":
        # Their tests, which say what they must print, with the Python of the wheel.
        tests = sorted((ROOT / "tests").glob("test_example_*.py"))
        run(sys.executable, "-m", "pytest", "-q", *tests, RL_EXAMPLE_PYTHON=python)
    if package == "rl-cli":
        run(venv / "bin" / "rl", "doctor", cwd=scratch)
        run(venv / "bin" / "rl", "config", "validate", "quickstart", cwd=scratch)
    sys.stderr.write(f"wheels: {package} installs alone ({len(names)} packages)\n")


if __name__ == "__main__":
    build()
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or PACKAGES:
            install_and_import(name, Path(folder))
            shutil.rmtree(Path(folder) / name)
