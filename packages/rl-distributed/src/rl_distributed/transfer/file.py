"""A link through files that stay: safetensors, one per block, in a folder.

Receivers can come while the sender writes or long after, on any machine that sees the
folder, and any reader of safetensors can open the files. Each file, and the end of the
transfer, appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rl_distributed.errors import TransferError
from rl_distributed.extras import require_torch
from rl_distributed.private_files import create_private_folder
from rl_distributed.process.closing import close_after
from rl_distributed.transfer.folder import (
    announce,
    map_file,
    reason_for_silence,
    replace_file,
    wait_for,
)
from rl_distributed.transfer.manifest import TensorEntry
from rl_distributed.transfer.protocol import Header

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["FileLink", "FileReceiver", "FileSender"]

# Names of the format; other dtypes are stored as bytes, and our header knows better.
_FORMAT_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_LENGTH_BYTES = 8
# Of the first tensor; at least the size of the widest dtype.
_ALIGNMENT = 64
_KEY, _RESERVED = "rl_distributed", "__metadata__"


@dataclass(frozen=True)
class FileLink:
    """A link through `folder`, which is made where it is missing.

    Transfers follow each other in the folder; a receiver begins with the first.
    """

    folder: str
    num_receivers: int = 1
    keep_files: bool = True
    """Whether `close` leaves the files; otherwise it removes those of the link."""

    def sender(self, *, deadline_s: float = 60.0) -> FileSender:
        """Return the sending end; a folder takes one sender at a time."""
        require_torch("FileLink.sender")
        folder = Path(self.folder)
        create_private_folder(folder)
        return FileSender(folder, is_durable=self.keep_files)

    def receiver(self, index: int = 0, *, deadline_s: float = 60.0) -> FileReceiver:
        """Return a receiving end; files serve any number of them."""
        require_torch("FileLink.receiver")
        folder = Path(self.folder)
        # The receiver may start before the sender.
        create_private_folder(folder)
        return FileReceiver(folder)

    def close(self) -> None:
        """Remove the link's files, and the folder if it is empty then."""
        if self.keep_files:
            return
        folder = Path(self.folder)
        # Only names that a link creates: the folder is the user's and may
        # hold other files.
        for pattern in ("message-*", ".message-*.part", "sender.json"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it, or it was never made
            folder.rmdir()

    def __enter__(self) -> Self:
        """Return the link itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the link."""
        close_after(error, self.close, "the link")


class FileSender:
    """Writes each block as a file in the format of safetensors."""

    def __init__(self, folder: Path, *, is_durable: bool = True) -> None:
        self._folder = folder
        self._is_durable = is_durable
        self._announced = folder / "sender.json"
        announce(self._announced)
        # Continue after the messages of earlier senders, as receivers
        # start with the first.
        self._number = len(list(folder.glob("message-*")))
        self._memory = torch.empty(0, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory of this process, used again for the next block."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Write the message, to the disk if it is to stay, then give it its name."""
        path = self._folder / f"message-{self._number:08d}"
        try:
            # Without tensors there is nothing to store as safetensors.
            if block is None:
                text = header.to_json()
                durable = self._is_durable
                replace_file(path.with_suffix(".json"), text, durable=durable)
            else:
                self._write(path.with_suffix(".safetensors"), header, block)
        except OSError as error:
            raise TransferError(f"cannot write {path}: {error}") from error
        self._number += 1

    def close(self) -> None:
        """Say that nothing more will come."""
        if self._folder.exists():
            announce(self._announced, closed=True)

    def _write(self, path: Path, header: Header, block: torch.Tensor) -> None:
        entries = _in_file_order(header.entries)
        described: dict[str, Any] = {_KEY: header.to_json()}
        table: dict[str, Any] = {_RESERVED: described}
        end = 0
        for entry in entries:
            if entry.name == _RESERVED:
                raise TransferError(f"a tensor in a file cannot be called {_RESERVED}")
            start, end = end, end + entry.num_bytes
            table[entry.name] = _described(entry) | {"data_offsets": [start, end]}
        text = json.dumps(table).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
        # Slices of a memoryview are written without copying.
        data = block.numpy().data
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for entry in entries:
                file.write(data[entry.start : entry.start + entry.num_bytes])
            # Files that are kept must survive a power failure; others
            # need not wait for the disk.
            if self._is_durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)


class FileReceiver:
    """Maps each file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message; its block is memory of this process alone."""
        path = self._folder / f"message-{self._number:08d}"
        message = wait_for(
            lambda: _read(path),
            lambda: reason_for_silence(self._folder / "sender.json", "the sender"),
            f"{path}.safetensors or .json",
            deadline_s,
        )
        self._number += 1
        return message

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    # The format allows no gaps, so wider types go first: each is aligned to its size.
    return sorted(entries, key=lambda entry: (-entry.torch_dtype.itemsize, entry.name))


def _described(entry: TensorEntry) -> dict[str, Any]:
    if entry.dtype in _FORMAT_NAMES:
        return {"dtype": _FORMAT_NAMES[entry.dtype], "shape": list(entry.shape)}
    # Stored as bytes, so that any safetensors reader can open the file.
    return {"dtype": "U8", "shape": [*entry.shape, entry.torch_dtype.itemsize]}


def _read(path: Path) -> tuple[Header, torch.Tensor] | None:
    ended, block = path.with_suffix(".json"), path.with_suffix(".safetensors")
    if ended.exists():
        text = ended.read_text(encoding="utf-8")
        return Header.from_json(text), torch.empty(0, dtype=torch.uint8)
    if not block.exists():
        return None
    try:
        whole = torch.frombuffer(map_file(block), dtype=torch.uint8)
        length = int.from_bytes(whole[:_LENGTH_BYTES].numpy().tobytes(), "little")
        begin = _LENGTH_BYTES + length
        table = json.loads(whole[_LENGTH_BYTES:begin].numpy().tobytes())
        header = Header.from_json(table[_RESERVED][_KEY])
        entries = tuple(
            replace(entry, start=table[entry.name]["data_offsets"][0])
            for entry in header.entries
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError(
            f"{block} is damaged or was not written by a FileLink: {error!r}; send the "
            "tensors again"
        ) from error
    return replace(header, entries=entries), whole[begin:]
