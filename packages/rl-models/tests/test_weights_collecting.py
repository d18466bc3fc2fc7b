"""Weights of a sync are assembled only on the ranks that send them."""

from __future__ import annotations

import os
import socket

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from rl_models.checkpoint.sharded import Box
from rl_models.errors import WeightSyncError
from rl_models.training.process_group import Ranks
from rl_models.weight_request import WeightRequest
from rl_models.weights.collecting import ShardedWeights, WeightCollector

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
LORA = {"r": 2, "alpha": 4.0}
TWO = {
    "data": {},
    "tensor": {"parallelism": {"tensor": 2}},
    "sequence": {"parallelism": {"tensor": 2, "sequence": True}},
    "context": {"parallelism": {"context": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "expert": {"parallelism": {"expert": 2}},
    "bfloat16": {"precision": "bfloat16"},
    "lora": {"lora": LORA},
    "lora-tensor": {"lora": LORA, "parallelism": {"tensor": 2}},
    "lora-pipeline": {"lora": LORA, "parallelism": {"pipeline": 2}},
}
FOUR = {
    "replicas": {"dtensor": {"data_replicas": 2}},
    "tensor-data": {"parallelism": {"tensor": 2}},
    "pipeline-tensor": {"parallelism": {"pipeline": 2, "tensor": 2}},
    "pipeline-data": {"parallelism": {"pipeline": 2}},
    "expert-data": {"parallelism": {"expert": 2}},
    "expert-tensor": {"parallelism": {"expert": 2, "tensor": 2}},
    "lora-tensor-data": {"lora": LORA, "parallelism": {"tensor": 2}},
}


def on_ranks(count, work, *arguments):
    """Run a function in processes as ranks; return their results in order."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def start(rank):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        return work(*arguments)

    # No CPUs: workers of other tests may still hold them, and all ranks must start.
    task = ray.remote(num_cpus=0)(start)
    return ray.get([task.remote(rank) for rank in range(count)], timeout=240)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a dense model and a mixture, by whether there are experts."""
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "dense": Qwen2Config(**SIZES, tie_word_embeddings=True),
        "expert": Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    }
    for name, config in configs.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in configs}


def _collect(models, ways):
    """Return what one rank collects of each layout, and what it gathers as a whole."""
    import torch.distributed as dist  # noqa: PLC0415

    from rl_models.config import PolicyConfig  # noqa: PLC0415
    from rl_models.training.dtensor import DTensorTrainingBackend  # noqa: PLC0415

    received = 0
    start = dist.batch_isend_irecv

    def counting(exchanges):
        nonlocal received
        received += sum(e.tensor.nbytes for e in exchanges if e.op is dist.irecv)
        return start(exchanges)

    dist.batch_isend_irecv = counting
    found = {}
    for way, settings in ways.items():
        model = models["expert" if "expert" in way else "dense"]
        config = PolicyConfig(model_name=model, **settings)
        backend = DTensorTrainingBackend()
        backend.setup(config.to_dict())
        if backend.model.adapters is not None:
            for number, tensor in enumerate(backend.model.trained.values()):
                torch.nn.init.constant_(tensor, 0.01 * (number + 1))
        ranks = Ranks.from_environment()

        def held(request, backend=backend):
            return backend.sharded_weights(request.precision, request.kind)

        collector = WeightCollector(ranks, held)
        kinds = ["merged"]
        if config.lora is not None:
            kinds += ["apart", "adapter"]
        for kind in kinds:
            request = WeightRequest(1, "float32", 8192, 60.0, kind)
            turns = collector.turns(request)
            request = WeightRequest(1, "float32", 8192, 60.0, kind, turns)
            received, own = 0, {}
            for bucket in collector.buckets(request):
                own |= {name: value.clone() for name, value in bucket or ()}
            if kind == "merged":
                whole = dict(backend.export_weights("float32"))
            else:
                base = kind == "apart"
                whole = dict(backend.export_adapters("float32", with_base=base))
            found[way, kind] = {
                "turns": turns,
                "own": own,
                "whole": whole,
                "received": received,
            }
    backend.shutdown()
    return found


@pytest.fixture(scope="module")
def collected(ray_cluster, models):
    """What each rank has collected, by layout and kind."""
    found = {}
    for count, ways in ((2, TWO), (4, FOUR)):
        ranks = on_ranks(count, _collect, models, ways)
        found |= {key: [each[key] for each in ranks] for key in ranks[0]}
    return found


