"""Run ranks of the backend `megatron` in its environment; results are JSON.

`python rl_models_sample_megatron.py FOLDER`, once per rank. `FOLDER/cells.json` lists
cells by name: a model, a parallelism, whether layers are recomputed. `FOLDER/MODEL` has
the model and the results of plain transformers with it; see `test_megatron.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.generation.megatron import MegatronGenerationBackend
from rl_models.training.megatron import MegatronTrainingBackend
from rl_models.training.optimizer_steps import SkippedSteps
from rl_models.types import LossInputType, LossType, SamplingParams
from rl_models.weight_request import WeightRequest
from rl_models.weights.collecting import ShardedWeights, WeightCollector


class Loss:
    """A clipped policy-gradient loss (`grpo`), or cross-entropy (`sft`)."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, data, valid_seqs, valid_toks, next_token_logprobs):
        logprobs = next_token_logprobs
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        gain = logprobs
        if self.kind == "grpo":
            ratio = (logprobs - data["old_logprobs"][:, 1:]).exp()
            weight = data["weights"][:, None]
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * weight, clipped * weight)
        loss = -(gain * mask).sum() / valid_toks
        return loss, {"loss": loss.detach()}


class LogitLoss(Loss):
    """Cross-entropy from whole logits."""

    input_type = LossInputType.LOGIT

    def __call__(self, data, valid_seqs, valid_toks, logits):
        ids = data["input_ids"][:, 1:, None]
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids)[..., 0]
        return super().__call__(data, valid_seqs, valid_toks, logprobs)


class ValueLoss(Loss):
    """Squared distance of a scalar head's outputs from given ones."""

    input_type = LossInputType.VALUE

    def __call__(self, data, valid_seqs, valid_toks, values):
        mask = torch.nn.functional.pad(data["token_mask"][:, 1:], (0, 1))
        mask = mask * data["sample_mask"][:, None]
        loss = ((values - data["old_logprobs"]).square() * mask).sum() / valid_toks
        return loss, {"loss": loss.detach()}


def config_of(cell: dict[str, Any], folder: Path) -> PolicyConfig:
    model = str(folder / cell["model"])
    return PolicyConfig(
        model_name=model,
        backend="megatron",
        head=cell.get("head", "lm"),
        precision=cell.get("precision", "float32"),
        tokenizer={"name": str(folder / "tokenizer")},
        optimizer=cell.get("optimizer")
        or {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}},
        max_grad_norm=None,
        parallelism=cell["parallelism"],
        megatron={
            "activation_checkpointing": cell.get("recompute", False),
            "distributed_optimizer": cell.get("shared", False),
            "virtual_stages": cell.get("virtual_stages", 1),
            "deadline_s": 77.0,
        },
    )


def share(backend: MegatronTrainingBackend, data: Any) -> Any:
    size = backend.layout.data_size
    rows = data.size // size
    number = backend.layout.data_rank
    return data.slice(number * rows, (number + 1) * rows)


def gradients(
    backend: MegatronTrainingBackend, data: Any, loss: Loss, micro_batch_size: int
):
    """Return loss, norm and whole gradients of a global batch, by Hugging Face name."""
    taken: dict[str, torch.Tensor] = {}
    update = backend._steps.skipped.is_finite

    def keep(norm: float) -> bool:
        for name, value in backend.model.full_gradients():
            taken[name] = value.clone()
        return False  # no step

    backend._steps.skipped.is_finite = keep
    mine = share(backend, data)
    result = backend.train_step(
        mine, loss, global_batch_size=data.size, micro_batch_size=micro_batch_size
    )
    backend._steps.skipped.is_finite = update
    return result["loss"].item(), result["grad_norm"].item(), taken


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    assert set(found) == set(expected)
    return max(
        ((found[n] - expected[n]).abs().max() / expected[n].abs().max()).item()
        for n in expected
    )


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    assert set(found) == set(expected)
    return max((found[n] - expected[n]).abs().max().item() for n in expected)


