from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, WorkerMethodError
from rl_distributed.logs import context, logging as log_module
from rl_distributed.logs.levels import LEVELS
from rl_distributed.logs.logging import (
    LoggingSetup,
    configure_logging,
    configure_worker_logging,
    current_log_context,
    get_logger,
    keeping_log,
    log_context,
    portable_log_context,
    restore_named_levels,
    set_log_level,
    worker_log_path,
)
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup

TALKER = "rl_distributed_sample_loggers.Talker"
EVERY_LINE = {
    "time",
    "level",
    "logger",
    "message",
    "actor",
    "rank",
    "node",
    "pid",
    "step",
}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    log_module._remove_installed()
    log_module._state = log_module._State()
    context._process.clear()
    LEVELS.restore_replaced()
    LEVELS.base = None
    logging.getLogger().setLevel(logging.WARNING)
    for package in LEVELS.packages:
        package.setLevel(logging.NOTSET)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_json_line_carries_context_rank_and_extra_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    path = tmp_path / "logs" / "run.jsonl"
    stream = io.StringIO()
    configure_logging("DEBUG", path, stream=stream)
    logger = get_logger("some.module")
    with log_context(step=7), log_context(phase="train", path=path):
        logger.info("made %d rows\n", 5, extra={"num_rows": 5})
    logger.debug("after")
    first, second = lines_of(path)
    assert first["message"] == "made 5 rows\n"
    assert (first["step"], first["phase"], first["rank"]) == (7, "train", 3)
    assert first["num_rows"] == 5
    assert first["path"] == str(path)
    assert (first["level"], first["logger"]) == ("INFO", "some.module")
    assert second["step"] is None
    assert "[rank=3 step=7" in stream.getvalue()


def test_exceptions_are_kept(tmp_path: Path) -> None:
    configure_logging("INFO", tmp_path / "x.jsonl", stream=io.StringIO())
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        get_logger("x").exception("it failed")
    [line] = lines_of(tmp_path / "x.jsonl")
    exception = line["exception"]
    assert isinstance(exception, dict)
    assert (exception["type"], exception["message"]) == ("RuntimeError", "boom")
    assert exception["traceback"].endswith("RuntimeError: boom")
    assert "test_exceptions_are_kept" in exception["traceback"]


