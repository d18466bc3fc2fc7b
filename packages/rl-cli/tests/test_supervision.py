from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_cli.main import main
from rl_cli.supervision import SupervisedRun, supervise
from rl_distributed.errors import ConfigError
from rl_distributed.runs.folder import own_run_folder

DEADLINE_S = 60.0


class Script(nullcontext[None]):
    """Stands in for a run: a script whose starts are counted in its folder."""

    def __init__(self, folder: Path, code: str) -> None:
        super().__init__()
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.causes: list[str | None] = []
        self._code = (
            "import os, signal, sys, time\n"
            "from pathlib import Path\n"
            f"folder = Path({str(folder)!r})\n"
            "number = len(list(folder.glob('start-*'))) + 1\n"
            "(folder / f'start-{number}').touch()\n" + code
        )

    @property
    def starts(self) -> int:
        return len(list(self.folder.glob("start-*")))

    def command(self) -> list[str]:
        return [sys.executable, "-c", self._code]

    def progress(self) -> frozenset[str]:
        return frozenset(map(str, self.folder.glob("step_*")))

    def cause(self) -> str | None:
        return self.causes[self.starts - 1] if self.causes else None

    def record(self, event: dict[str, Any]) -> None:
        self.events.append(event)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_cli.supervision._FIRST_PAUSE_S", 0.01)


def outcome(run: Script, tries: int = 2) -> tuple[int, list[str]]:
    said: list[str] = []
    return supervise(run, tries, said.append), said  # type: ignore[arg-type]


def test_a_run_that_ends_is_not_started_again(tmp_path: Path) -> None:
    run = Script(tmp_path, "")
    assert outcome(run) == (0, [])
    assert run.starts == 1


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("sys.exit(1)", "failed with exit code 1"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("os.abort()", "was ended by SIGABRT"),
    ],
)
def test_a_run_that_dies_is_started_again(tmp_path: Path, end: str, how: str) -> None:
    run = Script(tmp_path, f"if number < 3: {end}")
    code, said = outcome(run)
    assert code == 0
    assert run.starts == 3
    assert [line.partition(";")[0] for line in said] == [f"The run {how}"] * 2
    assert run.events == [
        {"ended": how, "restart": 1},
        {"ended": how, "restart": 2},
    ]


def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    run = Script(tmp_path, "sys.exit(1)")
    code, said = outcome(run)
    assert code == 1
    assert run.starts == 3
    assert said[-1].endswith("3 times without new progress; giving up.")


def test_what_kills_a_run_for_good_is_its_exit_code(tmp_path: Path) -> None:
    assert outcome(Script(tmp_path, "os.kill(os.getpid(), 9)"), 1)[0] == 128 + 9


def test_new_progress_begins_a_new_count(tmp_path: Path) -> None:
    code = "(folder / f'step_{number}').touch()\nif number < 8: sys.exit(1)"
    run = Script(tmp_path, code)
    assert outcome(run, 1)[0] == 0
    assert run.starts == 8


def test_one_error_in_one_step_ends_the_restarts_early(tmp_path: Path) -> None:
    run = Script(tmp_path, "sys.exit(1)")
    other, same = "in step 4: a: E: x", "in step 5: policy training: E: bad"
    run.causes = [same, other, None, same, same, same, same]
    code, said = outcome(run, 20)
    assert (code, run.starts) == (1, 6)
    assert said[-1] == (
        f"The run failed with exit code 1, 3 times with the same error ({same}); "
        "giving up."
    )
    assert [event.get("cause") for event in run.events] == run.causes[:5]


def test_the_same_error_after_new_progress_is_another_one(tmp_path: Path) -> None:
    run = Script(
        tmp_path,
        "if number in (1, 3): (folder / f'step_{number}').touch()\nsys.exit(1)",
    )
    run.causes = ["in step 5: E"] * 9
    assert outcome(run, 9)[0] == 1
    assert run.starts == 5


def test_the_note_of_an_earlier_error_says_nothing_of_a_kill(tmp_path: Path) -> None:
    run = Script(tmp_path, "os.kill(os.getpid(), 9)")
    run.causes = ["in step 5: E"] * 9
    assert outcome(run, 4)[0] == 128 + 9
    assert run.starts == 5
    assert not any("cause" in event for event in run.events)


def test_the_cause_is_an_error_in_a_step(tmp_path: Path) -> None:
    begin(tmp_path / "mine")
    run = make(resume=str(tmp_path / "mine"))

    def cause_of(error: BaseException, *notes: str) -> str | None:
        for note in notes:
            error.add_note(note)
        with pytest.raises(type(error)), own_run_folder(run.folder):
            raise error
        return run.cause()

    assert run.cause() is None
    place = "in step 5: policy training"
    found = cause_of(ValueError("bad"), "Continue with: x", f"{place}\nmore")
    assert found == f"{place}: ValueError: bad"
    assert cause_of(ValueError("bad"), "before the first step: set up") is None
    assert cause_of(KeyboardInterrupt(), place) is None
    with own_run_folder(run.folder):
        assert run.cause() is None