def check_collected(backend: MegatronTrainingBackend) -> dict[str, Any]:
    """Compare what ranks send in turn with what each of them gathers."""

    def held(request: WeightRequest) -> ShardedWeights:
        return backend.sharded_weights(request.precision, request.kind)

    collector = WeightCollector(backend.ranks, held)
    request = WeightRequest(1, "float32", 4096, 60.0)
    turns = collector.turns(request)
    own: dict[str, torch.Tensor] = {}
    for bucket in collector.buckets(replace(request, turns=turns)):
        own |= {name: value.clone() for name, value in bucket or ()}
    whole = dict(backend.export_weights("float32"))
    return {
        "names": list(own),
        "all": sorted(whole),
        "same": all(torch.equal(own[n], whole[n]) for n in own),
        "dtypes": all(own[n].dtype == whole[n].dtype for n in own),
    }


def measure(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    model = folder / cell["model"]
    known = torch.load(model / "expected.pt")
    data = BatchedDataDict(torch.load(folder / "batch.pt"))
    backend = MegatronTrainingBackend()
    backend.setup(config_of(cell, folder).to_dict(), init_reference_model=True)
    weights = dict(backend.export_weights("float32"))
    specs = backend.weight_specs()
    found: dict[str, Any] = {
        "same_weights": weights.keys() == known["weights"].keys()
        and all(torch.equal(weights[n], known["weights"][n]) for n in weights),
        "specs": [[n, list(v.shape)] for n, v in specs.items()]
        == [[n, list(v.shape)] for n, v in weights.items()],
    }
    found["collected"] = check_collected(backend)
    mine = share(backend, data)
    rows = share(backend, BatchedDataDict(logprobs=known["logprobs"]))["logprobs"]
    logprobs = backend.get_logprobs(mine, micro_batch_size=3)
    found["logprobs"] = (logprobs - rows).abs().max().item()
    for kind, loss in (
        ("sft", Loss("sft")),
        ("grpo", Loss("grpo")),
        ("logit", LogitLoss("sft")),
    ):
        expected = known["sft" if kind == "logit" else kind]
        value, norm, grads = gradients(backend, data, loss, micro_batch_size=2)
        found[kind] = {
            "loss": abs(value - expected["loss"]),
            "norm": abs(norm / expected["norm"] - 1),
            "gradients": relative(grads, expected["gradients"]),
        }
    for _ in range(3):
        result = backend.train_step(
            # An odd number of micro-batches of one rank.
            mine,
            Loss("sft"),
            global_batch_size=data.size,
            micro_batch_size=3,
        )
    trained = dict(backend.export_weights("float32"))
    found["weights"] = largest(trained, known["after"])
    found["metrics"] = len(result["all_mb_metrics"]["loss"])
    same = backend.get_logprobs(mine, micro_batch_size=3, reference=True)
    found["reference"] = (same - logprobs).abs().max().item()
    if cell["parallelism"].get("expert", 1) == 1:
        found["sampled"] = check_sampling(backend, config_of(cell, folder))
    found["compiled"] = sum(counters["frames"].values())
    found["eval"] = check_eval(backend, mine, data.size)
    found["deadline_s"] = None
    if dist.is_initialized():
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        found["deadline_s"] = group.options._timeout.total_seconds()
    if cell.get("resume"):
        found["resume"] = resume(cell, folder, data)
    return found


def masters(backend: MegatronTrainingBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.model.full_tensors()}


def measure_bfloat16(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with steps that are too small for bfloat16 weights."""
    known = torch.load(folder / cell["model"] / "expected.pt")
    data = BatchedDataDict(torch.load(folder / "batch.pt"))
    rate = 1e-5
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": rate}}
    config = config_of({**cell, "optimizer": sgd}, folder).to_dict()
    backend = MegatronTrainingBackend()
    backend.setup(config, init_reference_model=True)
    before = masters(backend)
    mine = share(backend, data)
    rows = share(backend, BatchedDataDict(logprobs=known["logprobs"]))["logprobs"]
    logprobs = backend.get_logprobs(mine, micro_batch_size=3)
    steps = {
        "loss_fn": Loss("sft"),
        "global_batch_size": data.size,
        "micro_batch_size": 2,
    }
    for _ in range(3):
        backend.train_step(mine, **steps)
    saved = folder / f"{cell['name']}-state"
    backend.save_checkpoint(folder / f"{cell['name']}-weights", saved)
    after = masters(backend)
    sent = dict(backend.export_weights("float32"))
    again = MegatronTrainingBackend()
    again.setup(config, optimizer_path=saved)
    resumed = masters(again)
    gradients = known["sft"]["gradients"]
    wanted = torch.cat([-3 * rate * gradients[n].flatten() for n in before])
    moved = torch.cat([(after[n] - before[n]).flatten() for n in before])
    chunks = backend.model.chunks
    dtypes = {str(p.dtype) for chunk in chunks for p in chunk.parameters()}
    same = backend.get_logprobs(mine, micro_batch_size=3, reference=True)
    return {
        "collected": check_collected(backend),
        "same_weights": all(
            torch.equal(before[n], known["weights"][n]) for n in before
        ),
        "logprobs": (logprobs - rows).abs().max().item(),
        "moved": (torch.linalg.norm(moved - wanted) / torch.linalg.norm(wanted)).item(),
        "dtypes": sorted(dtypes),
        "sent": all(torch.equal(sent[n], after[n].bfloat16()) for n in after),
        "resumed": all(torch.equal(after[n], resumed[n]) for n in after),
        "reference": torch.equal(same, logprobs),
    }


def measure_head(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    known = torch.load(folder / cell["model"] / f"{cell['head']}.pt")
    data = BatchedDataDict(torch.load(folder / "batch.pt"))
    backend = MegatronTrainingBackend()
    backend.setup(config_of(cell, folder).to_dict())
    mine = share(backend, data)
    rows = share(backend, BatchedDataDict(values=known["values"]))["values"]
    values = backend.get_values(mine, micro_batch_size=3)
    loss = ValueLoss("value")
    value, norm, grads = gradients(backend, data, loss, micro_batch_size=2)
    found = {
        "values": (values - rows).abs().max().item(),
        "loss": abs(value / known["loss"] - 1),
        "norm": abs(norm / known["norm"] - 1),
        "gradients": relative(grads, known["gradients"]),
    }
    for _ in range(3):
        backend.train_step(mine, loss, global_batch_size=data.size, micro_batch_size=2)
    trained = dict(backend.export_weights("float32"))
    found["weights"] = largest(trained, known["after"])
    saved = folder / f"{cell['name']}-saved"
    backend.save_checkpoint(saved / "weights", saved / "state")
    after = backend.get_values(mine, micro_batch_size=3)
    for paths in ((saved / "weights", None), (None, saved / "state")):
        again = MegatronTrainingBackend()
        again.setup(
            config_of(cell, folder).to_dict(),
            weights_path=paths[0],
            optimizer_path=paths[1],
        )
        found["resumed"] = found.get("resumed", True) and torch.equal(
            again.get_values(mine, micro_batch_size=3), after
        )
    return found


def check_sampling(
    backend: MegatronTrainingBackend, config: PolicyConfig
) -> dict[str, Any]:
    """Sample with the trainer's weights, and a copy of them, from the same seeds."""
    settings = {"max_new_tokens": 6, "stop_token_ids": [3], "temperature": 1.3}
    names = {"model_name": config.model_name, "tokenizer_name": config.tokenizer.name}
    own = MegatronGenerationBackend()
    own.setup({**settings, "backend": "megatron"}, trainer=backend, **names)
    copied = HuggingFaceGenerationBackend()
    copied.setup({**settings, "backend": "huggingface"}, **names)
    copied.load_weights(backend.export_weights("float32"), 3)
    assert own.load_weights(iter(()), 3) == 3
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(4, 28, (5, 7), generator=generator)
    order = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4])
    lengths = torch.tensor([7, 4, 7, 2, 4])[order]
    ids = prompts[order] * (torch.arange(7) < lengths[:, None])
    rows = {"input_ids": ids, "input_lengths": lengths, "seeds": torch.arange(9)}
    results: dict[str, Any] = {}
    decoder, batches = own._sampler.decoder, []
    begin = decoder.begin

    def counted(lengths, max_new_tokens, **settings):
        batches.append(len(lengths))
        return begin(lengths, max_new_tokens, **settings)

    decoder.begin = counted
    for name, greedy in (("drawn", False), ("greedy", True)):
        mine = own.generate(BatchedDataDict(dict(rows)), greedy=greedy)
        other = copied.generate(BatchedDataDict(dict(rows)), greedy=greedy)
        results[name] = {
            "tokens": mine["output_ids"].tolist(),
            "same": torch.equal(mine["output_ids"], other["output_ids"]),
            "logprobs": (mine["logprobs"] - other["logprobs"]).abs().max().item(),
            "version": mine["weight_version"].unique().tolist(),
        }
    # At temperature 1 they equal the trainer's for the same rows.
    drawn = own.generate(
        BatchedDataDict(dict(rows)), sampling=SamplingParams(1.0, 1.0, None)
    )
    sequences = BatchedDataDict(
        input_ids=drawn["output_ids"], input_lengths=drawn["unpadded_sequence_lengths"]
    )
    known = backend.get_logprobs(sequences, micro_batch_size=4)
    sampled = drawn["logprobs"] != 0
    results["batches"] = batches
    results["trainer"] = (known - drawn["logprobs"])[sampled].abs().max().item()
    own.shutdown()
    return results


