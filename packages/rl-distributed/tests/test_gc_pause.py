"""Pausing the garbage collector while long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rl_distributed.process.gc_pause import gc_frozen, gc_paused
from rl_distributed.workers import host


class _Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _unfreeze() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def _is_looked_at(node: _Node) -> bool:
    return any(each is node for each in gc.get_objects())


def test_what_is_built_is_not_looked_at_again() -> None:
    gc.enable()
    with gc_paused():
        assert not gc.isenabled()
        built = _Node()
        assert _is_looked_at(built)
    assert gc.isenabled()
    assert not _is_looked_at(built)
    assert _is_looked_at(_Node())


def test_a_pause_ends_with_an_error_and_leaves_what_was_disabled() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="in the middle"), gc_paused():
        raise ValueError("in the middle")
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_a_worker_looks_for_garbage_once_its_class_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is meant for the logs of a whole process.
    monkeypatch.setattr(host, "configure_worker_logging", lambda *_, **__: None)
    gc.enable()
    frozen = gc.get_freeze_count()
    worker = host.WorkerHost(host.WorkerIdentity("group", 0, "127.0.0.1"))
    worker.load(f"{__name__}.{_Node.__name__}")
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_what_exists_is_not_looked_at_for_a_while() -> None:
    def fail(old: _Node) -> None:
        with gc_frozen():
            assert not _is_looked_at(old)
            assert _is_looked_at(_Node())
            raise ValueError("in the middle")

    old = _Node()
    with pytest.raises(ValueError, match="in the middle"):
        fail(old)
    assert _is_looked_at(old)
