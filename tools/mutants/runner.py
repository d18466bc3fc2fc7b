"""Run tests against changed copies of the sources, each in a process of its own.

```
parent: imports pytest, torch, ... once; copies the repository for each slot
  -> fork per run -> the sources of the slot's copy come first on the path -> pytest
```
The working tree is only read, once: a killed run leaves it as it was, and work that
continues in it does not affect the run. Processes started by tests find the same copy
through PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import hypothesis
import pytest
from tools.mutants.catalog import Mutant

__all__ = ["Outcome", "Run", "Slot", "import_heavy", "run_all"]

# They take seconds and are the same in every run.
_HEAVY = ("numpy", "pydantic", "torch", "torch.distributed.tensor", "ray",
          "transformers", "transformers.models.qwen2.modeling_qwen2",
          "transformers.models.qwen3.modeling_qwen3",
          "transformers.models.llama.modeling_llama")  # fmt: skip
# Several run at a time, and a fork keeps only one thread.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_COPIED = ("packages", "tests", "pyproject.toml")
_SHOWN_LINES = 25


@dataclass(frozen=True)
class Run:
    """Tests and the mutant that they run against; None for the unchanged sources."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    run: Run
    exit_code: int | None
    """pytest's exit code; negative after a signal; None after a timeout."""
    seconds: float
    output: str

    @property
    def failed_test(self) -> str:
        """The first test that failed, if any."""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return found[1] if found else ""

    @property
    def verdict(self) -> str:
        """`passed` or `killed`; any other text is the reason for no verdict."""
        code = self.exit_code
        named = {None: "time is up", 2: "the tests cannot be collected",
                 4: "the tests cannot be collected"}  # fmt: skip
        if code in (0, 1):
            return "killed" if code else "passed"
        return f"no verdict: {named.get(code, f'exit code {code}')}"

    @property
    def end_of_output(self) -> str:
        """The last lines of pytest's output."""
        return "\n".join(self.output.splitlines()[-_SHOWN_LINES:])


def import_heavy() -> None:
    """Import what all runs share; none of our own modules may be among it."""
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    for name in _HEAVY:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    own = [name for name in sys.modules if name.split(".")[0] in _own_packages()]
    assert not own, f"imported before the fork, so never changed: {own}"
    ci = hypothesis.settings.get_profile("ci")
    # One failing example is enough: no time is spent on shrinking it.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", ci, phases=phases)


def _own_packages() -> set[str]:
    return {path.name for path in Path.cwd().glob("packages/*/src/*")}


class Slot:
    """A copy of all sources and tests, used by one run at a time.

    Args:
        root: The root of the repository.
        folder: A new folder for the copy.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in _COPIED:
            if (root / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / name, folder / name, ignore=ignored)
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        self.paths = [str(path) for path in sorted(folder.glob("packages/*/src"))]
        self.temporary = folder / "temporary"
        self.log = folder / "log"
        self._changes = 0

    @contextlib.contextmanager
    def changed(self, mutant: Mutant | None) -> Iterator[None]:
        """Apply the change to the copy while the block runs."""
        if mutant is None:
            yield
            return
        target = self.folder / mutant.file
        source = target.read_text()
        self._write(target, mutant.apply(source))
        try:
            yield
        finally:
            self._write(target, source)

    def _write(self, target: Path, text: str) -> None:
        target.write_text(text)
        # Byte code is keyed by second and size: never use the same second twice.
        self._changes += 1
        os.utime(target, (self._changes, self._changes))


def _run_tests(slot: Slot, tests: Sequence[str]) -> None:
    """Run the tests in the child and exit with pytest's exit code."""
    os.setsid()
    with slot.log.open("wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    root = str(Path.cwd())
    sys.path[:] = slot.paths + [path for path in sys.path if path not in ("", root)]
    os.chdir(slot.folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(slot.paths)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(slot.log) + ".pycache"
    importlib.invalidate_caches()
    options = ["-x", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", "--no-cov"]
    options += [f"--basetemp={slot.temporary}", "--hypothesis-profile=mutants"]
    # Modules imported before the fork are not rewritten, and are not tests either.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--timeout=0"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


class _Active:
    """A run in progress."""

    def __init__(self, slot: Slot, run: Run, timeout_s: float) -> None:
        self.slot, self._run = slot, run
        self._change = slot.changed(run.mutant)
        self._change.__enter__()
        context = multiprocessing.get_context("fork")
        self.process: BaseProcess = context.Process(
            target=_run_tests, args=(slot, run.tests)
        )
        self._begin = time.monotonic()
        self.ends_at = self._begin + timeout_s
        self.process.start()

    def finish(self) -> Outcome:
        """Collect its results; kill its remaining processes."""
        code = self.process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self._change.__exit__(None, None, None)
        shutil.rmtree(self.slot.temporary, ignore_errors=True)
        output = self.slot.log.read_text(errors="replace")
        return Outcome(self._run, code, time.monotonic() - self._begin, output)


def run_all(
    runs: Sequence[Run], slots: Sequence[Slot], timeout_s: float
) -> Iterator[Outcome]:
    """Run them, one per slot at a time; yield each outcome at once.

    Args:
        runs: What to run, in this order.
        slots: Copies to run in.
        timeout_s: Limit of one run.
    """
    free, left = list(slots), list(reversed(runs))
    active: list[_Active] = []
    try:
        while left or active:
            while left and free:
                active.append(_Active(free.pop(), left.pop(), timeout_s))
            soonest = min(one.ends_at for one in active)
            wait([one.process.sentinel for one in active],
                 max(0.0, soonest - time.monotonic()))  # fmt: skip
            now = time.monotonic()
            for one in list(active):
                if not one.process.is_alive() or now >= one.ends_at:
                    active.remove(one)
                    yield one.finish()
                    free.append(one.slot)
    finally:
        for one in active:
            one.finish()
