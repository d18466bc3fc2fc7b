"""A link between processes of one machine: blocks are files in shared memory.

The sender packs straight into a file under `/dev/shm`, and receivers map it: the bytes
are written once, whatever the number of receivers.

```
<folder>/block-<k>    memory for blocks, written again when no receiver needs it
         message-<n>  header of message n, and the file of its block
```
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rl_distributed.errors import TransferError
from rl_distributed.extras import require_torch
from rl_distributed.transfer.folder import (
    Taken,
    announce,
    own_process,
    process_is_gone,
    reason_for_silence,
    replace_file,
    taken_in,
    wait_for,
)
from rl_distributed.transfer.protocol import Header
from rl_distributed.transfer.segments import MappedBlocks, Segment, Segments

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["SharedMemoryLink", "SharedMemoryReceiver", "SharedMemorySender"]

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rl-transfer"
# The folders of links that this process has made and not closed.
_open_folders: dict[str, int] = {}
# Beside those on the way: one that is filled, and two whose last tensors are in use.
_MORE_SEGMENTS = 3


@dataclass(frozen=True)
class SharedMemoryLink:
    """A link whose ends are on one machine; `create` makes it.

    At most `max_blocks` blocks exist that a receiver has not taken. The memory of a
    block is used again when all receivers have taken it and no tensor of it is left; it
    is freed when the link is closed.
    """

    folder: str
    num_receivers: int = 1
    max_blocks: int = 2
    is_private: bool = True
    """Whether writes of a receiver to its tensors stay invisible to others. If they may
    be seen, memory is mapped once and not for each block."""

    @classmethod
    def create(
        cls,
        num_receivers: int = 1,
        *,
        max_blocks: int = 2,
        is_private: bool = True,
        parent: Path = _SHARED_MEMORY,
    ) -> Self:
        """Make the link's folder, readable by this user alone.

        A link that is not closed goes with this process, and what processes that were
        killed have left is removed here.
        """
        if num_receivers < 1 or max_blocks < 1:
            raise TransferError(
                "num_receivers and max_blocks must be positive: got "
                f"{num_receivers} and {max_blocks}"
            )
        _sweep(parent)
        own = own_process()
        # The name identifies the process, so that a later link can tell
        # whether it still runs.
        name = "-".join(
            [
                _PREFIX,
                *(str(int(own[key])) for key in ("namespace", "pid", "started_s")),
                secrets.token_hex(4),
            ]
        )
        folder = parent / name
        folder.mkdir(mode=0o700)
        _open_folders[str(folder)] = os.getpid()
        return cls(str(folder), num_receivers, max_blocks, is_private)

    @staticmethod
    def room(parent: Path = _SHARED_MEMORY) -> int:
        """Bytes of shared memory that are free; 0 where this user cannot have any."""
        if not os.access(parent, os.W_OK | os.X_OK):
            return 0
        return shutil.disk_usage(parent).free

    def sender(self, *, deadline_s: float = 60.0) -> SharedMemorySender:
        """Return the sending end; on the machine of the folder."""
        require_torch("SharedMemoryLink.sender")
        _check_folder(self.folder)
        return SharedMemorySender(self)

    def receiver(
        self, index: int = 0, *, deadline_s: float = 60.0
    ) -> SharedMemoryReceiver:
        """Return the end of receiver `index`; on the machine of the folder."""
        require_torch("SharedMemoryLink.receiver")
        _check_folder(self.folder)
        if not 0 <= index < self.num_receivers:
            raise TransferError(
                f"receiver must be in 0..{self.num_receivers - 1}: got {index}"
            )
        return SharedMemoryReceiver(self, index)

    def close(self) -> None:
        """Remove the folder; tensors that were received stay valid."""
        _open_folders.pop(self.folder, None)
        # Other ends may be writing or removing files at the same time.
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Return the link itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the link."""
        self.close()


