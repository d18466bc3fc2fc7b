"""Processes that serve as ranks of one cell after the other."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["RankProcesses"]

DEADLINE_S = 120.0


def _serve(pipe: Connection) -> None:
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    while True:
        try:
            work, arguments, variables = pipe.recv()
        except EOFError:
            return
        os.environ.update(variables)
        try:
            pipe.send((work(*arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RankProcesses:
    """Up to `size` ranks, started once: importing torch takes longer than a cell."""

    def __init__(self, size: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        for _ in range(self._size):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, num_ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run `work(*arguments)` on that many ranks; return rank 0's result.

        Raises:
            RuntimeError: A rank failed, or did not finish by the deadline.
        """
        if not self._processes:
            self._start()
        port = str(_free_port())
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            pipe.send((work, arguments, variables))
        results = []
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            if not pipe.poll(DEADLINE_S):
                self.close()
                raise RuntimeError(f"rank {rank} did not answer in {DEADLINE_S:g} s")
            value, error = pipe.recv()
            if error is not None:
                self.close()  # the others wait for it in a collective
                raise RuntimeError(f"rank {rank} of {num_ranks}:\n{error}")
            results.append(value)
        return results[0]

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
