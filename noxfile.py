"""What is done with this repository: `nox -l` lists it, `nox -s NAME` runs it.

Every session works in one environment, `.venv`, that uv makes from `uv.lock` and the
wheels in `wheelhouse/`. A session sets up what it needs by itself; once that is done,
it begins its real work within seconds and needs no network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
WHEELHOUSE = ROOT / "wheelhouse"
PACKAGES = ["rl-distributed", "rl-models", "rl-envs", "rl-algorithms", "rl-cli"]

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint", "types", "layers", "bounds", "wheels", "docs"]
nox.options.stop_on_first_error = True

# Byte code is kept in the project's own cache, even where the machine forbids it beside
# the sources: actors start in seconds because nothing is compiled twice.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".cache" / "pycache"))
os.environ["UV_COMPILE_BYTECODE"] = "1"
os.environ["UV_PROJECT_ENVIRONMENT"] = str(VENV)
os.environ["VIRTUAL_ENV"] = str(VENV)
os.environ.setdefault("UV_PYTHON_PREFERENCE", "only-system")
# uv lies beside the Python that runs nox, also where that environment is not activated.
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
)


def uv(session: nox.Session, *args: str) -> None:
    """Run uv."""
    session.run("uv", *args, external=True)


def python(session: nox.Session, *args: str) -> None:
    """Run the Python of the project's environment."""
    session.run(str(VENV / "bin" / "python"), *args, external=True)


def fill(session: nox.Session) -> None:
    """Download the pinned wheels that are not there yet."""
    session.run(sys.executable, "tools/wheelhouse.py", "fill", external=True)


