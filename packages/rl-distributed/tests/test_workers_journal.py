from __future__ import annotations

import logging

import pytest

from rl_distributed.workers.journal import log_made, log_start


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "rl_distributed.workers.journal")
    return caplog


def test_the_start_names_who_where_and_which_python(
    said: pytest.LogCaptureFixture,
) -> None:
    log_start("worker 0 of group 'a'", "node 10.0.0.1, pid 7")
    assert "worker 0 of group 'a' has started on node 10.0.0.1, pid 7" in said.text
    assert "Python 3." in said.text


def test_settings_are_there_without_secrets_and_data(
    said: pytest.LogCaptureFixture,
) -> None:
    settings = {"config": {"lr": 0.5, "api_token": "hush", "rows": object()}}
    log_made("Learner", [["a", 1]], settings)
    assert '"argument 0": ["a", 1]' in said.text
    assert '"lr": 0.5' in said.text
    assert '"rows": "<object>"' in said.text
    assert "hush" not in said.text
    assert "numpy " in said.text  # versions of modules that the process has loaded


def test_long_settings_are_cut(said: pytest.LogCaptureFixture) -> None:
    log_made("Learner", ["x" * 10**6], {})
    assert len(said.text) < 30_000
