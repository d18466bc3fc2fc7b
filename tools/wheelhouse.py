"""Fill `wheelhouse/` from the pinned list, or write the list and `uv.lock` again.

    python tools/wheelhouse.py fill     download what requirements/wheelhouse.txt pins
    python tools/wheelhouse.py lock     resolve again, pin, download, write uv.lock
    python tools/wheelhouse.py lock --upgrade    the same, with the newest versions

`uv.lock` resolves against the flat folder `wheelhouse/`, so it names no host. The
download is done by pip, because then a mirror, a proxy or a wheel folder that the
user's pip is configured for is honoured. A package may be pinned in two versions:
extras that exclude each other (`[tool.uv] conflicts`) have environments of their own.
The few published only as sources are built here, and pinned by the hash of the sources.
Standard library only: it runs before anything is installed.
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
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / "wheelhouse"
PINS = ROOT / "requirements" / "wheelhouse.txt"
# Asked only where pip's own configuration has no CPU build of torch.
TORCH_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
# Needed at run time by a locked wheel whose index metadata omits it.
UNDECLARED = ["intel-cmplr-lib-ur==2024.2.1"]
HEADER = (
    "# Every wheel of uv.lock with its hash. Written by `nox -s lock`; do not edit.\n"
)
SOURCE = "  # built from its source"


@dataclass(frozen=True)
class Pin:
    """One version of a distribution, and the hash of its download."""

    name: str
    version: str
    digest: str
    is_source: bool = False

    @property
    def requirement(self) -> str:
        """The requirement line for pip."""
        return f"{self.name}=={self.version} --hash=sha256:{self.digest}"


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


def read_pins(text: str) -> list[Pin]:
    """Parse `name==version --hash=sha256:...` lines."""
    line = rf"^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{{64}})({SOURCE})?$"
    return [
        Pin(name, version, digest, bool(source))
        for name, version, digest, source in re.findall(line, text, re.M)
    ]


def wheel_of(folder: Path, name: str, version: str) -> Path | None:
    """Find the wheel of one pinned distribution in a folder, if it is there."""
    wanted = re.sub(r"[-_.]+", "_", name).lower()
    for path in folder.glob("*.whl"):
        dist, found_version = path.name.split("-")[:2]
        found = re.sub(r"[-_.]+", "_", dist).lower()
        if found == wanted and found_version.replace("_", "+") == version:
            return path
    return None


def call_pip(command: str, lines: list[str], options: list[str]) -> bool:
    """Make pip download the given requirements into the wheelhouse."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    call = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet"]
    call += ["--progress-bar=off", *options, "-r", file.name]
    try:
        return subprocess.call(call) == 0
    finally:
        os.unlink(file.name)


def download(lines: list[str], *options: str) -> bool:
    """Download wheels; return whether all were available."""
    to = ["--only-binary=:all:", "--dest", str(WHEELHOUSE)]
    # pip takes one version of a distribution per call.
    left = lines
    while left:
        names = [re.split("==", line)[0] for line in left]
        first = [line for at, line in enumerate(left) if names[at] not in names[:at]]
        if not call_pip("download", first, [*to, *options]):
            return False
        left = [line for line in left if line not in first]
    return True


def build(pin: Pin) -> None:
    """Build the wheel of a distribution published only as sources.

    Raises:
        SystemExit: It cannot be built.
    """
    say(f"building {pin.name}=={pin.version} from its source")
    options = [f"--no-binary={pin.name}", "--require-hashes"]
    options += ["--wheel-dir", str(WHEELHOUSE)]
    if not call_pip("wheel", [pin.requirement], options):
        raise SystemExit(
            f"wheelhouse: {pin.name} could not be built; see pip's message (C sources "
            "need a compiler: install gcc)"
        )


