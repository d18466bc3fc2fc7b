"""Thousands of malformed requests to every listener.

CI sends 400 to each; `RL_FUZZ_REQUESTS=10000` sends that many (`nox -s fuzz`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from pathlib import Path

import psutil
import pytest
from access.listeners import STARTS, Keys, send_raw, started
from access.malformed import malformed

NUM_REQUESTS = int(os.environ.get("RL_FUZZ_REQUESTS", "2000"))
SEED = int(os.environ.get("RL_FUZZ_SEED", "0"))
MOST_GROWTH_BYTES = 48 << 20
# Growth during the first requests: buffers, compiled patterns, pool threads.
NUM_WARM = 150


@pytest.mark.timeout(60 + NUM_REQUESTS // 10)
@pytest.mark.parametrize("name", STARTS)
def test_malformed_requests_change_nothing_and_learn_nothing(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path)
    # Include a valid key of the lowest role: requests that it admits are malformed too.
    sent = [keys.valid["viewer"], keys.expired["admin"], keys.wrong["unknown"]]
    before = keys.file.path.read_bytes()
    process = psutil.Process()
    with (
        caplog.at_level(logging.WARNING),
        started(name, keys.file, tmp_path) as listener,
    ):
        if listener.own_key:
            sent.append(listener.own_key)
        paths = [route.path for route in listener.table.routes]
        requests = itertools.islice(malformed(SEED, paths, sent), NUM_REQUESTS)
        # The page holds the key of its own address; nothing else holds any.
        hidden = keys.secrets
        start_bytes = 0
        for number, (data, half) in enumerate(requests):
            if number == NUM_WARM:
                gc.collect()
                start_bytes = process.memory_info().rss
            answer = send_raw(listener.place, data, half=half)
            text = answer.decode("utf-8", "replace")
            assert not [secret for secret in hidden if secret in text], (number, data)
            assert "Traceback" not in text, (number, data)
            assert " 500 " not in text.partition("\r\n")[0], (number, data)
        gc.collect()
        caplog_bytes = sum(len(r.getMessage()) for r in caplog.records)
        growth = process.memory_info().rss - start_bytes - 2 * caplog_bytes
        assert growth < MOST_GROWTH_BYTES
        # It answers as before.
        assert listener.ask("GET", "/metrics", keys.valid["viewer"])[0] == 200
        assert listener.ask("GET", "/metrics")[0] == 401
        assert sum(listener.door.counts.counts().values()) > NUM_REQUESTS // 3
    assert keys.file.path.read_bytes() == before
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert [r.getMessage() for r in errors] == []
    assert threading.active_count() < 50
