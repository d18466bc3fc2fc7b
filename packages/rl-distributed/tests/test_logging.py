from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_distributed import logging as log_module
from rl_distributed.errors import ConfigError
from rl_distributed.logging import (
    configure_logging,
    current_log_context,
    get_logger,
    log_context,
)


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)
    log_module._level.clear()
    for package in log_module._packages:
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
    assert "step" not in second
    assert "[rank=3 step=7" in stream.getvalue()


def test_exceptions_are_kept(tmp_path: Path) -> None:
    configure_logging("INFO", tmp_path / "x.jsonl", stream=io.StringIO())
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        get_logger("x").exception("it failed")
    [line] = lines_of(tmp_path / "x.jsonl")
    assert "RuntimeError: boom" in str(line["exception"])


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
    with pytest.raises(ConfigError, match="log level must be one of DEBUG"):
        configure_logging("LOUD")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the log file"):
        configure_logging("INFO", tmp_path / "file" / "x.jsonl")
