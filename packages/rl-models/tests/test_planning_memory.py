"""The plan's memory against allocations of a real training backend on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_models_live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.config import OptimizerConfig, PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.lora_config import LoRAConfig
from rl_models.planning.adapter_shape import AdapterShape
from rl_models.planning.generator import plan_sync
from rl_models.planning.layouts import Layout
from rl_models.planning.memory import model_memory
from rl_models.planning.model_shape import ModelShape, shape_of_config
from rl_models.planning.phases import OtherModel, plan_phases
from rl_models.planning.rank_memory import (
    MicroBatch,
    ModelMemory,
    RankWork,
    optimizer_copies,
    optimizer_work,
)
from rl_models.training.dtensor import DTensorTrainingBackend

_TOLERANCE = 0.05
_ROWS, _WIDTH = 4, 96
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 3000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_AT_ONCE = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "foreach": True}}
_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "small vocabulary": ("llama", {"vocab_size": 300}, {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma": ("gemma", {}, {}),
    "mixtral": ("mixtral", _MOE, {}),
    "bfloat16": ("llama", {}, {"precision": "bfloat16"}),
    "recomputed": ("llama", {}, {"dtensor": {"activation_checkpointing": True}}),
    "adapters": ("llama", {}, {"lora": {"r": 8}}),
    "adapters and ends": (
        "llama",
        {},
        {"lora": {"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]}},
    ),
    "adapters in bfloat16": ("qwen3", {}, {"lora": {"r": 8}, "precision": "bfloat16"}),
    "updated at once": ("llama", {}, {"optimizer": _AT_ONCE}),
    "temperature": (
        "llama",
        {},
        {"generation": {"max_new_tokens": 8, "temperature": 0.7}},
    ),
}


def backend_of(folder: Path, case: str) -> tuple[DTensorTrainingBackend, ModelShape]:
    family, sizes, settings = _CASES[case]
    config = AutoConfig.for_model(family, **{**_SIZES, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    policy = PolicyConfig.from_dict(
        {
            "model_name": str(folder),
            "max_total_sequence_length": _WIDTH,
            "train_micro_batch_size": _ROWS,
            **settings,
        }
    )
    backend = DTensorTrainingBackend()
    backend.setup(policy.to_dict())
    return backend, shape_of_config(read_model_config(folder) or {}, case)


def batch_of(num_rows: int, vocab_size: int) -> BatchedDataDict[Any]:
    """Return rows in which every token is trained on."""
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, vocab_size, (num_rows, _WIDTH)),
            "input_lengths": torch.full((num_rows,), _WIDTH),
            "token_mask": torch.ones(num_rows, _WIDTH),
            "sample_mask": torch.ones(num_rows),
        }
    )


def measured_step(
    backend: DTensorTrainingBackend, shape: ModelShape, loss_fn: Any, num_rows: int
) -> int:
    """Return the peak of a second step, beyond weights and optimizer state."""
    data = batch_of(num_rows, shape.vocab_size)
    backend.train_step(
        data, loss_fn, global_batch_size=num_rows, micro_batch_size=_ROWS
    )
    with LiveBytes(list(backend.model.parameters.values())) as live:
        backend.train_step(
            data, loss_fn, global_batch_size=num_rows, micro_batch_size=_ROWS
        )
    return live.peak


def planned(
    backend: DTensorTrainingBackend, shape: ModelShape, num_micro_batches: int
) -> ModelMemory:
    tokens = _ROWS * (_WIDTH - 1)  # a row's last one is only a target
    part = MicroBatch(tokens, tokens)
    return model_memory(
        shape,
        backend.config,
        Layout(),
        RankWork(part, part, num_micro_batches, on_gpu=False),
    )


def working(memory: ModelMemory) -> int:
    return memory.training - memory.resident


@pytest.mark.parametrize("case", _CASES)
def test_a_training_step_needs_what_was_planned(
    tmp_path: Path, nll_loss: Any, case: str
) -> None:
    backend, shape = backend_of(tmp_path, case)
    several = measured_step(backend, shape, nll_loss, 3 * _ROWS)
    memory = planned(backend, shape, 3)
    states = [t for s in backend._steps.optimizer.state.values() for t in s.values()]
    weights = list(backend.model.parameters.values())
    assert memory.weights == sum(w.nbytes for w in weights)
    assert memory.optimizer == sum(s.nbytes for s in states if s.ndim)
    # Earlier micro-batches' gradients exist at the next one's peak.
    assert working(memory) == pytest.approx(several, rel=_TOLERANCE)
    one = measured_step(backend, shape, nll_loss, _ROWS)
    assert one <= working(planned(backend, shape, 1)) * (1 + _TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "bfloat16", "temperature"])
def test_log_probs_need_no_more_than_planned(tmp_path: Path, case: str) -> None:
    backend, shape = backend_of(tmp_path, case)
    data = batch_of(2 * _ROWS, shape.vocab_size)
    with LiveBytes(list(backend.model.parameters.values())) as live:
        backend.get_logprobs(data, micro_batch_size=_ROWS)
    memory = planned(backend, shape, 1)
    # Beyond these there are only the exponentials inside one torch operation.
    inside = 4 * shape.vocab_size * _ROWS * (_WIDTH - 1)
    needed = memory.passing - memory.resident
    assert live.peak <= needed
    assert needed - inside <= 1.5 * live.peak


@pytest.mark.parametrize(
    ("name", "kwargs", "copies", "known"),
    [
        ("torch.optim.AdamW", {}, 2, True),
        ("torch.optim.AdamW", {"amsgrad": True}, 3, True),
        ("torch.optim.SGD", {}, 0, True),
        ("torch.optim.SGD", {"momentum": 0.9}, 1, True),
        ("torch.optim.RMSprop", {"momentum": 0.9, "centered": True}, 3, True),
        ("torch.optim.Adagrad", {}, 1, True),
        ("somewhere.Lion", {}, 2, False),
    ],
)
def test_the_state_of_optimizers(
    name: str, kwargs: dict[str, Any], copies: int, known: bool
) -> None:
    config = OptimizerConfig(name=name, kwargs={"lr": 1e-3, **kwargs})
    assert optimizer_copies(config) == (copies, known)
    if not known:
        return
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = getattr(torch.optim, name.rpartition(".")[2])([weight], **config.kwargs)
    weight.sum().backward()
    optimizer.step()
    states = optimizer.state[weight].values()
    assert sum(s.numel() for s in states if torch.is_tensor(s) and s.ndim) == (
        copies * 1000
    )


def test_parameters_that_are_updated_at_once_take_more(
    tmp_path: Path, nll_loss: Any
) -> None:
    """With so few rows that the optimizer step takes the most memory."""
    backend, shape = backend_of(tmp_path, "updated at once")
    data = batch_of(1, shape.vocab_size).slice(0, 1)
    weights = list(backend.model.parameters.values())
    for name in ("input_ids", "token_mask"):
        data[name] = data[name][:, :8]
    data["input_lengths"] = torch.tensor([8])
    sizes = {"global_batch_size": 1, "micro_batch_size": 1}
    backend.train_step(data, nll_loss, **sizes)
    with LiveBytes(weights) as live:
        backend.train_step(data, nll_loss, **sizes)
    part = MicroBatch(7, 7)
    memory = model_memory(
        shape, backend.config, Layout(), RankWork(part, part, 1, on_gpu=False),
    )  # fmt: skip
    assert working(memory) == pytest.approx(live.peak, rel=_TOLERANCE)
    assert working(memory) == pytest.approx(2 * memory.weights, rel=_TOLERANCE)


@pytest.mark.parametrize(
    ("kwargs", "on_gpu", "at_once"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"fused": True}, True, False),
        ({"foreach": False}, True, False),
        ({"foreach": True}, False, True),
    ],
)
def test_when_an_optimizer_updates_all_parameters_at_once(
    kwargs: dict[str, Any], on_gpu: bool, at_once: bool
) -> None:
    config = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3, **kwargs})
    assert optimizer_work(config, 10, on_gpu=on_gpu) == (40 if at_once else 0)
    plain = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1e-3, **kwargs})
    assert optimizer_work(plain, 10, on_gpu=on_gpu) == 0


def test_data_parallel_ranks_share_weights_state_and_reduced_gradients() -> None:
    sizes = {**_SIZES, "model_type": "llama", "vocab_size": 300}
    shape = shape_of_config(sizes, "m")
    policy = PolicyConfig(
        model_name="m", max_total_sequence_length=64, dtensor={"shard_layers": True}
    )

    def on(
        layout: Layout, num_micro_batches: int = 1, policy: PolicyConfig = policy
    ) -> ModelMemory:
        part = MicroBatch(64, 64)
        return model_memory(
            shape, policy, layout, RankWork(part, part, num_micro_batches, on_gpu=True),
        )  # fmt: skip

    alone, four = on(Layout()), on(Layout(data=4))
    assert four.weights == pytest.approx(alone.weights / 4, rel=1e-3)
    assert four.optimizer == 2 * four.weights
    assert four.gradients < alone.gradients < on(Layout(data=4), 2).gradients
    reduced = PolicyConfig.from_dict(
        {
            **policy.to_dict(),
            "dtensor": {"shard_layers": True, "reduce_each_micro_batch": True},
        }
    )
    assert on(Layout(data=4), 2, reduced).gradients == four.gradients
    assert 0 < four.gathered < alone.weights
    replicated = on(Layout(data=4, replicas=2))
    assert replicated.weights == pytest.approx(alone.weights / 2, rel=1e-3)
    cut = on(Layout(tensor=2))
    assert cut.weights == pytest.approx(alone.weights / 2, rel=0.01)
    assert cut.logits == alone.logits // 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_vocabulary_that_ranks_do_not_divide_is_gathered_whole(
    precision: str, *, recomputes: bool
) -> None:
    policy = PolicyConfig.from_dict(
        {
            "model_name": "m",
            "max_total_sequence_length": 64,
            "precision": precision,
            "dtensor": {
                "shard_layers": True,
                "activation_checkpointing": recomputes,
            },
        }
    )

    def on(layout: Layout, vocab_size: int) -> ModelMemory:
        sizes = {**_SIZES, "model_type": "llama", "vocab_size": vocab_size}
        part = MicroBatch(64, 64)
        work = RankWork(part, part, 1, on_gpu=True)
        return model_memory(shape_of_config(sizes, "m"), policy, layout, work)

    each = 2 if precision == "bfloat16" else 4
    hidden = int(_SIZES["hidden_size"])
    for layout in (Layout(tensor=2), Layout(data=2, tensor=2)):
        cut, whole = on(layout, 3000), on(layout, 3001)
        # A single rank converts the head alone; others gather the embedding, too.
        tables = 2 if layout.data > 1 else int(precision == "bfloat16")
        more = tables * each * hidden * (3001 - 1500)
        assert whole.gathered - cut.gathered == more


def test_a_teacher_works_in_a_phase_of_its_own() -> None:
    policy = PolicyConfig(model_name="m", max_total_sequence_length=64)
    part = MicroBatch(256, 256)

    def on(layers: int, *, is_trained: bool) -> ModelMemory:
        sizes = {**_SIZES, "model_type": "llama", "num_hidden_layers": layers}
        work = RankWork(part, part, 1, on_gpu=True, is_trained=is_trained)
        shape = shape_of_config(sizes, "m")
        return model_memory(shape, policy, Layout(data=2), work)

    student, teacher = on(1, is_trained=True), on(40, is_trained=False)
    plan = plan_phases(student, [OtherModel("teacher", teacher)])
    phases = {phase.name: phase for phase in plan.phases}
    assert phases["teacher"].total == student.resident + teacher.passing
    assert phases["train"].parts["teacher"] == teacher.resident < teacher.passing
    reference = plan_phases(student, [OtherModel("reference model", teacher)])
    assert "teacher" not in {phase.name for phase in reference.phases}


def test_buckets_hold_the_experts_of_a_layer() -> None:
    shape = shape_of_config(
        {**_SIZES, **_MOE, "model_type": "mixtral", "vocab_size": 64}, "m"
    )
    config = GenerationConfig.from_dict(
        {"max_new_tokens": 8, "weight_sync": {"bucket_bytes": 1024}}
    )
    largest = 2 * 4 * 384 * 128
    assert shape.largest_tensor == largest
    found = plan_sync(shape, config, num_nodes=1).bucket_bytes
    assert found == 3 * 4 * largest


def test_tensor_parallel_ranks_cut_one_matrix_of_each_adapter() -> None:
    shape = shape_of_config({**_SIZES, "model_type": "llama"}, "m")
    adapters = AdapterShape(shape, LoRAConfig(r=4, target_modules=["q_proj", "o_proj"]))
    assert adapters.num_parameters == 4 * 4 * 2 * (128 + 128)
    cut = adapters.parameters_of_rank(Layout(tensor=2))
    assert cut == 4 * 4 * 2 * (128 + 64)
    assert adapters.saved_per_token == 2 * 4


def test_logits_in_chunks_are_counted_as_such() -> None:
    shape = shape_of_config(
        {**_SIZES, "model_type": "llama", "vocab_size": 150_000}, "m"
    )

    def logits(
        num_positions: int, asked: int | None, *, on_gpu: bool = False, **settings: Any
    ) -> int:
        policy = PolicyConfig(
            model_name="m",
            max_total_sequence_length=64,
            dtensor={"logprob_chunk_size": asked},  # type: ignore[arg-type]
        )
        part = MicroBatch(num_positions, num_positions)
        return model_memory(
            shape, policy, Layout(), RankWork(part, part, 1, on_gpu, **settings)
        ).logits  # fmt: skip

    whole = logits(8192, 0)
    assert logits(8192, 64) == whole // 128
    assert logits(8192, None) < whole // 32
    assert whole // 32 < logits(8192, None, on_gpu=True) < whole // 4
    assert logits(8192, None, keeps_logits=True) == whole
    assert logits(1024, None) == whole // 8
