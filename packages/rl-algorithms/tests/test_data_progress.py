"""The progress line of long loops."""

from __future__ import annotations

import io
import itertools

from rl_algorithms.data.progress import track


def run(num_items, seconds_each, **options):
    stream = io.StringIO()
    clock = itertools.count(0, seconds_each).__next__
    items = list(
        track(range(num_items), "reading", stream=stream, clock=clock, **options)
    )
    assert items == list(range(num_items))
    return stream.getvalue()


def test_quick_loops_show_nothing():
    assert run(5, 0.3) == ""


def test_long_loops_say_how_far_they_are():
    shown = run(4, 1.0, total=3500, step=1000)
    assert "reading [###########.........] 2,000 of 3,500 rows, 2 s left" in shown
    assert "3,500 of 3,500 rows, 0 s left" in shown
    assert shown.endswith("\r\x1b[K"), "the line is cleared at the end"


def test_without_a_total():
    assert "reading: 3 rows" in run(4, 1.0)


def test_nothing_is_written_where_there_is_no_terminal(capsys):
    clock = itertools.count(0, 9.0).__next__
    assert list(track(range(3), "reading", clock=clock)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