class SharedMemorySender:
    """Fills a segment with each block, and writes a message that names it."""

    def __init__(self, link: SharedMemoryLink) -> None:
        self._link = link
        self._folder = Path(link.folder)
        self._announced = self._folder / "sender.json"
        announce(self._announced)
        # A later sender continues where the slowest receiver is.
        self._sent = self._kept = min(each.next for each in _all_taken(link))
        self._segments = Segments(
            self._folder,
            _lowest_unused(self._folder),
            link.max_blocks + _MORE_SEGMENTS,
        )
        self._segment: Segment | None = None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory that no receiver uses any more, for the next message."""
        if num_bytes == 0:
            self._segment = None
            return torch.empty(0, dtype=torch.uint8)
        # Read once here, as each is a file and there may be many segments.
        taken = _all_taken(self._link)

        def is_done(message: int) -> bool:
            return all(message < t.next and message not in t.held for t in taken)

        self._segment = self._segments.take(num_bytes, is_done)
        return self._segment.memory[:num_bytes]

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Wait for room, then publish the message."""
        self._wait_for_receivers(self._link.max_blocks - 1, deadline_s)
        # Reset, so that a later message without a block cannot publish it again.
        segment, self._segment = self._segment, None
        place = ["", 0]
        if segment is not None and block is not None:
            segment.message = self._sent
            place = [segment.path.name, block.numel()]
        text = json.dumps([*place, header.to_json()])
        replace_file(_message(self._folder, self._sent), text)
        self._sent += 1

    def close(self) -> None:
        """Say that nothing more will come."""
        if self._folder.exists():
            announce(self._announced, closed=True)

    def wait_until_taken(self, *, deadline_s: float) -> None:
        """Return once all receivers have taken all messages."""
        self._wait_for_receivers(0, deadline_s)

    def _wait_for_receivers(self, most: int, deadline_s: float) -> None:
        """Wait until at most `most` messages are not taken; remove the others."""

        def few_left() -> int | None:
            lowest = min(each.next for each in _all_taken(self._link))
            return lowest if self._sent - lowest <= most else None

        def watch() -> str | None:
            for index in range(self._link.num_receivers):
                path = self._folder / f"receiver-{index}.json"
                reason = reason_for_silence(path, f"receiver {index}")
                if reason is not None:
                    return reason
            return None

        what = f"the receivers of message {self._sent - most - 1} in {self._folder}"
        lowest = wait_for(few_left, watch, what, deadline_s)
        for number in range(self._kept, lowest):
            _message(self._folder, number).unlink(missing_ok=True)
        self._kept = lowest


class SharedMemoryReceiver:
    """Maps the block of each message."""

    def __init__(self, link: SharedMemoryLink, index: int) -> None:
        self._folder = Path(link.folder)
        self._announced = self._folder / f"receiver-{index}.json"
        announce(self._announced)
        self._path = self._folder / f"taken-{index}"
        before = taken_in(self._path)
        self._next = before.next
        self._blocks = MappedBlocks(self._folder, before.held, link.is_private)

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message; whose memory its block is, the link says."""
        # Safe to acknowledge before use: the block is not reused while
        # tensors of it exist.
        message = self.take(deadline_s=deadline_s)
        self.acknowledge()
        return message

    def take(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message, which the sender keeps until `acknowledge`."""
        path = _message(self._folder, self._next)
        sender = self._folder / "sender.json"
        text = wait_for(
            lambda: path.read_text(encoding="utf-8") if path.exists() else None,
            lambda: reason_for_silence(sender, "the sender"),
            f"message {self._next} in {self._folder}",
            deadline_s,
        )
        name, num_bytes, header = json.loads(text)
        block = torch.empty(0, dtype=torch.uint8)
        if name:
            block = self._blocks.open(self._next, name, num_bytes)
        return Header.from_json(header), block

    def acknowledge(self) -> None:
        """Tell the sender that the message is taken."""
        self._next += 1
        replace_file(self._path, Taken(self._next, self._blocks.held()).to_text())

    def close(self) -> None:
        """Say that nothing more will be taken."""
        if self._folder.exists():
            announce(self._announced, closed=True)


def _message(folder: Path, number: int) -> Path:
    return folder / f"message-{number:08d}"


def _all_taken(link: SharedMemoryLink) -> list[Taken]:
    """Return what each receiver has taken."""
    folder = Path(link.folder)
    return [taken_in(folder / f"taken-{i}") for i in range(link.num_receivers)]


def _lowest_unused(folder: Path) -> int:
    """Return a number above those of all segments of earlier senders."""
    numbers = [int(path.name.split("-")[1]) for path in folder.glob("block-*")]
    return max(numbers, default=-1) + 1


def _check_folder(folder: str) -> None:
    if not Path(folder).is_dir():
        raise TransferError(
            f"the folder {folder} of the link is not on this machine, or its link is "
            "closed; shared memory connects processes of one machine only"
        )


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that ended without closing their links."""
    own = own_process()
    for folder in parent.glob(f"{_PREFIX}-*"):
        try:
            namespace, pid, started_s = map(int, folder.name.split("-")[2:5])
        # Not one of our names, so the folder belongs to another program.
        except ValueError:
            continue
        # The name holds whole seconds only; the comparison tolerates one second.
        process = {
            **own,
            "namespace": namespace,
            "pid": pid,
            "started_s": started_s + 0.5,
        }
        if process_is_gone(process):
            shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _remove_open() -> None:
    """Remove what this process has not closed; a fork of it has made none of these."""
    for folder, pid in _open_folders.items():
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)