def sync(session: nox.Session, *groups: str) -> None:
    """Bring `.venv` to the locked state: all five packages and the given groups."""
    fill(session)
    options = [option for group in groups for option in ("--group", group)]
    quiet = [] if "--verbose" in sys.argv else ["--quiet"]
    uv(session, "sync", "--frozen", "--inexact", "--all-packages", *options, *quiet)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small model; arguments after -- reach `rl train quickstart`."""
    fill(session)
    uv(session, "sync", "--frozen", "--inexact", "--no-dev", "--quiet",
       "--package", "rl-cli")  # fmt: skip
    python(session, "-m", "rl_cli", "train", "quickstart", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of all packages and those that cross them, two suites at a time.

    `-- rl-envs -k judge` runs one suite. A suite has the name of its package, or
    `workspace` for the tests across packages; what follows reaches pytest.
    """
    # The tests across packages build the site.
    sync(session, "docs")
    python(session, "tools/suites.py", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Run the cells of matrices that `tests` covers by others (`-- rl-models`)."""
    sync(session, "docs")
    python(session, "tools/suites.py", "--matrix", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Count the lines of each package that its tests run (`-- rl-envs`)."""
    sync(session, "docs")
    python(session, "tools/suites.py", "--coverage", *session.posargs)


@nox.session
def tests_gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, with plain pytest and without Ray."""
    session.run("python", "-m", "pytest", "tests/gpu", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and lint rules."""
    sync(session)
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "-m", "ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all five packages, strictly."""
    sync(session)
    for package in PACKAGES:
        module = package.replace("-", "_")
        python(session, "-m", "mypy", f"packages/{package}/src/{module}")


@nox.session
def layers(session: nox.Session) -> None:
    """Check that no package imports one above it, and that no imports go in circles."""
    sync(session)
    session.run(str(VENV / "bin" / "lint-imports"), external=True)


@nox.session
def bounds(session: nox.Session) -> None:
    """Check the version ranges between our packages, which uv ignores."""
    sync(session)
    python(session, "tools/bounds.py")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all five wheels, install each alone in an empty environment, import it."""
    sync(session)
    python(session, "tools/wheels.py", *session.posargs)


@nox.session
def first_hour(session: nox.Session) -> None:
    """Walk the way of a new user, in a terminal, on the wheels installed.

    `-- --step train` takes single steps, `-- --python PY` what is installed there.
    """
    sync(session)
    python(session, "-m", "tests.first_hour", *session.posargs)


@nox.session
def trackio(session: nox.Session) -> None:
    """Try the sink `trackio` with the real package, which the lock has no room for.

    It wants an older pillow than the rest, so it is installed in an environment of its
    own, from where pip finds packages.
    """
    venv = ROOT / ".cache" / "trackio"
    session.run(sys.executable, "-m", "venv", "--clear", str(venv), external=True)
    own = str(venv / "bin" / "python")
    package, test = "./packages/rl-distributed", "tests/test_trackio_sink.py"
    wanted = ["trackio>=0.43", "pytest>=8", package]
    session.run(own, "-m", "pip", "install", "--quiet", *wanted, external=True)
    # Without the settings of the repository, whose plugins are not installed there.
    options = ["-q", "-rs", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    session.run(own, "-m", "pytest", *options, f"{package}/{test}", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, strictly (`-- serve` shows it on 127.0.0.1)."""
    sync(session, "docs")
    what = session.posargs or ["build", "--strict"]
    python(session, "-m", "mkdocs", *what)


@nox.session
def pictures(session: nox.Session) -> None:
    """Record the commands that train or serve, and draw a run's page (Chromium)."""
    sync(session, "docs")
    python(session, "-m", "tools.record_commands", *session.posargs)


@nox.session
def commands(session: nox.Session) -> None:
    """Run every `rl` command that the pages show (`-- --only serve.md`)."""
    sync(session)
    python(session, "-m", "tools.page_commands", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure against named peers; JSON lines on standard output.

    `-- startup` measures starts, against `import torch, ray`.
    """
    sync(session, "bench")
    if session.posargs and session.posargs[0] == "startup":
        python(session, "-m", "benchmarks.startup", *session.posargs[1:])
        return
    if not session.posargs:
        python(session, "-m", "benchmarks.dispatch")
        python(session, "-m", "benchmarks.batches")
    python(session, "-m", "benchmarks", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill, stop and slow workers at random (30 minutes; `-- --minutes 2 --seed 7`)."""
    sync(session)
    runner = "packages/rl-distributed/tests/rl_distributed_chaos.py"
    python(session, runner, *(session.posargs or ["--minutes", "30"]))


@nox.session
def soak(session: nox.Session) -> None:
    """Look for growth in two long runs (`-- --steps 3000 --kind synchronous`)."""
    sync(session)
    python(session, "-m", "benchmarks.soak", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill, stop and slow any process of whole runs (`-- --faults 200 --seed 1`)."""
    sync(session)
    python(session, "-m", "tests.fault_campaign", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the sources in small ways; each must fail a test (`-- --subset`)."""
    sync(session)
    python(session, "-m", "tools.mutants", *session.posargs)


@nox.session
def simulate(session: nox.Session) -> None:
    """Run the asynchronous schedule in simulated worlds (`-- --schedules 100000`)."""
    sync(session)
    python(session, "-m", "tools.simulate", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Send malformed requests to all that listens (`-- 100000` says how many each)."""
    sync(session)
    session.env["RL_FUZZ_REQUESTS"] = (session.posargs or ["10000"])[0]
    python(session, "-m", "pytest", "-q", "tests/test_access_fuzz.py")


@nox.session
def parity(session: nox.Session) -> None:
    """Compare every layout with plain transformers (`-- --page FILE` writes it)."""
    sync(session)
    session.env["PYTHONPATH"] = str(ROOT / "tests")
    page = session.posargs or ["--page", "docs/reference/parity.md"]
    python(session, "-m", "parity", *page)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve again with the index, pin every wheel and write `uv.lock`.

    Versions that are locked stay where they fit; `-- --upgrade` takes the newest.
    """
    script = "tools/wheelhouse.py"
    session.run(sys.executable, script, "lock", *session.posargs, external=True)