def check_eval(
    backend: MegatronTrainingBackend, mine: Any, global_batch_size: int
) -> bool:
    """Check that evaluating the loss changes nothing, and a bad gradient no weight."""
    before = dict(backend.export_weights("float32"))
    before = {n: v.clone() for n, v in before.items()}
    looked = backend.train_step(
        mine,
        Loss("sft"),
        eval_mode=True,
        global_batch_size=global_batch_size,
        micro_batch_size=4,
    )
    bad = BatchedDataDict(dict(mine))
    bad["sample_mask"] = mine["sample_mask"] * float("inf")
    backend._steps.skipped = SkippedSteps(1)
    skipped = backend.train_step(
        bad, Loss("sft"), global_batch_size=global_batch_size, micro_batch_size=4
    )
    after = dict(backend.export_weights("float32"))
    return (
        looked["grad_norm"].item() == 0.0
        and not torch.isfinite(skipped["grad_norm"]).any()
        and all(torch.equal(before[n], after[n]) for n in before)
    )


def resume(cell: dict[str, Any], folder: Path, data: Any) -> dict[str, Any]:
    """Resume from a checkpoint, and compare with the uninterrupted run."""
    name = cell["resume"]
    weights, state = folder / f"{name}-weights", folder / f"{name}-state"
    adam = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}
    config = config_of({**cell, "optimizer": adam}, folder).to_dict()
    backend = MegatronTrainingBackend()
    backend.setup(config)
    mine = share(backend, data)
    steps = {
        "loss_fn": Loss("sft"),
        "global_batch_size": data.size,
        "micro_batch_size": 2,
    }
    backend.train_step(mine, **steps)
    saved = {n: v.clone() for n, v in backend.export_weights("float32")}
    backend.save_checkpoint(weights, state)
    first = backend.train_step(mine, **steps)
    kept = {n: v.clone() for n, v in backend.export_weights("float32")}
    again = MegatronTrainingBackend()
    again.setup(config, optimizer_path=state)
    second = again.train_step(mine, **steps)
    continued = {n: v.clone() for n, v in again.export_weights("float32")}
    again.load_checkpoint(weights)
    from_folder = dict(again.export_weights("float32"))
    if backend.ranks.is_first:
        torch.save(kept, folder / f"{name}-after.pt")
    return {
        "loss": first["loss"].item() == second["loss"].item(),
        "weights": all(torch.equal(kept[n], continued[n]) for n in kept),
        "folder": all(torch.equal(saved[n], from_folder[n]) for n in saved),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cells = json.loads((folder / "cells.json").read_text())
    found = {}
    for name, cell in cells.items():
        kind = measure_bfloat16 if "precision" in cell else measure
        found[name] = (measure_head if "head" in cell else kind)(cell, folder)
    rank = os.environ.get("RANK", "0")
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
