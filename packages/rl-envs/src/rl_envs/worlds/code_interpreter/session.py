"""A session of cells as a single program.

A session keeps no process between turns: the program of a turn runs the earlier cells
again, discarding their output, and then the new one. A session is therefore just the
list of its cells, which can move to any worker with its conversation, survives the
death of a worker, and leaves nothing behind. Random numbers are seeded, so that earlier
cells repeat their results; only values read from the clock may differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["program_of_session"]

_PROGRAM = """
import ast as _ast, contextlib as _contextlib, io as _io, json as _json
import linecache as _linecache, random as _random, sys as _sys, traceback as _traceback

def _run(number, code, names):
    name = f"<cell {number}>"
    # Tracebacks show the lines of cells.
    _linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = _ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        shown = None
        if isinstance(last, _ast.Expr):
            shown = _ast.Expression(tree.body.pop().value)
        exec(compile(tree, name, "exec"), names)
        if shown is not None:
            value = eval(compile(shown, name, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        lines = _traceback.format_exception(type(error), error, trace)
        print("".join(lines), end="")

def _main():
    cells = _json.loads(_CELLS)
    names = {"__name__": "__main__"}
    _random.seed(0)
    for number, code in enumerate(cells[:-1], start=1):
        with _contextlib.redirect_stdout(_io.StringIO()):
            with _contextlib.redirect_stderr(_io.StringIO()):
                _run(number, code, names)
    _run(len(cells), cells[-1], names)
    print(_MARK, end="")

_main()
"""


def program_of_session(cells: Sequence[str], mark: str) -> str:
    """Return a program that runs the cells and shows the output of the last one.

    It prints the output of the cell, the value of its last line if that is an
    expression, the traceback of an uncaught exception, and the mark.

    Args:
        cells: At least one cell, in order.
        mark: Final text of a complete run; it is missing if a cell exits the process.
    """
    # JSON within a Python literal: no text of a cell can end the string early.
    return f"_CELLS, _MARK = {json.dumps(list(cells))!r}, {mark!r}\n{_PROGRAM}"