@pytest.mark.parametrize("code", [2, 130, 143])
def test_mistakes_and_stops_are_final(tmp_path: Path, code: int) -> None:
    run = Script(tmp_path, f"sys.exit({code})")
    assert outcome(run) == (code, [])
    assert run.starts == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_run_once_and_ends_it(
    tmp_path: Path, signum: signal.Signals
) -> None:
    run = Script(
        tmp_path,
        "def hear(number, _):\n"
        "    with open(folder / 'heard', 'a') as file:\n"
        "        file.write(f'{number} ')\n"
        f"for one in ({', '.join(str(int(s)) for s in (2, 10, 15))}):\n"
        "    signal.signal(one, hear)\n"
        "(folder / 'ready').touch()\n"
        "until = time.monotonic() + 60\n"
        "while time.monotonic() < until and not (folder / 'heard').exists():\n"
        "    signal.sigtimedwait([], 0.01)\n"
        f"sys.exit(128 + {int(signum)})",
    )
    # SIGINT is ignored when tests run in the background of a shell.
    outside = signal.signal(signum, signal.default_int_handler)
    before = signal.getsignal(signum)

    def send() -> None:
        wait_for(tmp_path / "ready")
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        code, said = outcome(run)
        thread.join(DEADLINE_S)
        assert signal.getsignal(signum) is before
    finally:
        signal.signal(signum, outside)
    assert (code, said, run.starts) == (128 + signum, [], 1)
    assert (tmp_path / "heard").read_text() == f"{int(signum)} "


def test_a_signal_ends_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_cli.supervision._FIRST_PAUSE_S", DEADLINE_S)
    run = Script(tmp_path, "sys.exit(1)")

    def stop(_: str) -> None:
        signal.raise_signal(signal.SIGTERM)

    assert supervise(run, 5, stop) == 128 + signal.SIGTERM  # type: ignore[arg-type]
    assert run.starts == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_between_two_starts_prevents_the_next(
    tmp_path: Path, number: int
) -> None:
    class Signalled(Script):
        def command(self) -> list[str]:
            if self.starts + 1 == number:
                signal.raise_signal(signal.SIGTERM)
            return super().command()

    run = Signalled(tmp_path, "sys.exit(1)")
    assert outcome(run)[0] == 128 + signal.SIGTERM
    assert run.starts == number - 1


def wait_for(path: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


# The commands ------------------------------------------------------------------------


def make(name: str = "quickstart", *overrides: str, **options: Any) -> SupervisedRun:
    settings = {"resume": None, "overwrite": False, "flags": [], **options}
    return SupervisedRun(name, None, overrides, **settings)


def begin(folder: Path, config: Any = None, name: str = "quickstart") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"kind": "recipe", "name": name, "config": config or {}, "hidden": []}
    (folder / "run.json").write_text(json.dumps(record))


def keep(folder: Path, step: int = 4) -> None:
    (folder / "stages" / "grpo" / "checkpoints" / f"step_{step}").mkdir(parents=True)


def arguments(run: SupervisedRun) -> list[str]:
    return run.command()[4:]


def test_a_new_run_gets_a_folder_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make("quickstart", "seed=3", flags=["--quiet"])
    assert run.folder == tmp_path / "runs" / "quickstart-001"
    first = ["quickstart", "seed=3", "output_dir=runs/quickstart-001", "--quiet"]
    assert arguments(run) == first
    # It died before it saved anything.
    begin(run.folder)
    assert arguments(run) == first
    keep(run.folder)
    assert arguments(run) == ["quickstart", "--resume", str(run.folder), "--quiet"]


def test_another_run_is_deleted_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    begin(folder)
    keep(folder)
    os.utime(folder / "run.json", ns=(0, 0))
    run = make("quickstart", f"output_dir={folder}", overwrite=True)
    assert arguments(run)[-1] == "--overwrite"
    begin(folder)
    assert arguments(run)[-2:] == ["--resume", str(folder)]


def test_a_run_to_resume_is_resumed(tmp_path: Path) -> None:
    begin(tmp_path / "mine")
    run = make(resume=str(tmp_path / "mine"))
    assert arguments(run) == ["quickstart", "--resume", str(tmp_path / "mine")]


def test_the_same_command_goes_on_with_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    with pytest.raises(SystemExit):
        main(["config", "show", "quickstart", f"output_dir={folder}", "--source"])
    config = yaml.safe_load(capsys.readouterr().out)
    config["output_dir"] = str(folder)
    begin(folder, config)
    keep(folder)
    run = make("quickstart", f"output_dir={folder}")
    assert arguments(run) == ["quickstart", "--resume", str(folder)]
    with pytest.raises(ConfigError, match="contains a run with another configuration"):
        make("quickstart", f"output_dir={folder}", "seed=9")


def test_restarts_are_kept(tmp_path: Path) -> None:
    begin(tmp_path / "mine")
    run = make(resume=str(tmp_path / "mine"))
    run.record({"restart": 1})
    run.record({"restart": 2})
    lines = (run.folder / "logs" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["restart"] for line in lines] == [1, 2]


def test_a_mistake_ends_the_command_at_once(tmp_path: Path) -> None:
    command = ["train", "quickstart", "sed=1", "--supervise", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "rl_cli", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'seed'" in done.stderr
    assert "started again" not in done.stderr
    assert not list((tmp_path / "runs").glob("quickstart-*"))
