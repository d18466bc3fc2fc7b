"""Several senders in one transfer: their blocks arrive in order, as one stream."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from rl_distributed.errors import DeadlineExceededError, TransferError
from rl_distributed.transfer import (
    Header,
    LinkSet,
    SharedMemoryLink,
    TensorStream,
    TurnReceiver,
    receive_tensors,
    send_messages,
)
from rl_distributed.transfer.messages import BlockPacker

TURNS = (1, 0, 0, 1, 2)
SENT = {f"t{number}": torch.full((number + 1,), float(number)) for number in range(5)}
LABEL = "version 3"


@pytest.fixture
def links() -> Iterator[LinkSet]:
    """Return links of three senders that need no reading while they send."""
    made = tuple(SharedMemoryLink.create(max_blocks=9) for _ in range(3))
    with closing(LinkSet(made, (4, 5, 7))) as links:
        yield links


def send(links: LinkSet, place: int, *, label: str = LABEL, drop: bool = False) -> None:
    """Send the tensors of its turns, one per block."""
    end = links.sender(links.senders[place])
    packer = BlockPacker(end.buffer, label=label)

    def messages() -> Iterator[tuple[Header, torch.Tensor | None]]:
        for turn, pair in zip(TURNS, SENT.items(), strict=True):
            if turn == place and not drop:
                yield packer.block([pair])
        yield packer.end()

    send_messages(end, messages(), label=label, deadline_s=10.0)


def stream(links: LinkSet) -> TensorStream:
    links = pickle.loads(pickle.dumps(links))
    receiver = TurnReceiver(links.receivers(0), TURNS)
    return receive_tensors(receiver, deadline_s=5.0)


def test_blocks_of_several_senders_are_one_transfer(links: LinkSet) -> None:
    assert links.num_receivers == 1
    for place in (2, 0, 1):
        send(links, place)
    received = stream(links)
    found = received.read()
    assert list(found) == list(SENT), "in the order of turns, whoever sent first"
    assert all(torch.equal(found[name], SENT[name]) for name in SENT)
    assert received.manifest is not None
    assert {entry.name for entry in received.manifest.entries} == set(SENT)
    assert received.manifest.label == LABEL


def test_a_sender_that_leaves_out_a_block_is_named(links: LinkSet) -> None:
    send(links, 0)
    send(links, 1, drop=True)
    send(links, 2)
    with pytest.raises(TransferError, match=r"end 0 of sender 1 .* block 0 was due"):
        stream(links).read()


def test_a_block_that_its_link_has_lost_is_named() -> None:
    class Lossy:
        def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
            return Header("block", 1, LABEL), torch.empty(0, dtype=torch.uint8)

        def close(self) -> None:
            pass

    receiver = TurnReceiver([Lossy()], (0, 0))
    with pytest.raises(TransferError, match=r"block 1 of sender 0 .* block 0 was due"):
        receiver.receive(deadline_s=1.0)


def test_senders_of_different_versions_are_refused(links: LinkSet) -> None:
    for place, label in enumerate((LABEL, LABEL, "version 2")):
        send(links, place, label=label)
    with pytest.raises(TransferError, match="different transfers: version 2, version"):
        stream(links).read()


def test_the_reason_of_a_sender_that_gives_up_arrives(links: LinkSet) -> None:
    send(links, 0)
    send(links, 1)

    def failing() -> Iterator[tuple[Header, torch.Tensor | None]]:
        raise RuntimeError("the disk is on fire")
        yield

    with pytest.raises(RuntimeError, match="on fire"):
        send_messages(links.sender(7), failing(), label=LABEL, deadline_s=5.0)
    with pytest.raises(TransferError, match=r"gave up.*on fire"):
        stream(links).read()


def test_a_sender_that_sends_nothing_is_waited_for_until_the_deadline(
    links: LinkSet,
) -> None:
    send(links, 1)
    received = receive_tensors(TurnReceiver(links.receivers(0), TURNS), deadline_s=0.3)
    with pytest.raises(DeadlineExceededError):
        received.read()
