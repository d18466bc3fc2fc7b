"""Commands under bubblewrap: languages, limits, and containment of hostile ones."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_envs.errors import SandboxError
from rl_envs.sandbox import (
    Command,
    Program,
    SandboxLimits,
    SandboxPool,
    commands as commands_module,
)
from rl_envs.sandbox.hostile import ATTACKS, ESCAPED
from rl_envs.sandbox.hostile_commands import (
    COMMAND_ATTACKS,
    COMMAND_NUISANCES,
    HOSTILE_COMMANDS,
    SYSTEM_CALLS,
)

INPUT, EXPECTED = "7193", str(7193**2 + 11)
SQUARES = {
    "python": "print(int(input()) ** 2 + 11)",
    "bash": "read x; echo $((x * x + 11))",
    "javascript": "const x = Number(require('fs').readFileSync(0, 'utf8'));"
    "console.log(x * x + 11)",
    "perl": "my $x = <STDIN>; print $x * $x + 11, qq(\\n)",
    "c": '#include <stdio.h>\nint main(void) { long x; scanf("%ld", &x);'
    'printf("%ld\\n", x * x + 11); }',
    "cpp": "#include <iostream>\nint main() { long x; std::cin >> x;"
    "std::cout << x * x + 11 << std::endl; }",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxPool]:
    try:
        made = SandboxPool(2)
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        why = made.missing_languages()["bash"]
        if why:
            pytest.skip(f"commands cannot be run here: {why}")
        yield made


def processes_of(uids: set[int]) -> set[str]:
    found = set()
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and path.stat().st_uid in uids:
                found.add(path.name)
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize("language", SQUARES)
def test_programs_of_each_language_run(sandbox: SandboxPool, language: str) -> None:
    why = sandbox.missing_languages()[language]
    if why:
        pytest.skip(why)
    result = sandbox.run(SQUARES[language], stdin=INPUT, language=language)
    assert (result.status, result.stdout.strip()) == ("ok", EXPECTED), result.stderr


def test_a_program_is_built_once_and_its_build_may_fail(sandbox: SandboxPool) -> None:
    if sandbox.missing_languages()["c"]:
        pytest.skip(sandbox.missing_languages()["c"])
    asked: list[Command] = []
    original = sandbox.run_command

    def noted(command: Command, limits: SandboxLimits | None = None):  # type: ignore[no-untyped-def]
        asked.append(command)
        return original(command, limits)

    sandbox.run_command = noted  # type: ignore[method-assign]
    try:
        right = [Program(SQUARES["c"], str(n), "c") for n in range(3)]
        wrong = [Program("int main( {", str(n), "c") for n in range(2)]
        results = sandbox.run_all([*right, *wrong])
    finally:
        del sandbox.run_command  # type: ignore[method-assign]
    assert [r.stdout.strip() for r in results[:3]] == ["11", "12", "15"]
    assert [r.status for r in results[3:]] == ["build", "build"]
    assert "error" in results[3].stderr
    # Two builds, and the runs of the existing one.
    assert len(asked) == 2 + 3


def test_a_command_has_its_files_and_nobody_elses(sandbox: SandboxPool) -> None:
    command = Command(
        ("bash", "-c", "cat part/a.txt; ls; echo kept > b; pwd; whoami 2>/dev/null"),
        {"part/a.txt": b"given\n"},
    )
    for _ in range(3):
        result = sandbox.run_command(command)
        assert result.stdout == "given\npart\n/work\n"
    outside = sandbox.run_command(Command(("true",), {"../a": b""}))
    assert outside.status == "sandbox"
    assert "must lie in the scratch folder" in outside.stderr


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "number"),
    [
        ("exit 3", "error", 3, None),
        ("kill -TERM $$", "signal", None, 15),
        ("yes", "output", None, 9),
        ("sleep 1000 & sleep 1000", "time", None, 9),
        # Each stays below the per-process limit; all together do not.
        ("for i in 1 2 3 4 5 6 7 8; do tail /dev/zero & done; wait", "memory", None, 9),
    ],
)
def test_why_a_command_ended(
    sandbox: SandboxPool, code: str, status: str, exit_code: int | None, number: int
) -> None:
    limits = SandboxLimits(
        time_s=0.5 if status == "time" else 60.0, memory_bytes=512 << 20
    )
    result = sandbox.run(code, limits=limits, language="bash")
    assert (result.status, result.exit_code, result.signal) == (
        status,
        exit_code,
        number,
    )
    if status == "memory":
        assert result.memory_bytes > limits.memory_bytes


def test_hostile_commands_get_nowhere(sandbox: SandboxPool) -> None:
    assert len(HOSTILE_COMMANDS) >= 60
    programs = [Program(c, INPUT, "bash") for c in HOSTILE_COMMANDS.values()]
    limits = [
        SandboxLimits(0.5 if name in COMMAND_NUISANCES else 30.0, 256 << 20)
        for name in HOSTILE_COMMANDS
    ]
    results = dict(
        zip(HOSTILE_COMMANDS, sandbox.run_all(programs, limits), strict=True)
    )
    assert [n for n, r in results.items() if ESCAPED in r.stdout + r.stderr] == []
    assert [n for n, r in results.items() if r.stdout.strip() == EXPECTED] == []
    assert [n for n, r in results.items() if r.status == "sandbox"] == []
    # An attack that could not run would prove nothing.
    assert [n for n in COMMAND_ATTACKS if results[n].status != "ok"] == []
    assert max(results[n].time_s for n in COMMAND_NUISANCES) < 30.0
    escaped = [
        str(path)
        for folder in ("/", "/etc", "/usr/lib", "/dev/shm", tempfile.gettempdir())
        for path in Path(folder).glob("sandbox-escape*")
    ]
    assert escaped == []
    assert [list(Path(slot._scratch).iterdir()) for slot in sandbox._slots] == [[], []]
    if os.geteuid() == 0:
        assert processes_of({slot._uid for slot in sandbox._slots}) == set()
    honest = sandbox.run(SQUARES["bash"], stdin=INPUT, language="bash")
    assert honest.stdout.strip() == EXPECTED


def test_the_kernel_refuses_what_no_command_needs(sandbox: SandboxPool) -> None:
    if sandbox.missing_languages()["c"]:
        pytest.skip(sandbox.missing_languages()["c"])
    result = sandbox.run(SYSTEM_CALLS, language="c")
    assert (result.status, result.stdout) == ("ok", "asked\n"), result.stderr


def test_attacks_in_python_get_nowhere_under_bubblewrap_either(
    sandbox: SandboxPool,
) -> None:
    """The omitted attacks are no escape here: the parent is the sandbox's own init.

    It may create processes, and it has no address-space limit to raise.
    """
    if sandbox.missing_languages()["python"] and not Path("/usr/bin/python3").exists():
        pytest.skip("there is no Python in /usr")
    allowed = {
        *("fork", "spawn", "shell", "exec", "daemon", "vfork", "clone_process"),
        *("multiprocessing", "list_root", "list_temporary", "write_temporary"),
        *("make_folder_outside", "rename_out", "write_own_memory_by_proc"),
        *("read_parent_environment", "read_command_lines", "set_uid_bit"),
        *("list_parent_files", "kill_first_process", "kill_parent", "stop_parent"),
        *("pidfd_of_parent", "read_parent_memory", "kill_group", "kill_all"),
        *("raise_parent_limits", "raise_own_limits"),
    }
    commands = {
        name: Command(("python3", "-I", "-S", "-c", code))
        for name, code in ATTACKS.items()
        if name not in allowed
    }
    limits = SandboxLimits(time_s=20.0)
    found = {n: sandbox.run_command(c, limits) for n, c in commands.items()}
    assert [n for n, r in found.items() if ESCAPED in r.stdout + r.stderr] == []
    assert [n for n, r in found.items() if r.status == "sandbox"] == []


def test_daemons_end_with_the_command(sandbox: SandboxPool) -> None:
    before = processes_of({slot._uid for slot in sandbox._slots})
    began = time.monotonic()
    result = sandbox.run(
        "setsid nohup sleep 100000 >/dev/null 2>&1 & sleep 100000 & echo left",
        language="bash",
        limits=SandboxLimits(time_s=60.0),
    )
    assert (result.status, result.stdout) == ("ok", "left\n")
    assert time.monotonic() - began < 30.0
    if os.geteuid() == 0:
        assert processes_of({slot._uid for slot in sandbox._slots}) == before


def test_without_bubblewrap_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zygote searches a fixed path: run a copy that searches nothing."""
    folder = Path(commands_module.__file__).parent
    for name in ("zygote", "commands", "child", "confinement", "syscall_filters"):
        text = (folder / f"{name}.py").read_text()
        if name == "commands":
            text = text.replace('"/usr/local/bin:/usr/bin:/bin"', '"/nowhere"')
        (tmp_path / f"{name}.py").write_text(text)
    from rl_envs.sandbox import pool  # noqa: PLC0415

    monkeypatch.setattr(pool, "__file__", str(tmp_path / "pool.py"))
    with SandboxPool(1) as made:
        assert made.run("print(1)").stdout == "1\n"
        assert made.languages == ("python",)
        with pytest.raises(
            SandboxError, match=r"'bash' cannot be run here: .*bubblewrap is not inst"
        ):
            made.run("echo 1", language="bash")
        with pytest.raises(SandboxError, match=r"language must be one of python, bash"):
            made.run("1", language="cobol")
