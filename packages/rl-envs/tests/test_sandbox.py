"""The sandbox: results, limits, levels, and containment of hostile programs."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from rl_envs.errors import SandboxError
from rl_envs.sandbox import SandboxLevel, SandboxLimits, SandboxPool, pool
from rl_envs.sandbox.hostile import ATTACKS, ESCAPED, HOSTILE

INPUT, EXPECTED = "7193", str(7193**2 + 11)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxPool]:
    try:
        made = SandboxPool(2)
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


def left_behind() -> set[str]:
    folders = [tempfile.gettempdir(), "/dev/shm", "/var/tmp"]
    found = {
        str(path)
        for folder in folders
        if Path(folder).is_dir()
        for path in Path(folder).glob("sandbox-escape*")
    }
    return found


def processes_of(uids: set[int]) -> list[str]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and path.stat().st_uid in uids:
                found.append(path.name)
        except FileNotFoundError:
            continue
    return found


def test_a_program_reads_its_input_and_its_result_is_told(sandbox: SandboxPool) -> None:
    result = sandbox.run("print(int(input()) ** 2 + 11)", stdin=INPUT)
    assert (result.status, result.stdout.strip()) == ("ok", EXPECTED)
    assert result.exit_code == 0
    assert result.signal is None
    assert result.memory_bytes > 1 << 20
    assert result.time_s > 0


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "number"),
    [
        ("raise SystemExit(3)", "error", 3, None),
        ("1 / 0", "error", 1, None),
        ("import os; os.kill(os.getpid(), 15)", "signal", None, 15),
        ("while True: print('x' * 9999)", "output", None, 9),
        ("import time; time.sleep(1e6)", "time", None, 9),
        ("x = bytearray(1 << 40)", "memory", 1, None),
    ],
)
def test_why_a_program_ended(
    sandbox: SandboxPool, code: str, status: str, exit_code: int | None, number: int
) -> None:
    limits = SandboxLimits(time_s=1.0 if status == "time" else 60.0)
    result = sandbox.run(code, limits=limits)
    assert (result.status, result.exit_code, result.signal) == (
        status,
        exit_code,
        number,
    )
    assert len(result.stdout) <= limits.output_bytes


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_programs_end_themselves_as_they_are_used_to(
    sandbox: SandboxPool, name: str
) -> None:
    result = sandbox.run(f"print(1)\n{name}()\nprint(2)")
    assert (result.status, result.stdout) == ("ok", "1\n")
    assert sandbox.run(f"{name}(3)").exit_code == 3


def test_nothing_is_kept_from_one_program_to_the_next() -> None:
    with SandboxPool(1) as sandbox:
        first = "import json\njson.kept = 1\n"
        if sandbox.level >= SandboxLevel.NAMESPACES:
            first += "open('kept', 'w').write('x')\n"
        assert sandbox.run(first).status == "ok"
        result = sandbox.run("import json, os\nprint(hasattr(json, 'kept'))")
        assert result.stdout == "False\n"
        if sandbox.level >= SandboxLevel.NAMESPACES:
            assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n"


def test_the_environment_of_the_caller_is_not_there(
    sandbox: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "1234")
    with SandboxPool(1) as fresh:
        result = fresh.run("import os; print('SOME_SECRET' in os.environ, os.getpid())")
    found, pid = result.stdout.split()
    assert found == "False"
    assert int(pid) != os.getpid()


def test_programs_run_several_at_a_time_in_order(sandbox: SandboxPool) -> None:
    results = sandbox.run_all([("print(input())", str(i)) for i in range(20)])
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]


def test_a_level_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A tmpfs cannot be mounted on a file.
    monkeypatch.setattr(pool.tempfile, "mkdtemp", lambda prefix: __file__)
    monkeypatch.setattr(pool.os, "chmod", lambda path, mode: None)
    with pytest.raises(SandboxError, match=r"must reach level NAMESPACES.*reaches"):
        SandboxPool(1, level=SandboxLevel.NAMESPACES)


def test_a_zygote_that_dies_is_replaced() -> None:
    with SandboxPool(1) as sandbox:
        process = sandbox._slots[0]._process
        assert process is not None
        process.kill()
        process.wait(60)
        assert sandbox.run("print(1)").status == "sandbox"
        assert sandbox.run("print(1)").stdout == "1\n"


def test_a_closed_pool_says_so_and_leaves_no_folder() -> None:
    sandbox = SandboxPool(1)
    folder = Path(sandbox._slots[0]._scratch)
    assert folder.is_dir()
    sandbox.close()
    assert not folder.exists()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("print(1)")


def test_an_interrupted_program_leaves_no_result_for_the_next() -> None:
    with SandboxPool(1, level=SandboxLevel.SECCOMP) as sandbox:
        with (
            mock.patch.object(select, "poll", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            sandbox.run("print('first')")
        assert sandbox.run("print('second')").stdout == "second\n"


def test_closing_ends_the_calls_of_other_threads_and_starts_nothing() -> None:
    sandbox = SandboxPool(1, level=SandboxLevel.SECCOMP)
    slots = list(sandbox._slots)
    slow = "import time; print(1, flush=True); time.sleep(3)"
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(sandbox.run, slow)
        while not sandbox._free.empty():
            time.sleep(0.01)
        waiting = threads.submit(sandbox.run, slow)
        time.sleep(0.1)
        sandbox.close()
        assert running.result().status == "sandbox"
        with pytest.raises(SandboxError, match="closed"):
            waiting.result()
    assert [slot.is_up for slot in slots] == [False]


def test_limits_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="time_s must be above 0: got 0"):
        SandboxLimits(time_s=0)


def test_there_are_sixty_hostile_programs() -> None:
    assert len(HOSTILE) >= 60


def test_hostile_programs_get_nowhere(sandbox: SandboxPool) -> None:
    limits = SandboxLimits(time_s=1.0, memory_bytes=256 << 20)
    results = dict(
        zip(
            HOSTILE,
            sandbox.run_all([(code, INPUT) for code in HOSTILE.values()], limits),
            strict=True,
        )
    )
    assert [n for n, r in results.items() if ESCAPED in r.stdout + r.stderr] == []
    assert [n for n, r in results.items() if r.stdout.strip() == EXPECTED] == []
    assert [n for n, r in results.items() if r.status == "sandbox"] == []
    assert left_behind() == set()
    assert [list(Path(slot._scratch).iterdir()) for slot in sandbox._slots] == [[], []]
    if os.geteuid() == 0:
        assert processes_of({slot._uid for slot in sandbox._slots}) == []
    honest = sandbox.run("print(int(input()) ** 2 + 11)", stdin=INPUT)
    assert honest.stdout.strip() == EXPECTED


@pytest.mark.parametrize(
    "name", ["read_passwd", "list_root", "tcp", "udp", "fork", "spawn", "write_input"]
)
def test_an_attack_succeeds_where_there_is_no_sandbox(name: str) -> None:
    with tempfile.TemporaryFile() as stdin:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ATTACKS[name]],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ESCAPED in done.stdout