KEYS = [
    (way, kind)
    for way in (*TWO, *FOUR)
    for kind in (("merged", "apart", "adapter") if "lora" in way else ("merged",))
]


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_each_tensor_is_whole_on_one_rank_and_bitwise_what_all_gather(collected, key):
    ranks = collected[key]
    whole = ranks[0]["whole"]
    sent = [name for rank in ranks for name in rank["own"]]
    assert sorted(sent) == sorted(whole), "each once"
    for rank in ranks:
        assert rank["turns"] == ranks[0]["turns"]
        for name, value in rank["own"].items():
            expected = whole[name]
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_ranks_send_alike_and_receive_only_what_they_lack(collected, key):
    ranks = collected[key]
    sent = [sum(v.nbytes for v in rank["own"].values()) for rank in ranks]
    total = sum(sent)
    # No rank sends more than its share plus the largest bucket.
    largest = max(8192, *(v.nbytes for v in ranks[0]["whole"].values()))
    assert max(sent) <= total / len(ranks) + largest
    for rank, own in zip(ranks, sent, strict=True):
        # The factors of an adapter are collected with its layer.
        extra = 0.35 if "lora" in key[0] and key[1] == "merged" else 0.0
        num_parts = {"replicas": 2, "expert-data": 4}.get(key[0], len(ranks))
        assert rank["received"] <= own * (1 - 1 / num_parts + extra) + 1
    if key[0] == "pipeline":
        assert [rank["received"] for rank in ranks] == [0, 0]


def _synthetic(dtype):
    """Return what one of four ranks holds: blocks, uneven rows, copies, a stage's own.

    One tensor is the sum of two parameters, of which each rank holds other rows.
    """
    rank = Ranks.from_environment().rank
    generator = torch.Generator().manual_seed(0)
    whole = {
        "blocks": torch.randn(6, 10, generator=generator),
        "rows": torch.randn(5, 3, generator=generator),
        "copied": torch.randn(4, 4, generator=generator),
        "count": torch.arange(7),
        "scale": torch.tensor(2.5),
        "low": torch.randn(7, 2, generator=generator),
        "high": torch.randn(7, 2, generator=generator),
    }
    parameters = {
        **whole,
        "left": torch.randn(8, 3, generator=generator),
        "right": torch.randn(8, 3, generator=generator),
    }
    whole["sum"] = parameters["left"] + parameters["right"]
    boxes = {
        "blocks": Box((6, 10), (3 * (rank // 2), 5 * (rank % 2)), (3, 5)),
        # As torch.chunk splits 5 rows: 2, 2, 1 and none.
        "rows": Box((5, 3), (min(2 * rank, 5), 0), (max(0, min(2, 5 - 2 * rank)), 3)),
        "copied": Box((4, 4), (2 * (rank % 2), 0), (2, 4)),
        "count": Box.whole((7,)),
        "scale": Box.whole(()),
        "low" if rank < 2 else "high": Box.whole((7, 2)),
        "left": Box((8, 3), (2 * rank, 0), (2, 3)),
        "right": Box((8, 3), (2 * (3 - rank), 0), (2, 3)),
    }
    specs = {name: tensor.to("meta") for name, tensor in whole.items()}
    weights = ShardedWeights(
        specs,
        boxes,
        lambda name: parameters[name][boxes[name].slices],
        dtype,
        sources={"sum": ("left", "right")},
        combine=lambda parts: parts[0] if len(parts) == 1 else parts[0] + parts[1],
    )
    return whole, weights


def _collect_synthetic(precision, dtype):
    from rl_models.training.process_group import (  # noqa: PLC0415
        join_process_group,
        leave_process_group,
    )

    ranks = Ranks.from_environment()
    join_process_group(ranks, 60.0)
    whole, weights = _synthetic(dtype)
    collector = WeightCollector(ranks, lambda request: weights)
    found = []
    for bucket_bytes in (1, 300, 1 << 20):
        request = WeightRequest(1, precision, bucket_bytes, 60.0)
        turns = collector.turns(request)
        for senders in (turns, ()):
            request = WeightRequest(1, precision, bucket_bytes, 60.0, turns=senders)
            own = list(collector.buckets(request))
            found.append((senders, own))
    leave_process_group()
    return whole, found


@pytest.mark.parametrize(
    ("precision", "dtype", "cast"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_blocks_uneven_rows_copies_and_stages(ray_cluster, precision, dtype, cast):
    ranks = on_ranks(4, _collect_synthetic, precision, dtype)
    whole = ranks[0][0]
    for trial in range(len(ranks[0][1])):
        turns = ranks[0][1][trial][0]
        order = []
        for number in range(len(ranks[0][1][trial][1])):
            holders = [r for r in range(4) if ranks[r][1][trial][1][number] is not None]
            assert holders == [turns[number] if turns else 0]
            for name, value in ranks[holders[0]][1][trial][1][number]:
                order.append(name)
                expected = whole[name]
                if expected.is_floating_point():
                    expected = expected.to(cast)
                    # The sending rank casts it to the generator's type.
                    value = value.to(cast) if dtype is None else value
                assert value.dtype == expected.dtype
                assert torch.equal(value, expected), name
                if turns and name in ("low", "high"):
                    assert (holders[0] < 2) == (name == "low"), "a rank that has it"
        assert order == list(whole), "in one order"


def test_parts_that_do_not_make_up_the_whole_are_refused():
    ranks = Ranks(0, 1, torch.device("cpu"))
    box = Box((4, 2), (0, 0), (3, 2))
    weights = ShardedWeights(
        {"a": torch.empty(4, 2, device="meta")}, {"a": box}, lambda name: torch.ones(3)
    )
    collector = WeightCollector(ranks, lambda request: weights)
    with pytest.raises(WeightSyncError, match=r"hold 6 numbers of a, whose.*\(4, 2\)"):
        collector.turns(WeightRequest(1))
