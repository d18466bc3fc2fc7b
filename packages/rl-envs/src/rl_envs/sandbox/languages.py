"""Languages of programs: how each is written down, built and run.

A build prints the program that it made, as base64 text, so that it needs no folder that
outlives it: what it printed is a file of each run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field

from rl_envs.errors import SandboxError
from rl_envs.sandbox.runs import Command, Program, SandboxLimits, SandboxResult

__all__ = ["LANGUAGES", "Language", "language_of"]

_BINARY = "program"


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of one language are run."""

    name: str
    needs: str
    """The executable without which it is not there."""
    file: str
    """Name of the file that holds a program."""
    argv: tuple[str, ...]
    """Runs the program."""
    fences: frozenset[str] = field(default_factory=frozenset)
    """What Markdown calls it, in lower case."""
    build: str = ""
    """Shell command that makes `program` of the file; empty: none is needed."""

    def run_command(self, program: Program, built: bytes = b"") -> Command:
        """Return what runs a program.

        Args:
            program: Its text and input.
            built: What `built_file` returned; nothing where there is no build.
        """
        name, data = (_BINARY, built) if self.build else (self.file, program.encoded())
        return Command(self.argv, {name: data}, program.stdin)

    def build_command(self, program: Program) -> Command:
        """Return what builds a program."""
        script = f"{self.build} && base64 -w 0 {_BINARY}"
        return Command(("sh", "-c", script), {self.file: program.encoded()})


def built_file(result: SandboxResult) -> bytes | None:
    """Return what a build made; None: it made nothing that can be run."""
    if result.status != "ok":
        return None
    try:
        # An empty file is no program either.
        return base64.b64decode(result.stdout, validate=True) or None
    except binascii.Error:
        return None


BUILD_LIMITS = SandboxLimits(
    time_s=30.0, memory_bytes=1 << 30, output_bytes=24 << 20, scratch_bytes=64 << 20
)
"""What building a program may use."""


def _language(
    name: str, needs: str, file: str, argv: Iterable[str], fences: str, build: str = ""
) -> Language:
    names = frozenset({name, *fences.split()})
    return Language(name, needs, file, tuple(argv), names, build)


LANGUAGES: dict[str, Language] = {
    each.name: each
    for each in (
        _language(
            "python",
            "python3",
            "program.py",
            # Isolated, and without byte code, which would only fill the scratch folder.
            ("python3", "-I", "-B", "program.py"),
            "py python3",
        ),
        _language("bash", "bash", "program.sh", ("bash", "program.sh"), "sh shell"),
        _language(
            "javascript", "node", "program.js", ("node", "program.js"), "js node"
        ),
        _language("perl", "perl", "program.pl", ("perl", "program.pl"), "pl"),
        _language(
            "c",
            "gcc",
            "program.c",
            ("./program",),
            "",
            "gcc -O2 -std=gnu17 -pipe -o program program.c -lm",
        ),
        _language(
            "cpp",
            "g++",
            "program.cpp",
            ("./program",),
            "c++ cc cxx",
            "g++ -O2 -std=gnu++20 -pipe -o program program.cpp",
        ),
    )
}
"""All languages that programs may be in, by name; see `Sandbox.languages`."""


def language_of(name: str) -> Language:
    """Return a language by its name.

    Raises:
        SandboxError: There is none of that name.
    """
    try:
        return LANGUAGES[name]
    except KeyError:
        raise SandboxError(
            f"language must be one of {', '.join(LANGUAGES)}: got {name!r}"
        ) from None
