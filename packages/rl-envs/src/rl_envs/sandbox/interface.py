"""`Sandbox`: what runs programs that are not trusted, whatever confines them.

```
Program --its language: build, run--> Command --run_command--> SandboxResult
```
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from rl_envs.errors import SandboxError
from rl_envs.sandbox.languages import (
    BUILD_LIMITS,
    LANGUAGES,
    built_file,
    language_of,
)
from rl_envs.sandbox.runs import (
    Command,
    Program,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
)

__all__ = ["Sandbox"]

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_LOOK_LIMITS = SandboxLimits(time_s=30.0)


class Sandbox(ABC):
    """Runs programs and commands, several at a time, none in the process that asks.

    A subclass says how a command is run (`run_command`) and which languages there are.
    Close it, or use it as a context.
    """

    num_slots: int
    """Programs that run at the same time."""
    level: SandboxLevel
    """The level that was reached."""

    @abstractmethod
    def run_command(
        self, command: Command, limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run a command line in an empty scratch folder; wait for a free slot before.

        Args:
            command: What to run.
            limits: What it may use.

        Raises:
            SandboxError: It is closed, or cannot run commands here.
        """

    @abstractmethod
    def close(self) -> None:
        """End all that runs, and give back what it holds; it may be called again."""

    @property
    def languages(self) -> tuple[str, ...]:
        """Names of the languages that programs may be in here; the first use looks."""
        return tuple(name for name, why in self.missing_languages().items() if not why)

    def missing_languages(self) -> dict[str, str]:
        """Return, of each of `LANGUAGES`, why it is not there; empty: it is."""
        if self._missing is None:
            self._missing = self._look_for_languages()
        return self._missing

    # On the class, as subclasses need not call a constructor of this one.
    _missing: dict[str, str] | None = None

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        language: str = "python",
    ) -> SandboxResult:
        """Run a program; wait for a free slot before.

        Args:
            code: Its text.
            stdin: What it reads.
            limits: What it may use; its build has limits of its own.
            language: One of `languages`.

        Raises:
            SandboxError: The sandbox is closed or failed for good, or has no such
                language.
        """
        return self.run_all([Program(code, stdin, language)], limits)[0]

    def run_all(
        self,
        programs: Sequence[Program | tuple[str, str]],
        limits: SandboxLimits | Sequence[SandboxLimits] | None = None,
    ) -> list[SandboxResult]:
        """Run programs, as many at a time as there are slots, and each built once.

        Args:
            programs: Programs, or pairs of Python code and standard input.
            limits: What each may use; one for all, or one for each.

        Raises:
            SandboxError: As `run`.
        """
        given = [
            each if isinstance(each, Program) else Program(*each) for each in programs
        ]
        own = _one_each(limits, len(given))
        for name in {program.language for program in given}:
            self._check(name)
        needed = {
            # The input plays no part in a build, so programs that differ only in it are
            # built once.
            (program.language, program.code): dataclasses.replace(program, stdin="")
            for program in given
            if self.needs_build(program)
        }
        # All builds before any run: the tests of one program share its build.
        made = self._spread(self._build, list(needed.values()))
        builds = dict(zip(needed, made, strict=True))

        def run_one(pair: tuple[Program, SandboxLimits]) -> SandboxResult:
            program, allowed = pair
            build = builds.get((program.language, program.code), b"")
            if isinstance(build, SandboxResult):
                return build
            return self.run_built(program, build, allowed)

        return self._spread(run_one, list(zip(given, own, strict=True)))

    def needs_build(self, program: Program) -> bool:
        """Return whether a program is built here, before its runs."""
        return bool(LANGUAGES[program.language].build)

    def run_built(
        self, program: Program, built: bytes, limits: SandboxLimits
    ) -> SandboxResult:
        """Run a program whose language has been looked at, and which is built."""
        language = LANGUAGES[program.language]
        return self.run_command(language.run_command(program, built), limits)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _spread(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]
    ) -> list[ResultT]:
        # The usual call has one program, for which a thread pool would only cost time.
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self.num_slots, "sandbox") as threads:
            return list(threads.map(work, items))

    def _build(self, program: Program) -> SandboxResult | bytes:
        """Return the built program, or why there is none."""
        command = LANGUAGES[program.language].build_command(program)
        result = self.run_command(command, BUILD_LIMITS)
        built = built_file(result)
        if built is not None:
            return built
        if result.status == "sandbox":
            return result
        # The output would be part of the binary as base64, which nobody wants to read.
        return dataclasses.replace(result, status="build", stdout="")

    def _check(self, name: str) -> None:
        """Refuse a language that is not there."""
        language_of(name)
        why = self.missing_languages()[name]
        if why:
            raise SandboxError(f"programs in {name!r} cannot be run here: {why}")

    def _look_for_languages(self) -> dict[str, str]:
        """Ask, within the sandbox, which executables there are."""
        names = " ".join(language.needs for language in LANGUAGES.values())
        # One command for all of them: each command costs a start of the sandbox.
        script = f"for n in {names}; do command -v $n >/dev/null && echo $n; done; :"
        result = self.run_command(Command(("sh", "-c", script)), _LOOK_LIMITS)
        if result.status != "ok":
            why = f"no command runs in this sandbox ({_first_line(result)})"
            return dict.fromkeys(LANGUAGES, why)
        there = result.stdout.split()
        return {
            name: "" if each.needs in there else f"there is no {each.needs}"
            for name, each in LANGUAGES.items()
        }


def _first_line(result: SandboxResult) -> str:
    lines = result.stderr.strip().splitlines()
    return lines[0] if lines else f"it ended by: {result.status}"


def _one_each(
    limits: SandboxLimits | Sequence[SandboxLimits] | None, size: int
) -> Sequence[SandboxLimits]:
    if limits is None or isinstance(limits, SandboxLimits):
        return [limits or SandboxLimits()] * size
    if len(limits) != size:
        raise SandboxError(
            f"limits must be one for all programs, or one for each of {size}: got "
            f"{len(limits)}"
        )
    return limits
