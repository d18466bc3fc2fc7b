"""A run's warnings appear once each in the log and in its result."""

from __future__ import annotations

import logging

from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.warnings import WarningKeeper

LOGGER = logging.getLogger("rl_algorithms.trainers.here")


def test_warnings_of_our_packages_are_kept_once(caplog):
    kept = []
    with WarningKeeper(kept):
        for number in (1, 1, 2):
            LOGGER.warning("warned of %d", number)
        logging.getLogger("rl_models.x").warning("a tokenizer")
        logging.getLogger("another").warning("not ours")
        LOGGER.error("an error")
        LOGGER.info("news")
    LOGGER.warning("too late")
    assert kept == ["warned of 1", "warned of 2", "a tokenizer"]
    assert caplog.messages.count("warned of 1") == 2


def test_no_more_than_anybody_reads():
    kept = []
    with WarningKeeper(kept):
        for number in range(99):
            LOGGER.warning("warned of %d", number)
    assert len(kept) == 20


def test_they_are_still_said_where_a_program_configures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("rl_algorithms"), "handlers", [])
    with WarningKeeper([]):
        LOGGER.warning("heard")
    assert "heard" in capsys.readouterr().err


def test_a_resumed_run_keeps_those_of_the_earlier_one():
    state = TrainerState(warnings=["now"])
    kept = state.warnings
    state.restore({**TrainerState(warnings=["before", "now"]).to_dict()})
    assert state.warnings == ["before", "now"]
    assert kept is state.warnings
