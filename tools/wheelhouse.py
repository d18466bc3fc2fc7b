"""Fill `wheelhouse/` from the pinned list, or make the list and `uv.lock` anew.

    python tools/wheelhouse.py fill     download what requirements/wheelhouse.txt pins
    python tools/wheelhouse.py lock     resolve again, pin, download, write uv.lock

`uv.lock` resolves against the flat folder `wheelhouse/`, so it names no host. The
download is done by pip, because then a mirror, a proxy or a wheel folder that the
user's pip is configured for is honoured. Standard library only: it runs before
anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / "wheelhouse"
PINS = ROOT / "requirements" / "wheelhouse.txt"
# Asked only where pip's own configuration has no CPU build of torch.
TORCH_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
# Needed at run time by a locked wheel whose index metadata does not say so.
UNDECLARED = ["intel-cmplr-lib-ur==2024.2.1"]
HEADER = (
    "# Every wheel of uv.lock with its hash. Written by `nox -s lock`; do not edit.\n"
)


def say(message: str) -> None:
    """Print one line at once, so that a long download shows where it is."""
    sys.stderr.write(f"wheelhouse: {message}\n")
    sys.stderr.flush()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_pins(text: str) -> dict[str, tuple[str, str]]:
    """Parse `name==version --hash=sha256:...` lines into name -> (version, hash)."""
    found = re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.M)
    return {name: (version, digest) for name, version, digest in found}


def wheel_of(folder: Path, name: str, version: str) -> Path | None:
    """Find the wheel of one pinned distribution in a folder, if it is there."""
    wanted = re.sub(r"[-_.]+", "_", name).lower()
    for path in folder.glob("*.whl"):
        dist, found_version = path.name.split("-")[:2]
        found = re.sub(r"[-_.]+", "_", dist).lower()
        if found == wanted and found_version.replace("_", "+") == version:
            return path
    return None


def pip_download(lines: list[str], *, hashes: bool, extra: list[str] = ()) -> int:  # type: ignore[assignment]
    """Download the given requirement lines into the wheelhouse; return pip's code."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--dest", str(WHEELHOUSE), *extra]
    command += ["--progress-bar=off", "-r", file.name]
    if hashes:
        command.append("--require-hashes")
    try:
        return subprocess.call(command)
    finally:
        os.unlink(file.name)


def fill() -> None:
    """Download every pinned wheel that is not there yet, then check all hashes.

    Raises:
        SystemExit: When a wheel cannot be had or its hash is wrong.
    """
    pins = read_pins(PINS.read_text())
    WHEELHOUSE.mkdir(exist_ok=True)
    stamp = WHEELHOUSE / ".filled"
    key = hashlib.sha256(PINS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    missing = [
        name for name, pin in pins.items() if not wheel_of(WHEELHOUSE, name, pin[0])
    ]
    say(f"{len(pins)} wheels pinned, {len(missing)} to download")
    for start in range(0, len(missing), 20):
        part = missing[start : start + 20]
        say(f"{start}/{len(missing)} {part[0]} ... {part[-1]}")
        lines = [f"{n}=={pins[n][0]} --hash=sha256:{pins[n][1]}" for n in part]
        torch = [line for line in lines if line.startswith("torch==")]
        rest = [line for line in lines if line not in torch]
        if rest and pip_download(rest, hashes=True) != 0:
            raise SystemExit("wheelhouse: pip could not download; see its message")
        if torch and pip_download(torch, hashes=True) != 0:
            say("no CPU build of torch in pip's sources; asking PyTorch's own")
            index = ["--index-url", TORCH_CPU_WHEELS]
            if pip_download(torch, hashes=True, extra=index) != 0:
                raise SystemExit(
                    "wheelhouse: no CPU build of torch found; put its wheel into a "
                    "folder and name that folder in PIP_FIND_LINKS"
                )
    remove_unpinned(pins)
    stamp.write_text(key)
    say(f"{len(pins)} wheels ready")


def remove_unpinned(pins: dict[str, tuple[str, str]]) -> None:
    """Delete wheels that no pin names, and fail on one whose content is wrong."""
    kept = set()
    for name, (version, digest) in pins.items():
        path = wheel_of(WHEELHOUSE, name, version)
        if path is None or sha256(path) != digest:
            if path is not None:
                path.unlink()
            raise SystemExit(
                f"wheelhouse: {name}=={version} is missing or damaged; run this again"
            )
        kept.add(path)
    for path in WHEELHOUSE.glob("*.whl"):
        if path not in kept:
            path.unlink()


def lock() -> None:
    """Resolve with the index, pin every wheel, download, and write `uv.lock`."""
    links = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
    ).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        shutil.copytree(
            ROOT / "packages",
            scratch / "packages",
            ignore=shutil.ignore_patterns("tests", "__pycache__"),
        )
        text = (ROOT / "pyproject.toml").read_text()
        text = text.replace("no-index = true", "no-index = false")
        text = re.sub(r"^find-links = .*$", "find-links = []", text, flags=re.M)
        (scratch / "pyproject.toml").write_text(text)
        env = dict(os.environ, UV_FIND_LINKS=",".join(links))
        run = ["uv", "lock", "--project", str(scratch), "--upgrade"]
        subprocess.run(run, check=True, env=env)
        export = ["uv", "export", "--project", str(scratch), "--frozen", "--no-hashes"]
        export += ["--all-packages", "--all-extras", "--all-groups", "--no-annotate"]
        export += ["--no-emit-workspace", "--no-header"]
        out = subprocess.run(
            export, check=True, env=env, capture_output=True, text=True
        ).stdout
    wanted = re.findall(r"^([\w.-]+)==([^\s;]+)", out, re.M)
    WHEELHOUSE.mkdir(exist_ok=True)
    (WHEELHOUSE / ".filled").unlink(missing_ok=True)
    lines = [f"{name}=={version}" for name, version in wanted] + UNDECLARED
    say(f"downloading {len(lines)} wheels")
    if pip_download(lines, hashes=False) != 0:
        raise SystemExit("wheelhouse: pip could not download; see its message")
    wanted += [tuple(line.split("==")) for line in UNDECLARED]
    pinned = []
    for name, version in sorted(wanted):
        path = wheel_of(WHEELHOUSE, name, version)
        if path is None:
            raise SystemExit(f"wheelhouse: no wheel of {name}=={version}")
        pinned.append(f"{name}=={version} --hash=sha256:{sha256(path)}")
    PINS.parent.mkdir(exist_ok=True)
    PINS.write_text(HEADER + "\n".join(pinned) + "\n")
    fill()
    subprocess.run(["uv", "lock", "--offline"], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["fill", "lock"])
    {"fill": fill, "lock": lock}[parser.parse_args().command]()