def test_stacks_are_kept(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logging("INFO", tmp_path / "x.jsonl", stream=stream)
    get_logger("x").info("here", stack_info=True)
    [line] = lines_of(tmp_path / "x.jsonl")
    for shown in (str(line["stack"]), stream.getvalue()):
        assert "in test_stacks_are_kept" in shown


def test_configuring_again_replaces_its_own_handlers_only(tmp_path: Path) -> None:
    other = logging.NullHandler()
    root = logging.getLogger()
    root.addHandler(other)
    before = len(root.handlers)
    configure_logging("INFO", tmp_path / "a.jsonl", stream=io.StringIO())
    configure_logging("WARNING", stream=io.StringIO())
    assert len(root.handlers) == before + 1
    assert other in root.handlers
    assert root.level == logging.WARNING
    root.removeHandler(other)
    get_logger("x").warning("not to the first file")
    assert lines_of(tmp_path / "a.jsonl") == []


def test_a_context_ends_with_its_block_and_does_not_leak_into_threads() -> None:
    seen: list[dict[str, object]] = []
    with log_context(step=1):
        with contextlib.suppress(KeyError), log_context(step=2):
            assert current_log_context()["step"] == 2
            raise KeyError
        assert current_log_context()["step"] == 1
        thread = threading.Thread(target=lambda: seen.append(current_log_context()))
        thread.start()
        thread.join(10)
    assert "step" not in current_log_context()
    assert "step" not in seen[0]


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for wrong in ("LOUD", "INFO,ray=LOUD", "", "=INFO"):
        with pytest.raises(ConfigError, match="log level"):
            configure_logging(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the log file"):
        configure_logging("INFO", tmp_path / "file" / "x.jsonl")


def test_every_line_has_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "x.jsonl"
    configure_logging("INFO,ray=INFO", path, stream=io.StringIO())
    get_logger("mine").info("bare")
    logging.getLogger("some.library").error("theirs", extra={"rank": 9})
    logging.getLogger("ray.worker").warning("ray has handlers of its own")
    first, second, third = lines_of(path)
    assert set(first) == EVERY_LINE
    assert (first["actor"], first["rank"], first["step"]) == ("driver", None, None)
    assert (first["node"], first["pid"]) == (socket.gethostname(), os.getpid())
    assert (second["logger"], second["rank"]) == ("some.library", 9)
    assert third["logger"] == "ray.worker"


@pytest.mark.parametrize("propagate", [False, True])
def test_lines_of_ray_come_once(propagate: bool, tmp_path: Path) -> None:
    ray_logger = logging.getLogger("ray")
    before = ray_logger.propagate
    try:
        ray_logger.propagate = propagate
        path = tmp_path / "x.jsonl"
        configure_logging("INFO,ray=INFO", path, stream=io.StringIO())
        ray_logger.warning("hello")
    finally:
        ray_logger.propagate = before
    assert [line["message"] for line in lines_of(tmp_path / "x.jsonl")] == ["hello"]


def test_levels_of_single_loggers(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    configure_logging("WARNING,mine.deep=DEBUG,noisy=ERROR", path, stream=io.StringIO())
    for name in ("mine", "mine.deep", "mine.deep.er", "noisy.sub", "other"):
        for level in ("debug", "info", "warning", "error"):
            getattr(get_logger(name), level)(f"{name} {level}")
    # A library that sets its own level, as Ray does, does not override the request.
    logging.getLogger("noisy").setLevel(logging.DEBUG)
    get_logger("noisy").info("noisy again")
    shown = [str(line["message"]) for line in lines_of(path)]
    assert shown == [
        "mine warning",
        "mine error",
        *(
            f"mine.deep{end} {level}"
            for end in ("", ".er")
            for level in ("debug", "info", "warning", "error")
        ),
        "noisy.sub error",
        "other warning",
        "other error",
    ]
    restore_named_levels()
    assert logging.getLogger("noisy").level == logging.ERROR
    configure_logging("INFO", path, stream=io.StringIO())
    assert logging.getLogger("mine.deep").level == logging.NOTSET


def test_secrets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "abcdef0123456789")
    monkeypatch.setenv("DB_PASSWORD", 'with"quotes\\"')
    path, stream = tmp_path / "x.jsonl", io.StringIO()
    configure_logging("INFO", path, stream=stream)
    extra = {
        "HF_TOKEN": "s1",
        "ssh_key": "s2",
        "clientSecret": "s3",
        "db_password": b"s4",
        "nested": {"list": [{"api_key": "s5"}]},
        "num_tokens": 512,
        "key": 3,
        "monkey": "seen",
        "tokenizer": "a/b",
    }
    with log_context(auth_token="s6"):
        get_logger("x").info("with abcdef0123456789 inside", extra=extra)
        get_logger("x").info('with"quotes\\" from db://me:hunter2@host/name')
    try:
        raise RuntimeError("cannot log in with abcdef0123456789")
    except RuntimeError:
        get_logger("x").exception("failed")
    text = path.read_text() + stream.getvalue()
    assert "abcdef0123456789" not in text
    line, address, failed = lines_of(path)
    assert address["message"] == "*** from db://me:***@host/name"
    assert "hunter2" not in text
    names = ("HF_TOKEN", "ssh_key", "clientSecret", "db_password", "auth_token")
    assert {line[name] for name in names} == {"***"}
    assert line["nested"] == {"list": [{"api_key": "***"}]}
    assert (line["num_tokens"], line["key"]) == (512, 3)
    assert (line["monkey"], line["tokenizer"]) == ("seen", "a/b")
    assert line["message"] == "with *** inside"
    assert "cannot log in with ***" in str(failed["exception"])


def test_lines_are_always_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    configure_logging("INFO", path, stream=io.StringIO())
    loop: list[object] = [float("nan"), {1: float("inf")}]
    get_logger("x").info("\ud800\n", extra={"odd": loop, "path": path})
    text = path.read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert line["odd"] == ["nan", {"1": "inf"}]
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("console_format", "terminal", "is_json"),
    [
        ("text", False, False),
        ("json", True, True),
        ("auto", True, False),
        ("auto", False, True),
    ],
)
def test_the_form_of_the_console(
    console_format: Any, terminal: bool, is_json: bool
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    configure_logging("INFO", stream=stream, console_format=console_format)
    get_logger("x").info("hello")
    assert stream.getvalue().startswith("{") is is_json


def test_a_file_that_fails_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO", tmp_path / "x.jsonl", stream=io.StringIO())
    [handler] = {
        h for _, h in log_module._state.installed if hasattr(h, "baseFilename")
    }
    assert isinstance(handler, logging.FileHandler)

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    handler.stream.close()
    handler.stream = Full()  # type: ignore[assignment]
    for _ in range(3):
        get_logger("x").info("hello")
    shown = capsys.readouterr().err
    assert shown.count("cannot be written: No space left on device") == 1
    assert "Traceback" not in shown


# Workers


def test_a_context_travels_as_plain_values() -> None:
    assert portable_log_context() is None
    with log_context(step=3, path=Path("a")):
        assert portable_log_context() == {"step": 3, "path": "a"}


def test_workers_that_run_follow_a_change_of_the_level(
    ray_cluster: None, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    configure_logging("INFO", path, stream=io.StringIO())
    with (
        RayVirtualCluster([1], name="levels") as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(TALKER)) as group,
    ):

        def said(text: str) -> bool:
            ray.get(group.run_all_workers_single_data("talk", text=text), timeout=120)
            lines = lines_of(worker_log_path(path, group.name, 0))
            return f"own: {text}" in {line["message"] for line in lines}

        assert not said("before")
        restore = set_log_level("DEBUG")
        assert said("at the next call")
        restore()
        assert not said("after")
        with log_context(step=1):
            set_log_level("INFO,rl_distributed_sample_loggers=DEBUG")
            assert said("of one logger")


def test_a_worker_without_the_folder_logs_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setup = LoggingSetup("20", str(tmp_path / "file" / "x.jsonl"), "text")
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        configure_worker_logging(setup, actor="a", rank=1, node="10.0.0.1")
    assert "cannot write the log file" in stream.getvalue()
    assert current_log_context()["actor"] == "a"


def test_workers_log_to_files_of_their_own(ray_cluster: None, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    configure_logging("DEBUG,ray=WARNING", path, stream=io.StringIO())
    with (
        RayVirtualCluster([2], name="logs") as cluster,
        RayWorkerGroup(
            cluster, RayWorkerBuilder(TALKER), name_prefix="talk/er"
        ) as group,
    ):
        with log_context(step=7, phase="x"):
            pids = ray.get(
                group.run_all_workers_single_data("talk", text="hello"), timeout=120
            )
            for method in ("talk_from_thread", "talk_async"):
                ray.get(group.run_all_workers_single_data(method), timeout=120)
            for item in group.run_single_worker_single_data("stream", 0, count=2):
                ray.get(item, timeout=120)
            with pytest.raises(WorkerMethodError):
                ray.get(group.run_all_workers_single_data("fail"), timeout=120)
        ray.get(group.run_all_workers_single_data("talk", text="bye"), timeout=120)
        name = group.name
        assert logging.getLogger("ray").level == logging.WARNING
    for rank, pid in enumerate(pids):
        lines = lines_of(worker_log_path(path, name, rank))
        assert all(set(line) >= EVERY_LINE for line in lines)
        assert {line["actor"] for line in lines} == {name}
        assert {(line["rank"], line["pid"]) for line in lines} == {(rank, pid)}
        assert len({line["node"] for line in lines}) == 1
        said = {str(line["message"]): line for line in lines}
        assert said["constructed"]["step"] is None
        assert said["own: hello"]["step"] == 7
        assert said["own: hello"]["phase"] == "x"
        assert said["own: hello"]["api_token"] == "***"
        assert said["theirs: hello"]["step"] == 7
        assert said["of ray: hello"]["logger"] == "ray.something"
        # Its own context holds for all threads, the call's only for the call's.
        assert said["from a thread"]["step"] is None
        assert said["from a coroutine"]["step"] == 7
        assert said["it failed"]["exception"]["message"] == "inner"  # type: ignore[index]
        assert said["own: bye"]["step"] is None
        # What happened to the worker is there without a line of its class.
        texts = [str(line["message"]) for line in lines]
        assert f"worker {rank} of group {name!r} has started on node" in texts[0]
        assert any(t.startswith("made Talker; ray ") for t in texts)
        (failed,) = (
            line for line in lines if "method 'fail' raised" in line["message"]
        )  # type: ignore[operator]
        assert failed["level"] == "ERROR"
        assert "Traceback" in failed["exception"]["traceback"]  # type: ignore[index]
        if rank == 0:
            assert said["item 1"]["step"] == 7


def test_the_terminal_may_show_less_than_the_file(tmp_path: Path) -> None:
    shown = io.StringIO()
    path = tmp_path / "run.jsonl"
    configure_logging("INFO", path, stream=shown, console_level="WARNING")
    get_logger("any").info("for the file")
    get_logger("any").warning("for both")
    assert [line["message"] for line in lines_of(path)] == ["for the file", "for both"]
    assert "for both" in shown.getvalue()
    assert "for the file" not in shown.getvalue()


def test_lines_stay_json_when_somebody_formats_the_handlers_anew(
    tmp_path: Path,
) -> None:
    configure_logging("INFO", tmp_path / "run.jsonl", stream=io.StringIO())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
    get_logger("any").info("as before")
    assert lines_of(tmp_path / "run.jsonl")[-1]["message"] == "as before"


def test_lines_follow_standard_error_when_it_is_replaced() -> None:
    first, second = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(first):
        configure_logging("INFO")
        get_logger("any").warning("to the first")
    first.close()
    with contextlib.redirect_stderr(second):
        get_logger("any").warning("to the second")
    assert "to the second" in second.getvalue()
    assert "Traceback" not in second.getvalue()


def root_alone(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the root logger as in a program without any setup."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    return root


def test_a_log_is_kept_where_the_program_has_set_up_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = root_alone(monkeypatch)
    logger = get_logger("rl_sample.module")
    path = tmp_path / "logs" / "run.jsonl"
    with keeping_log(path):
        logger.info("for the file")
        logger.warning("for both")
        logging.getLogger("another").info("for nobody")
        setup = log_module.current_logging_setup()
    assert setup is not None
    assert (setup.level, setup.json_path) == ("20", str(path))
    logger.info("afterwards")
    assert [line["message"] for line in lines_of(path)] == ["for the file", "for both"]
    shown = capsys.readouterr().err
    assert "for both" in shown
    assert "for the file" not in shown
    assert root.handlers == []
    assert log_module.current_logging_setup() is None
    assert not logger.isEnabledFor(logging.INFO)


def test_handlers_of_the_program_show_what_they_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    root_alone(monkeypatch).addHandler(logging.StreamHandler(shown))
    logger = get_logger("rl_sample.module")
    with keeping_log(tmp_path / "run.jsonl"):
        logger.info("for the file")
        logger.warning("for both")
    assert shown.getvalue() == "for both\n"


@pytest.mark.parametrize("asked", ["rl_sample", "rl_sample.module"])
def test_a_level_that_the_program_has_asked_for_is_shown_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    shown = io.StringIO()
    root_alone(monkeypatch).addHandler(logging.StreamHandler(shown))
    logger = get_logger("rl_sample.module")
    monkeypatch.setattr(logging.getLogger(asked), "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    with keeping_log(tmp_path / "run.jsonl"):
        logger.info("asked for")
    assert shown.getvalue() == "asked for\n"


def test_a_log_that_the_program_has_set_up_stays_as_it_is(tmp_path: Path) -> None:
    configure_logging("INFO", tmp_path / "own.jsonl", stream=io.StringIO())
    with keeping_log(tmp_path / "kept.jsonl"):
        get_logger("any").info("here")
    get_logger("any").info("and here")
    said = [line["message"] for line in lines_of(tmp_path / "own.jsonl")]
    assert said == ["here", "and here"]
    assert not (tmp_path / "kept.jsonl").exists()
