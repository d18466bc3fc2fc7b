"""`rl plan`: memory, batches and layouts of a run, from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_cli.gpus import GpusType
from rl_cli.main import _run

NARROW = 80
_MODEL = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
_SAVING = (
    "policy.precision=bfloat16",
    "policy.generation.precision=bfloat16",
    "policy.generation.backend=vllm",
    "policy.generation.vllm.enable_sleep_mode=true",
    "policy.train_micro_batch_size=1",
    "policy.logprob_batch_size=1",
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL))
    return tmp_path


def arguments(model: Path, *more: str, algorithm: str = "grpo") -> list[str]:
    length = "policy.max_total_sequence_length=2048"
    return ["plan", algorithm, f"policy.model_name={model}", length, *more]


Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *words: str, code: int = 0) -> list[dict[str, Any]]:
    assert _run([*words, "--json"], False) == code
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == (None if "--gpus" not in words else code == 0)
    stages: list[dict[str, Any]] = found["stages"]
    return stages


def refused(capsys: Capture, *words: str) -> str:
    assert _run(list(words), False) == 2
    return capsys.readouterr().err


def printed(capsys: Capture, *words: str) -> str:
    """Return what is printed for people, on one line."""
    assert _run(list(words), False) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_stage_of_a_recipe_is_planned(capsys: Capture) -> None:
    warmup, grpo = planned(capsys, "plan", "quickstart")
    assert (warmup["stage"], grpo["stage"]) == ("warmup", "grpo")
    assert warmup["parameters"] == grpo["parameters"] == 124_800
    assert grpo["samples"] == 512
    assert grpo["optimizer_steps"] == 1
    assert "log-probs" in grpo["memory"]
    assert "log-probs" not in warmup["memory"]


def test_tables_fit_a_narrow_terminal(model: Path, capsys: Capture) -> None:
    assert _run(arguments(model, "--gpus", "8x80GB"), False) == 2
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    copied = [line for line in lines if "=bfloat16" in line and line.startswith("  ")]
    assert all(len(line) <= NARROW for line in lines if line not in copied)
    assert "7.62 billion parameters" in printed.out
    assert "Error: grpo does not fit: train needs" in printed.err


def test_settings_that_make_it_fit_do(model: Path, capsys: Capture) -> None:
    (before,) = planned(capsys, *arguments(model, "--gpus", "8x80GB"), code=2)
    assert not before["fits"]
    assert "policy.precision=bfloat16" in before["remedies"]
    words = arguments(model, *before["remedies"], "--gpus", "8x80GB")
    (after,) = planned(capsys, *words)
    assert after["fits"]
    peak = max(phase["together"] for phase in after["memory"].values())
    assert peak <= after["usable_bytes"]


def test_settings_of_megatron_make_it_fit(model: Path, capsys: Capture) -> None:
    cut = ("policy.parallelism.tensor=2", "policy.parallelism.sequence=true")
    words = arguments(model, "policy.backend=megatron", *cut, "--gpus", "8x80GB")
    (before,) = planned(capsys, *words, code=2)
    found = before["remedies"]
    assert "policy.megatron.distributed_optimizer=true" in found
    assert not any("dtensor" in text for text in found)
    (after,) = planned(capsys, *words, *found)
    assert after["fits"]


def test_a_generator_too_large_for_a_gpu_is_shared(
    model: Path, capsys: Capture
) -> None:
    words = arguments(model, *_SAVING, "--gpus", "8x24GB")
    (plan,) = planned(capsys, *words, code=2)
    shared = "policy.generation.vllm.tensor_parallel_size=2"
    assert plan["generator"]["rows_at_once"] == 0
    assert _run([*words, "policy.parallelism.tensor=4", shared], False) in (0, 2)
    wider = capsys.readouterr().out
    assert "0 of" not in wider.split("sampling", 1)[1].splitlines()[0]
    assert _run(words, False) == 2
    assert shared in capsys.readouterr().out


def test_more_ranks_share_weights_and_state(model: Path, capsys: Capture) -> None:
    (two,) = planned(capsys, *arguments(model, "cluster.workers_per_node=2"))
    (eight,) = planned(capsys, *arguments(model, "cluster.workers_per_node=8"))
    for part in ("weights", "optimizer state", "reference model"):
        shares = [plan["memory"]["train"][part] for plan in (two, eight)]
        assert shares[0] == pytest.approx(4 * shares[1], rel=1e-6)
    for plan in (two, eight):
        # Each rank reads what it keeps.
        for part in ("weights", "reference model"):
            assert plan["memory"]["start"][part] == plan["memory"]["train"][part]
    assert (two["rows_per_rank"], eight["rows_per_rank"]) == (128, 32)


def test_a_reference_is_kept_only_where_it_is_compared_with(
    model: Path, capsys: Capture
) -> None:
    off = "loss_fn.reference_policy_kl_penalty=0"
    (plan,) = planned(capsys, *arguments(model, off))
    assert all("reference model" not in phase for phase in plan["memory"].values())
    (plan,) = planned(capsys, *arguments(model, algorithm="dpo"))
    assert "reference model" not in plan["memory"]["train"]
    keep = "dpo.precompute_reference_logprobs=false"
    (plan,) = planned(capsys, *arguments(model, keep, algorithm="dpo"))
    assert plan["memory"]["train"]["reference model"] > 0
    assert plan["weight_sync"] is None


def test_adapters_need_no_second_model_and_little_state(
    model: Path, capsys: Capture
) -> None:
    (whole,) = planned(capsys, *arguments(model))
    (plan,) = planned(capsys, *arguments(model, "policy.lora={r: 8}"))
    # 8 x (inputs + outputs) of the seven linear layers of each of 28 layers.
    layer = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert plan["trained_parameters"] == 28 * 8 * layer == 20_185_088
    assert whole["trained_parameters"] == whole["parameters"]
    for phase in plan["memory"].values():
        assert "reference model" not in phase
    before, after = whole["memory"]["train"], plan["memory"]["train"]
    assert after["optimizer state"] < before["optimizer state"] / 300
    assert after["gradients"] < before["gradients"] / 100
    assert plan["weight_sync"]["bytes"] == whole["weight_sync"]["bytes"]
    words = arguments(model, "policy.lora={r: 8, sync: adapter}")
    (apart,) = planned(capsys, *words)
    assert apart["weight_sync"]["bytes"] < plan["weight_sync"]["bytes"] / 300
    assert _run(words, False) == 0
    assert "20.2 million of adapters trained" in capsys.readouterr().out


def test_a_critic_trains_in_a_phase_of_its_own(model: Path, capsys: Capture) -> None:
    (plan,) = planned(capsys, *arguments(model, algorithm="ppo"))
    assert plan["memory"]["train critic"]["critic"] > plan["memory"]["train"]["critic"]
    assert plan["optimizer_steps"] == 4  # epochs over one batch


def test_a_sleeping_generator_leaves_its_memory(model: Path, capsys: Capture) -> None:
    words = arguments(model, *_SAVING, "--gpus", "8x80GB")
    (sleeping,) = planned(capsys, *words)
    assert "key-value cache" not in sleeping["memory"]["train"]
    assert sleeping["generator"]["rows_at_once"] > 0
    awake = "policy.generation.vllm.enable_sleep_mode=false"
    words = arguments(model, *_SAVING, awake, "--gpus", "8x80GB")
    assert _run([*words, "--json"], False) in (0, 2)
    (plan,) = json.loads(capsys.readouterr().out)["stages"]
    assert plan["memory"]["train"]["key-value cache"] > 0


def test_a_trainer_that_samples_keeps_no_second_copy(
    model: Path, capsys: Capture
) -> None:
    words = ["policy.backend=megatron", "cluster.workers_per_node=4"]
    words += ["policy.parallelism.tensor=2", "policy.generation.max_new_tokens=64"]
    apart, own = (
        planned(capsys, *arguments(model, *words, f"policy.generation.backend={name}"))
        for name in ("huggingface", "megatron")
    )
    assert apart[0]["weight_sync"] is not None
    assert own[0]["weight_sync"] is None
    cache = [stage["generator"]["cache_bytes_per_token"] for stage in (*apart, *own)]
    assert cache[1] == cache[0] // 2  # for two ranks that share each layer
    assert "generator weights" in apart[0]["memory"]["train"]
    assert "generator weights" not in own[0]["memory"]["train"]


def test_copies_of_megatron_are_whole_and_its_layouts_its_own(
    model: Path, capsys: Capture
) -> None:
    words = arguments(model, "cluster.workers_per_node=4", algorithm="sft")
    (shared,) = planned(capsys, *words)
    (copied,) = planned(capsys, *words, "policy.backend=megatron")
    for name in ("weights", "optimizer state"):
        whole = copied["memory"]["train"][name]
        assert whole == pytest.approx(4 * shared["memory"]["train"][name], rel=0.01)
    axes = {axis for other in copied["layouts"] for axis in other["cannot_run"]}
    assert "pipeline" not in axes
    assert "context" in axes


def test_ranks_load_their_parts_of_the_model(model: Path, capsys: Capture) -> None:
    words = arguments(model, "cluster.workers_per_node=4", algorithm="sft")
    (plan,) = planned(capsys, *words)
    assert plan["host_bytes"] == pytest.approx(4 * plan["parameters"], rel=0.01)


def test_a_file_without_stages_is_told_apart_from_a_recipe(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {model_name: some/model}\n")
    message = refused(capsys, "plan", str(file), "algorithm=grpo")
    assert "is not a recipe, as it has no stages" in message
    assert f"rl train ALGORITHM --config {file}" in message


def test_a_generator_of_its_own_shares_no_device(model: Path, capsys: Capture) -> None:
    split = ("--gpus", "8x141GB", "--generator-gpus", "4")
    (plan,) = planned(capsys, *arguments(model, *_SAVING, *split))
    assert "weights" not in plan["memory"]["generate"]
    assert "generator weights" not in plan["memory"]["train"]
    assert plan["layout"]["data"] == 4
    said = printed(capsys, *arguments(model, *_SAVING, *split))
    assert "cluster.workers_per_node=4 generation_cluster.num_nodes=1" in said
    assert "generation_cluster.workers_per_node=4" in said
    # The section says the same, and alone it names the ranks of both.
    section = "generation_cluster.workers_per_node=4"
    (same,) = planned(capsys, *arguments(model, *_SAVING, section, *split[:2]))
    # Only the sections to set differ.
    assert {**same, "remarks": []} == {**plan, "remarks": []}
    ranks = (section, "cluster.workers_per_node=2")
    (plan,) = planned(capsys, *arguments(model, *_SAVING, *ranks))
    assert plan["layout"]["data"] == 2
    assert "generator weights" not in plan["memory"]["train"]
    words = arguments(model, *_SAVING, section, *split[:2])
    assert "to run it so" not in printed(capsys, *words)
    words = arguments(model, "--gpus", "4x80GB", section)
    assert "generation_cluster must leave some of the 4" in refused(capsys, *words)
    words = arguments(model, "--gpus", "8x80GB", "--generator-gpus", "8")
    assert "must leave some of the 8 GPUs" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("gpus", "ranks", "trainer", "generator"),
    [
        ("2x8x80GB", 12, (1, 4), (3, 4)),
        ("8x80GB", 6, (1, 2), (1, 6)),
        ("4x8x80GB", 16, (2, 8), (2, 8)),
    ],
)
def test_advised_sections_fit_the_nodes(
    model: Path,
    capsys: Capture,
    gpus: str,
    ranks: int,
    trainer: tuple[int, int],
    generator: tuple[int, int],
) -> None:
    words = arguments(model, *_SAVING, "--gpus", gpus, "--generator-gpus", str(ranks))
    assert _run([*words, "--json"], False) in (0, 2)
    (plan,) = json.loads(capsys.readouterr().out)["stages"]
    (said,) = [line for line in plan["remarks"] if line.startswith("to run it so")]
    assert said.split("set ")[1].split() == [
        f"{section}.{key}={number}"
        for section, numbers in (
            ("cluster", trainer),
            ("generation_cluster", generator),
        )
        for key, number in zip(("num_nodes", "workers_per_node"), numbers, strict=True)
    ]


def test_weights_go_to_a_generator_on_other_nodes(model: Path, capsys: Capture) -> None:
    apart = "generation_cluster.workers_per_node=8"

    def transport(*words: str) -> str:
        assert _run([*arguments(model, *_SAVING, *words), "--json"], False) in (0, 2)
        (plan,) = json.loads(capsys.readouterr().out)["stages"]
        return str(plan["weight_sync"]["transport"])

    two, one = ("--gpus", "2x8x80GB"), ("--gpus", "8x80GB")
    assert transport(*two, "--generator-gpus", "8") == "object_store"
    assert transport(*two, apart) == "object_store"
    assert transport(apart, "cluster.workers_per_node=8") == "object_store"
    split = ("cluster.num_nodes=2", "cluster.workers_per_node=8")
    assert transport(*split, "--generator-gpus", "8") == "object_store"
    assert transport(*one, "--generator-gpus", "4") == "shared_memory"
    assert transport("cluster.workers_per_node=8") == "shared_memory"


def test_a_generator_apart_that_cannot_start_is_refused(
    model: Path, capsys: Capture
) -> None:
    own = ("cluster.workers_per_node=6", "generation_cluster.workers_per_node=2")
    shared = "policy.generation.vllm.tensor_parallel_size=4"
    words = arguments(model, *_SAVING, *own, shared, "--gpus", "8x141GB")
    told = refused(capsys, *words)
    assert "tensor_parallel_size must divide the ranks that sample (gener" in told
    assert "got 4 with 2" in told
    wide = "generation_cluster.workers_per_node=16"
    told = refused(capsys, *arguments(model, wide, "--gpus", "3x8x80GB"))
    assert "workers_per_node must not exceed the GPUs of a node: got 16" in told


def test_a_generator_apart_is_shared_by_its_own_ranks(
    model: Path, capsys: Capture
) -> None:
    words = arguments(model, *_SAVING, "--generator-gpus", "2", "--gpus", "5x24GB")
    assert _run([*words, "grpo.num_prompts_per_step=48"], False) == 2
    advised = capsys.readouterr().out
    # The trainer has 3 ranks, which would allow no replica of two.
    assert "policy.generation.vllm.tensor_parallel_size=2" in advised


def test_a_layout_that_cannot_be_run_yet_is_marked(
    model: Path, capsys: Capture
) -> None:
    words = arguments(model, *_SAVING, "--gpus", "8x80GB")
    (plan,) = planned(capsys, *words)
    assert plan["layouts"][0]["layout"] == plan["layout"]
    assert plan["layouts"][0]["cannot_run"] == []
    assert len(plan["layouts"]) > 1
    for other in plan["layouts"]:
        sizes = other["layout"]
        beside = sizes["pipeline"] > 1 and sizes["context"] > 1
        assert other["cannot_run"] == ["pipeline"] * beside


def test_a_plan_of_a_layout_that_cannot_be_run_is_refused(
    model: Path, capsys: Capture
) -> None:
    sizes = ("policy.parallelism.pipeline=2", "policy.parallelism.context=2")
    words = arguments(model, *_SAVING, "--gpus", "8x80GB", *sizes)
    assert _run([*words, "--json"], False) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["fits"], found["stages"][0]["fits"]) == (False, True)
    assert found["stages"][0]["cannot_run"] == ["pipeline"]
    said = "cannot run: dtensor does not support pipeline in the layout data 2, pipe"
    assert said in captured.err


def test_tensor_parallel_ranks_share_layers(model: Path, capsys: Capture) -> None:
    words = arguments(model, *_SAVING, "--gpus", "8x80GB")
    (whole,) = planned(capsys, *words)
    (cut,) = planned(capsys, *words, "policy.parallelism.tensor=2")
    assert (cut["layout"]["data"], cut["layout"]["tensor"]) == (4, 2)
    assert cut["rows_per_rank"] == 2 * whole["rows_per_rank"]
    start = [plan["memory"]["start"]["weights"] for plan in (whole, cut)]
    assert start[1] == pytest.approx(start[0], rel=0.01)


def test_context_parallel_ranks_share_tokens_and_weights(
    model: Path, capsys: Capture
) -> None:
    words = arguments(model, *_SAVING, "--gpus", "8x80GB")
    (whole,) = planned(capsys, *words)
    (cut,) = planned(capsys, *words, "policy.parallelism.context=2")
    assert (cut["layout"]["data"], cut["layout"]["context"]) == (4, 2)
    assert cut["rows_per_rank"] == 2 * whole["rows_per_rank"]
    assert cut["memory"]["start"]["weights"] == whole["memory"]["start"]["weights"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["policy.parallelism.context=8"],
            "context must divide the model's 28 attention heads, of which a rank has "
            "28: got 8; use 4 or 7",
        ),
        (
            ["policy.parallelism.pipeline=8"],
            "pipeline must divide the model's 28 layers: got 8; use 4 or 7",
        ),
        (
            ["policy.parallelism.expert=2"],
            "expert must be 1 for a model without experts: got 2",
        ),
        (["policy.parallelism.pipeline=3"], "needs a multiple of 3 workers: got 8"),
        (["policy.train_global_batch_size=100"], "use 64 or 256"),
        (["policy.generation.max_new_tokens=0"], "max_new_tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_divide_is_refused_with_what_does(
    model: Path, capsys: Capture, words: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments(model, *words, "--gpus", "8x80GB"))


def test_a_model_of_the_hub_that_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = refused(capsys, "plan", "sft", "policy.model_name=some/model")
    assert "put its config.json into a folder" in told
    assert "needs policy.model_name" in refused(capsys, "plan", "sft")


@pytest.mark.parametrize("text", ["8", "x80GB", "0x80GB", "8x1GB", "axb", "8x80TB"])
def test_gpus_are_counted_and_sized(text: str, capsys: Capture) -> None:
    told = refused(capsys, "plan", "quickstart", "--gpus", text)
    assert f"such as 8x80GB or 2x8x80GB: got {text}" in " ".join(told.split())


def test_gpus_of_several_nodes() -> None:
    gpus = GpusType().convert("2x8x80GB", None, None)
    assert (gpus.num_nodes, gpus.per_node, gpus.count) == (2, 8, 16)
    assert GpusType().convert("4x24", None, None).usable_bytes < 24 << 30
