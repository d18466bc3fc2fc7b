"""`check_transfer`: the contract of `TensorLink` as a test.

```python
def test_my_link():
    check_transfer(MyLink)  # called with the number of receivers
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_distributed.batch.tensor_buffers import carried
from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    TransferError,
)
from rl_distributed.extras import require_torch
from rl_distributed.transfer.manifest import Manifest
from rl_distributed.transfer.protocol import ReceivingEnd, SendingEnd, TensorLink
from rl_distributed.transfer.verified_stream import receive_tensors, send_tensors

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["TransferContractError", "check_transfer", "example_tensors"]

# Small enough that the examples span several blocks and one exceeds a bucket.
_BUCKET_BYTES = 4096
_SHORT_S = 0.3


class TransferContractError(DistributedError, AssertionError):
    """A link violates the contract; the message lists the broken rules."""


def check_transfer(
    make_link: Callable[[int], TensorLink],
    *,
    num_receivers: int = 2,
    deadline_s: float = 60.0,
) -> None:
    """Check that a link keeps its contract. Sender and receivers are threads here.

    Checked are: values of every dtype, shape and memory layout, bit by bit, with equal
    manifests at all ends; tensors larger than a bucket; several transfers in a row,
    of which earlier tensors stay as they are; a transfer of nothing; a sender that
    gives up; a receiver to whom nothing is sent.

    Args:
        make_link: Makes a new link for a number of receivers; it is closed here.
        num_receivers: How many receivers to try.
        deadline_s: How long each transfer may take.

    Raises:
        TransferContractError: With all rules that were broken.
    """
    require_torch("check_transfer")
    problems: list[str] = []
    for check in (_check_values, _check_giving_up, _check_deadline):
        # A new link per check, because a `CollectiveLink` is unusable after a deadline.
        with (
            make_link(num_receivers) as link,
            _ends(link, num_receivers, deadline_s) as ends,
        ):
            problems += check(ends, deadline_s)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in dict.fromkeys(problems))
        raise TransferContractError(f"the link breaks its contract:\n{listed}")


def example_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Small tensors of all kinds: dtypes, shapes, and memory that has gaps."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (8 * 96,), dtype=torch.uint8, generator=generator)
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    more = (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    eights = (torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {
        str(dtype): bits.view(dtype).clone()
        for dtype in (*integers, *more, *floats, *eights)
    }
    base = torch.randn(12, 10, generator=generator)
    complex_base = torch.randn(4, dtype=torch.complex64, generator=generator)
    tensors |= {
        "bool": bits > 100,
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 10),
        "conjugated": complex_base.conj(),
        "parameter": torch.nn.Parameter(base[0].clone()),
        "half transposed": base.bfloat16().T,
        "single": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0),
        "no columns": torch.empty(7, 0, dtype=torch.bfloat16),
        "larger than a bucket": torch.randn(3, 1000, generator=generator),
        "": torch.tensor([1], dtype=torch.int8),
        "a.name/with : signs": torch.arange(3, dtype=torch.int8),
    }
    return tensors


@dataclass(frozen=True)
class _Ends:
    sender: SendingEnd
    receivers: Sequence[ReceivingEnd]
    threads: ThreadPoolExecutor


@contextmanager
def _ends(link: TensorLink, num_receivers: int, deadline_s: float) -> Iterator[_Ends]:
    """All ends of a link, made at the same time."""
    # Some links block in each end until all the others have joined.
    with ThreadPoolExecutor(num_receivers) as threads:
        made = [
            threads.submit(link.receiver, index, deadline_s=deadline_s)
            for index in range(num_receivers)
        ]
        sender = link.sender(deadline_s=deadline_s)
        receivers = [future.result(deadline_s) for future in made]
        try:
            yield _Ends(sender, receivers, threads)
        finally:
            sender.close()
            for receiver in receivers:
                receiver.close()


def _check_values(ends: _Ends, deadline_s: float) -> list[str]:
    problems: list[str] = []
    # Several in a row, to catch links that reuse memory too early.
    transfers = [example_tensors(0), example_tensors(1), {}]
    earlier: list[dict[str, torch.Tensor]] = []
    for number, tensors in enumerate(transfers):
        label = f"transfer {number}"
        sent, results = _transfer(ends, tensors, label, deadline_s)
        for index, (received, manifest) in enumerate(results):
            earlier.append(received)
            where = f"receiver {index}, {label}"
            problems += _differences(where, tensors, received)
            if manifest is None or manifest.digest != sent.digest:
                problems.append(f"{where}: the manifest is not that of the sender")
    # Compared only now, when later transfers could have overwritten them.
    for number, received in enumerate(earlier):
        tensors = transfers[number // len(ends.receivers)]
        problems += _differences("after later transfers", tensors, received)
    return problems


def _transfer(
    ends: _Ends, tensors: dict[str, torch.Tensor], label: str, deadline_s: float
) -> tuple[Manifest, list[tuple[dict[str, torch.Tensor], Manifest | None]]]:
    def receive(end: ReceivingEnd) -> tuple[dict[str, torch.Tensor], Manifest | None]:
        stream = receive_tensors(end, expected=tensors, deadline_s=deadline_s)
        return stream.read(), stream.manifest

    waiting = [ends.threads.submit(receive, end) for end in ends.receivers]
    sent = send_tensors(
        ends.sender,
        tensors,
        label=label,
        bucket_bytes=_BUCKET_BYTES,
        deadline_s=deadline_s,
    )
    return sent, [future.result(2 * deadline_s) for future in waiting]


def _differences(
    where: str, sent: dict[str, torch.Tensor], received: dict[str, torch.Tensor]
) -> list[str]:
    if list(sent) != list(received):
        return [f"{where}: got the names {list(received)} instead of {list(sent)}"]
    problems = []
    for name, tensor in sent.items():
        found = received[name]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            problems.append(f"{where}: {name!r} has another dtype or shape")
        elif not _same_bits(tensor, found):
            problems.append(f"{where}: {name!r} has other values")
    return problems


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Compared as bits, because the examples contain NaNs.
    values = [carried(tensor).cpu().contiguous().numpy() for tensor in (first, second)]
    return values[0].tobytes() == values[1].tobytes()


def _check_giving_up(ends: _Ends, deadline_s: float) -> list[str]:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.zeros(_BUCKET_BYTES)
        yield "second", torch.zeros(_BUCKET_BYTES)
        raise ValueError("no more tensors")

    waiting = [
        ends.threads.submit(_failure_of, end, deadline_s) for end in ends.receivers
    ]
    problems = []
    try:
        send_tensors(
            ends.sender,
            tensors(),
            bucket_bytes=_BUCKET_BYTES,
            deadline_s=deadline_s,
        )
        problems.append("a sender whose tensors raise does not raise")
    # The tensors' own error must reach the caller unchanged.
    except ValueError:
        pass
    for index, error in enumerate(_results(waiting, 2 * deadline_s)):
        if not isinstance(error, TransferError) or "no more tensors" not in str(error):
            problems.append(
                f"receiver {index}: a sender that gives up must be a TransferError "
                f"with its reason: got {error!r}"
            )
    return problems


def _check_deadline(ends: _Ends, deadline_s: float) -> list[str]:
    error = _failure_of(ends.receivers[0], _SHORT_S)
    if isinstance(error, DeadlineExceededError):
        return []
    return [
        "receiver 0: where nothing is sent, a DeadlineExceededError must come: got "
        f"{error!r}"
    ]


def _failure_of(end: ReceivingEnd, deadline_s: float) -> Exception | None:
    try:
        receive_tensors(end, deadline_s=deadline_s).read()
    except Exception as error:  # whatever a link raises is a finding
        return error
    return None


def _results(
    futures: Sequence[Future[Exception | None]], deadline_s: float
) -> list[Exception | None]:
    return [future.result(deadline_s) for future in futures]
