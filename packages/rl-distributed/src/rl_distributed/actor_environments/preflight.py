"""Check in a subprocess, with a deadline, that a Python is fit to run workers.

Ray reports none of this: an interpreter that is missing, or has no Ray, is started
again for ever; one of another Python version crashes later.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rl_distributed.actor_environments.base import driver_facts
from rl_distributed.errors import ActorEnvironmentError

__all__ = ["check_python", "redacted"]

_MARK = "@preflight "
_TAIL_LINES = 12

# Runs in the other Python, which may be of any version. It reports each step before it
# begins the next, so that one that hangs can be named.
_PROBE = """
import json, sys
sys.path[:] = [p for p in sys.path if p]
def say(**found):
    sys.stdout.write("@preflight " + json.dumps(found) + "\\n"); sys.stdout.flush()
say(python=list(sys.version_info[:3]), prefix=sys.prefix)
for name in sys.argv[1:]:
    say(importing=name)
    try:
        module = __import__(name)
    except BaseException as error:
        say(failed=name, kind=type(error).__name__, error=str(error)[:2000])
        break
    try:
        found = str(module.__version__)
    except Exception:
        found = "unknown"
    say(imported=name, version=found)
else:
    say(done=True)
"""
# `ray` and the module that every worker's process begins with.
_NEEDED = ("ray", "rl_distributed", "rl_distributed.workers.host")

# Successes only, by command and imports; a Python that was mended is asked again.
_passed: set[tuple[object, ...]] = set()


def check_python(
    command: Sequence[str],
    imports: Sequence[str],
    deadline_s: float,
    label: str,
    *,
    recheck: bool = False,
) -> float:
    """Check that `command` starts a Python in which workers can run.

    A Python that has passed once in this process is not asked again, unless it has
    changed.

    Args:
        command: program and arguments before those of Python.
        imports: modules that must be importable, besides Ray and rl-distributed.
        deadline_s: how long it may take.
        label: what the message calls the environment.
        recheck: ask also a Python that has passed.

    Returns:
        Seconds that it took; 0.0 where the answer was known.

    Raises:
        ActorEnvironmentError: it is not fit; the message says why and what to do.
    """
    program = shutil.which(command[0])
    if program is None:
        _refuse_program(command[0], label)
    # With the modification time, so that a repaired program is checked again.
    identity = (tuple(command), tuple(imports), os.stat(program).st_mtime_ns)
    if identity in _passed and not recheck:
        return 0.0
    start = time.perf_counter()
    facts, trouble = _ask([program, *command[1:]], imports, deadline_s)
    _judge(facts, trouble, label, deadline_s)
    _passed.add(identity)
    return time.perf_counter() - start


def redacted(text: str) -> str:
    """`text` without the user names and passwords of its addresses."""
    return re.sub(r"://[^/@\s]+@", "://***@", text)


def _refuse_program(program: str, label: str) -> NoReturn:
    if Path(program).is_dir():
        why = "is a folder"
    elif Path(program).exists():
        why = "is not executable"
    else:
        why = "is no program on this machine"
    raise ActorEnvironmentError(
        f"environment {label!r}: {program!r} {why}; give the path of a Python "
        "interpreter that has Ray and rl-distributed"
    )


def _ask(
    command: Sequence[str], imports: Sequence[str], deadline_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the probe; return its findings, and why there are no more of them."""
    # PYTHONHOME points to the driver's installation, which another Python cannot load.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHOME"}
    environment |= {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
    try:
        process = subprocess.Popen(
            [*command, "-c", _PROBE, *_NEEDED, *imports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            # `-c` puts the current folder first on the path, and it may
            # contain anything.
            cwd=os.sep,
            # Its own process group, so that a wrapper script is ended
            # with all its children.
            start_new_session=True,
        )
    except OSError as error:
        return [], f"it cannot be started ({error.strerror or error})"
    try:
        out, err = process.communicate(timeout=deadline_s)
        trouble = f"it ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        _end(process)
        # A process that it started may keep the pipes open.
        try:
            out, err = process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired as error:
            out, err = _text(error.stdout), _text(error.stderr)
        trouble = "it did not answer"
    facts = [
        json.loads(line.removeprefix(_MARK))
        for line in out.splitlines()
        if line.startswith(_MARK)
    ]
    tail = "\n".join((err or out).strip().splitlines()[-_TAIL_LINES:])
    return facts, f"{trouble}; it said:\n{redacted(tail)}" if tail else trouble


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return


def _text(output: str | bytes | None) -> str:
    return (
        output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    )


def _judge(
    facts: Sequence[Mapping[str, Any]], trouble: str, label: str, deadline_s: float
) -> None:
    where = f"environment {label!r}"
    told: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for fact in facts:
        told.update(fact)
        if "imported" in fact:
            versions[fact["imported"]] = fact["version"]
    if "python" in told:
        _check_python_version(told["python"], where)
    # Version before import errors: a wrong Ray may fail in any way later.
    _check_versions(versions, where)
    if told.get("done"):
        return
    if "failed" in told:
        _refuse_import(told, where)
    if "python" not in told:
        raise ActorEnvironmentError(
            f"{where} does not work as a Python interpreter: {trouble}\n"
            f"It was given {deadline_s:g} s; give the path of a Python that works"
        )
    raise ActorEnvironmentError(
        f"{where} did not import {told.get('importing')!r} within "
        f"preflight_deadline_s ({deadline_s:g} s): {trouble}\n"
        "Raise preflight_deadline_s if that import is slow"
    )


def _check_python_version(found: Sequence[int], where: str) -> None:
    own = platform.python_version_tuple()[:2]
    if tuple(str(part) for part in found[:2]) != tuple(own):
        raise ActorEnvironmentError(
            f"{where} has Python {'.'.join(map(str, found))} and the driver "
            f"{platform.python_version()}: both must have the same major and minor "
            f"version; make it with Python {'.'.join(own)} ({sys.base_prefix} has one)"
        )


def _check_versions(versions: Mapping[str, str], where: str) -> None:
    own = driver_facts()
    for module, name, expected in (
        ("ray", "Ray", own["ray"]),
        ("rl_distributed", "rl-distributed", own["rl_distributed"]),
    ):
        if module in versions and versions[module] != expected:
            package = module.replace("_", "-")
            raise ActorEnvironmentError(
                f"{where} has {name} {versions[module]} and the driver {expected}: "
                f"both must have the same version; run there: "
                f"pip install {package}=={expected}"
            )


def _refuse_import(told: Mapping[str, Any], where: str) -> NoReturn:
    name, root = told["failed"], told["failed"].partition(".")[0]
    own = driver_facts()
    packages = {
        "ray": f"ray=={own['ray']}",
        "rl_distributed": f"rl-distributed=={own['rl_distributed']}",
    }
    if told["kind"] != "ModuleNotFoundError":
        remedy = "it is there, but does not import"
    elif root in packages:
        remedy = f"run there: pip install {packages[root]}"
    else:
        remedy = "add the package that has it to the environment's requirements"
    raise ActorEnvironmentError(
        f"{where} cannot import {name!r}: {told['kind']}: {told['error']}; {remedy}"
    )
