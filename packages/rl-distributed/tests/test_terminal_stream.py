from __future__ import annotations

import errno
import io

import pytest

from rl_distributed.logs.terminal_stream import TerminalStream


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "gone")


def test_it_writes_to_what_the_stream_is_at_the_moment() -> None:
    streams = [io.StringIO(), io.StringIO()]
    used = [streams[0]]
    stream = TerminalStream(lambda: used[0])
    stream.write("one")
    used[0] = streams[1]
    stream.write("two")
    stream.flush()
    assert [s.getvalue() for s in streams] == ["one", "two"]
    assert not stream.isatty()


def test_a_closed_terminal_is_no_error_and_a_full_disk_is() -> None:
    assert TerminalStream(lambda: Broken(errno.EIO)).write("line") == 4
    with pytest.raises(OSError, match="gone"):
        TerminalStream(lambda: Broken(errno.EPIPE)).write("line")
    lost = TerminalStream(lambda: Broken(errno.EPIPE), ignored=(errno.EPIPE,))
    assert lost.write("line") == 4


def test_a_program_without_a_console_writes_nothing() -> None:
    stream = TerminalStream(lambda: None)
    assert stream.write("line") == 4
    assert not stream.isatty()
