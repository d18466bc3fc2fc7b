"""Build the five wheels, install each alone in an empty environment, import it.

Everything comes from `wheelhouse/` and from the wheels just built, so it needs no
network. The examples of rl-distributed run with its wheel and torch alone, and the `rl`
command from its installed wheel, outside the repository. rl-distributed and rl-envs are
used together, with torch, and without it in an environment that must stay small.
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
# rl-distributed needs torch for its examples only.
EXTRAS = {"rl-distributed": "[torch]"}
WITHOUT_TORCH = ("rl-distributed", "rl-envs")
MOST_MB_WITHOUT_TORCH = 450
# Nothing from the repository's environment; and of a short-lived installation, only
# imported modules are compiled, beside their sources.
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


def wheel_of(package: str) -> Path:
    """Find the wheel built for a package."""
    return next(DIST.glob(f"{package.replace('-', '_')}-*.whl"))


def install(venv: Path, *wheels: str) -> Path:
    """Install wheels and their requirements in a new environment; return its Python."""
    run("uv", "venv", "--quiet", "--python", sys.executable, venv)
    python = venv / "bin" / "python"
    # uv caches a folder's wheels by name and version, which do not change here.
    fresh = [f"--refresh-package={name}" for name in PACKAGES]
    run("uv", "pip", "install", "--quiet", "--python", python, "--no-index", *fresh,
        "--find-links", WHEELHOUSE, "--find-links", DIST, *wheels)  # fmt: skip
    return python


def installed_names(python: Path) -> set[str]:
    """Return the names of an environment's distributions."""
    listed = run("uv", "pip", "list", "--python", python, "--format", "freeze")
    return {line.split("==")[0] for line in listed.split()}


def import_all_names(python: Path, package: str) -> None:
    """Import a package and every public name of it."""
    module = package.replace("-", "_")
    code = f"import {module}; [getattr({module}, name) for name in {module}.__all__]"
    run(python, "-c", code, cwd=python.parent)


def size_mb(folder: Path) -> float:
    """Return the size of a folder's files, without compiled modules."""
    files = (path for path in folder.rglob("*") if path.suffix != ".pyc")
    return sum(path.lstat().st_size for path in files if path.is_file()) / 1e6


def use_together(python: Path, scratch: Path) -> None:
    """Use the packages that need no torch: batches, workers, environments, servers."""
    for package in WITHOUT_TORCH:
        import_all_names(python, package)
        scripts = ROOT / "packages" / package / "tests" / "scripts"
        run(python, scripts / "numpy_or_torch.py", cwd=scratch)


def use_with_and_without_torch(scratch: Path) -> None:
    """Use the packages that need no torch, in environments with and without it."""
    below, above = (str(wheel_of(package)) for package in WITHOUT_TORCH)
    use_together(install(scratch / "torch", f"{below}[torch]", above), scratch)
    shutil.rmtree(scratch / "torch")
    venv = scratch / "without-torch"
    python = install(venv, below, above)
    size = size_mb(venv)
    if "torch" in installed_names(python):
        raise SystemExit(f"wheels: {' or '.join(WITHOUT_TORCH)} pulled in torch")
    if size > MOST_MB_WITHOUT_TORCH:
        most = MOST_MB_WITHOUT_TORCH
        raise SystemExit(f"wheels: {size:.0f} MB without torch, above {most} MB")
    use_together(python, scratch)
    sys.stderr.write(f"wheels: without torch {size:.0f} MB; both ways work\n")


def install_and_import(package: str, scratch: Path) -> None:
    """Install one wheel in an empty environment and check its dependencies."""
    venv = scratch / package
    python = install(venv, f"{wheel_of(package)}{EXTRAS.get(package, '')}")
    import_all_names(python, package)
    names = installed_names(python)
    above = [
        other
        for other in PACKAGES
        if other in names and other != package and LAYER[other] >= LAYER[package]
    ]
    if above:
        raise SystemExit(f"wheels: {package} pulled in {', '.join(above)}")
    if package == "rl-distributed":
        # Their tests, which define the expected output, with the wheel's Python.
        tests = sorted((ROOT / "tests").glob("test_example_*.py"))
        run(sys.executable, "-m", "pytest", "-q", *tests, RL_EXAMPLE_PYTHON=python)
    if package == "rl-cli":
        run(venv / "bin" / "rl", "doctor", cwd=scratch)
        run(venv / "bin" / "rl", "config", "validate", "quickstart", cwd=scratch)
    sys.stderr.write(
        f"wheels: {package} installs alone ({len(names)} packages, "
        f"{size_mb(venv):.0f} MB)\n"
    )


if __name__ == "__main__":
    build()
    with tempfile.TemporaryDirectory() as folder:
        if not sys.argv[1:] or set(sys.argv[1:]) & set(WITHOUT_TORCH):
            use_with_and_without_torch(Path(folder))
        for name in sys.argv[1:] or PACKAGES:
            install_and_import(name, Path(folder))
            shutil.rmtree(Path(folder) / name)
