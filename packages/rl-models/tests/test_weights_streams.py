"""Weights from a sending rank to a receiving replica, in one process."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from rl_distributed.batch.tensor_buffers import decode, encode
from rl_distributed.transfer import LinkSet, SharedMemoryLink
from rl_models.errors import WeightSyncError
from rl_models.weight_request import WeightRequest
from rl_models.weights.loading import changed_tensors, load_tensors, loaded_tensors
from rl_models.weights.receiving import WeightReceiver
from rl_models.weights.sending import WeightSender, whole_buckets


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 4, generator=generator),
        "b.weight": torch.randn(3, 4, generator=generator),
        "c.scale": torch.tensor(2.0),
        "d.table": torch.arange(5),
    }


def sender_of(export, rank):
    """Return the sender of a rank with all tensors whole, as `export` yields them."""
    return WeightSender(lambda request: whole_buckets(export(), request, rank), rank)


def sender(named):
    return sender_of(lambda: iter(list(named.items())), 0)


def messages(named, request, count=None):
    """Return the messages of all buckets, with memory of their own."""
    end = sender(named)
    count = count or WeightSender.num_buckets(named, request)
    parts = []
    for index in range(count):
        part = end.messages(request, index, index == count - 1)
        parts.append(
            [
                (text, None if block is None else encode(decode(block).clone()))
                for text, block in part
            ]
        )
    return parts


def receive(parts, request):
    receiver = WeightReceiver("replica 3")
    weights = receiver.weights(parts, request)
    got = {name: tensor.clone() for name, tensor in weights}
    receiver.accept(weights.manifest())
    return got


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_all_weights_arrive_in_the_generators_precision(bucket_bytes):
    sent = tensors()
    request = WeightRequest(7, "bfloat16", bucket_bytes)
    got = receive(messages(sent, request), request)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert got[name].dtype == wanted.dtype
        assert torch.equal(got[name], wanted)


def test_weights_travel_over_a_link_again_and_again():
    request = WeightRequest(1, bucket_bytes=100)
    end, receiver = sender(tensors()), WeightReceiver("replica 0")
    with SharedMemoryLink.create(max_blocks=9) as link:
        end.open(link, 10.0)
        receiver.open(link, 0, 10.0)
        for _ in range(2):
            digest = end.send(link, request)
            weights = receiver.weights(link, request)
            assert dict(weights).keys() == tensors().keys()
            assert weights.manifest().digest == digest
        with pytest.raises(WeightSyncError, match="was not opened"):
            receiver.weights(SharedMemoryLink("/nowhere"), request)
        end.close()
        receiver.close()


def test_ranks_that_do_not_send_take_part_to_the_end():
    taken = []

    def export():
        for name, tensor in tensors().items():
            taken.append(name)
            yield name, tensor

    request = WeightRequest(1, bucket_bytes=1)
    other = sender_of(export, 1)
    count = WeightSender.num_buckets(tensors(), request)
    assert count == 4
    for index in range(count):
        assert other.messages(request, index, index == count - 1) is None
    assert taken == list(tensors())


def test_a_bucket_after_one_that_failed_is_refused():
    def export():
        yield "a", torch.zeros(3)
        raise RuntimeError("the disk is on fire")

    request = WeightRequest(1, bucket_bytes=1)
    broken = sender_of(export, 0)
    with pytest.raises(RuntimeError, match="on fire"):
        broken.messages(request, 0, False)
    with pytest.raises(WeightSyncError, match="one before it failed"):
        broken.messages(request, 1, True)


def damaged(parts):
    _, block = parts[0][0]
    decode(block)[1] ^= 1


def truncated(parts):
    text, block = parts[0][0]
    parts[0][0] = (text, encode(decode(block)[:40].clone()))


def dropped(parts):
    del parts[1]


def ended(parts):
    del parts[-1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, r"'a\.weight'.*arrived damaged"),
        (truncated, r"'a\.weight' has 48 bytes, but its block ends after 40"),
        (dropped, "message 2.*came where message 1 was due"),
        (ended, "end before the end"),
    ],
)
def test_what_is_spoiled_on_the_way_is_refused_and_named(spoil, message):
    request = WeightRequest(2, bucket_bytes=1)
    parts = messages(tensors(), request)
    spoil(parts)
    with pytest.raises(WeightSyncError, match=f"version 2 .*replica 3.*{message}"):
        receive(parts, request)


def test_another_data_type_is_refused():
    parts = messages(tensors(), WeightRequest(2))
    with pytest.raises(WeightSyncError, match=r"a\.weight came as float32.*bfloat16"):
        receive(parts, WeightRequest(2, "bfloat16"))


def test_a_stale_version_is_refused():
    with pytest.raises(WeightSyncError, match="told to load weights of version 9, but"):
        receive(messages(tensors(), WeightRequest(8)), WeightRequest(9))


def test_a_stream_must_be_taken_to_its_end():
    request = WeightRequest(2)
    receiver = WeightReceiver("replica 3")
    weights = receiver.weights(messages(tensors(), request), request)
    for _ in tensors():
        next(weights)
    with pytest.raises(WeightSyncError, match="did not take"):
        weights.manifest()


def test_a_tensor_that_the_trainer_forgets_later_is_named():
    receiver = WeightReceiver("replica 3")
    for number in (1, 2):
        sent = tensors()
        if number == 2:
            del sent["b.weight"]
        request = WeightRequest(number)
        weights = receiver.weights(messages(sent, request), request)
        dict(weights)
        if number == 1:
            receiver.accept(weights.manifest())
    with pytest.raises(WeightSyncError, match=r"consist of: b\.weight"):
        receiver.accept(weights.manifest())


def make_model():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, False))
    model[1].weight = model[0].weight
    model.register_buffer("count", torch.zeros(2))
    return model


def test_tied_weights_need_one_name_and_saved_buffers_come_along():
    model, value = make_model(), torch.randn(4, 3)
    pairs = [("0.weight", value), ("count", torch.ones(2))]
    load_tensors(model, iter(pairs), "replica 0")
    assert torch.equal(model[1].weight, value)
    assert torch.equal(model.count, torch.ones(2))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({}, "0.weight is missing"),
        ({"0.weight": torch.zeros(4, 3), "x": torch.zeros(1)}, "x is unknown"),
        (
            {"0.weight": torch.zeros(3, 4)},
            r"0.weight has shape \(3, 4\) instead of \(4, 3\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused(sent, message):
    pairs = iter([*sent.items(), ("count", torch.ones(2))])
    with pytest.raises(WeightSyncError, match=f"replica 1.*{message}"):
        load_tensors(make_model(), pairs, "replica 1")


def test_what_a_model_holds_otherwise_is_named():
    model = make_model()
    request = WeightRequest(1)
    sent = {"0.weight": torch.randn(4, 3), "count": torch.ones(2)}
    receiver = WeightReceiver("replica 0")
    weights = receiver.weights(messages(sent, request), request)
    load_tensors(model, iter(weights), "replica 0")
    manifest = weights.manifest()
    assert changed_tensors(manifest, loaded_tensors(model)) == []
    with torch.no_grad():
        model[0].weight[2, 1] += 1
    assert changed_tensors(manifest, loaded_tensors(model)) == ["0.weight"]


TURNS = (0, 2, 2, 0)


def sharing(rank):
    """Return the sender of a rank for the buckets of its own turns, one tensor each."""

    def export(request):
        for turn, pair in zip(request.turns, tensors().items(), strict=True):
            yield [pair] if turn == rank else None

    return WeightSender(export, rank)


def test_ranks_that_share_the_sending_are_put_together():
    request = WeightRequest(5, bucket_bytes=1, turns=TURNS)
    assert request.senders == (0, 2)
    ends = [sharing(rank) for rank in range(3)]
    parts = {0: [], 2: []}
    for index in range(len(TURNS)):
        is_last = index == len(TURNS) - 1
        found = [end.messages(request, index, is_last) for end in ends]
        assert found[1] is None, "this rank only takes part"
        for rank in (0, 2):
            for text, block in found[rank] or ():
                block = None if block is None else encode(decode(block).clone())
                parts[rank].append([(text, block)])
    got = receive([parts[0], parts[2]], request)
    assert list(got) == list(tensors())
    assert all(torch.equal(got[name], value) for name, value in tensors().items())


def test_ranks_that_share_the_sending_have_a_link_each():
    request = WeightRequest(5, bucket_bytes=1, turns=TURNS)
    ends, receiver = [sharing(rank) for rank in range(3)], WeightReceiver("replica 0")
    made = tuple(SharedMemoryLink.create(max_blocks=9) for _ in request.senders)
    with closing(LinkSet(made, request.senders)) as links:
        for end in ends:
            end.open(links, 10.0)
        receiver.open(links, 0, 10.0)
        for _ in range(2):
            digests = [end.send(links, request) for end in ends]
            assert digests[1] is None
            weights = receiver.weights(links, request)
            assert dict(weights).keys() == tensors().keys()
            assert weights.manifest().label == request.label
        for end in (*ends, receiver):
            end.close()