def fill() -> None:
    """Download every missing pinned wheel, then check all hashes.

    Raises:
        SystemExit: A wheel is unavailable or its hash is wrong.
    """
    pins = read_pins(PINS.read_text())
    WHEELHOUSE.mkdir(exist_ok=True)
    stamp = WHEELHOUSE / ".filled"
    key = hashlib.sha256(PINS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    missing = [pin for pin in pins if not wheel_of(WHEELHOUSE, pin.name, pin.version)]
    say(f"{len(pins)} wheels pinned, {len(missing)} to download")
    for start in range(0, len(missing), 20):
        part = missing[start : start + 20]
        say(f"{start}/{len(missing)} {part[0].name} ... {part[-1].name}")
        lines = [pin.requirement for pin in part if not pin.is_source]
        torch = [line for line in lines if line.startswith("torch==")]
        rest = [line for line in lines if line not in torch]
        if not download(rest, "--require-hashes"):
            raise SystemExit("wheelhouse: pip could not download; see its message")
        if not download(torch, "--require-hashes"):
            say("no CPU build of torch in pip's sources; asking PyTorch's own")
            if not download(torch, "--require-hashes", "--index-url", TORCH_CPU_WHEELS):
                raise SystemExit(
                    "wheelhouse: no CPU build of torch found; put its wheel into a "
                    "folder and name that folder in PIP_FIND_LINKS"
                )
        for pin in part:
            if pin.is_source:
                build(pin)
    remove_unpinned(pins)
    stamp.write_text(key)
    say(f"{len(pins)} wheels ready")


def remove_unpinned(pins: list[Pin]) -> None:
    """Delete wheels that no pin names; fail on one with wrong content."""
    kept = set()
    for pin in pins:
        path = wheel_of(WHEELHOUSE, pin.name, pin.version)
        # pip checked the sources; each build of them has another hash.
        if path is None or not (pin.is_source or sha256(path) == pin.digest):
            if path is not None:
                path.unlink()
            raise SystemExit(
                f"wheelhouse: {pin.name}=={pin.version} is missing or damaged; run "
                "this again"
            )
        kept.add(path)
    for path in WHEELHOUSE.glob("*.whl"):
        if path not in kept:
            path.unlink()


def resolve(*, upgrade: bool) -> list[dict]:
    """Resolve with the index; return the lock's packages for which it has wheels.

    Args:
        upgrade: Whether to take the newest versions; else those of `uv.lock` stay
            where they fit.
    """
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
        lock = scratch / "uv.lock"
        shutil.copy(ROOT / "uv.lock", lock)
        env = dict(os.environ, UV_FIND_LINKS=",".join(links))
        run = ["uv", "lock", "--project", str(scratch)]
        run += ["--upgrade"] if upgrade else []
        subprocess.run(run, check=True, env=env)
        packages = tomllib.loads(lock.read_text())["package"]
    return [package for package in packages if "registry" in package["source"]]


def lock(*, upgrade: bool = False) -> None:
    """Resolve with the index, pin every wheel, download, and write `uv.lock`.

    Args:
        upgrade: As in `resolve`.
    """
    pins, wanted = [], [tuple(line.split("==")) for line in UNDECLARED]
    for package in resolve(upgrade=upgrade):
        name, version = package["name"], package["version"]
        if package.get("wheels"):
            wanted.append((name, version))
        else:
            digest = package["sdist"]["hash"].removeprefix("sha256:")
            pins.append(Pin(name, version, digest, is_source=True))
    WHEELHOUSE.mkdir(exist_ok=True)
    (WHEELHOUSE / ".filled").unlink(missing_ok=True)
    missing = [
        f"{name}=={version}"
        for name, version in wanted
        if not wheel_of(WHEELHOUSE, name, version)
    ]
    say(f"{len(wanted) + len(pins)} wheels, {len(missing)} to download")
    if not download(missing):
        raise SystemExit("wheelhouse: pip could not download; see its message")
    for name, version in wanted:
        path = wheel_of(WHEELHOUSE, name, version)
        if path is None:
            raise SystemExit(f"wheelhouse: no wheel of {name}=={version}")
        pins.append(Pin(name, version, sha256(path)))
    lines = [
        pin.requirement + (SOURCE if pin.is_source else "")
        for pin in sorted(pins, key=lambda pin: (pin.name, pin.version))
    ]
    PINS.parent.mkdir(exist_ok=True)
    PINS.write_text(HEADER + "\n".join(lines) + "\n")
    fill()
    subprocess.run(["uv", "lock", "--offline"], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["fill", "lock"])
    parser.add_argument(
        "--upgrade", action="store_true", help="lock the newest versions"
    )
    arguments = parser.parse_args()
    if arguments.command == "fill":
        fill()
    else:
        lock(upgrade=arguments.upgrade)
