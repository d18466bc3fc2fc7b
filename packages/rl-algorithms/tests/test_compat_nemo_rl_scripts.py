"""Programs written for NeMo RL run unchanged and compute the right numbers.

Each runs in a process of its own through the import map. Its results are compared with
numbers computed here from the definitions, in float64 and without this package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent / "nemo_rl_scripts"
Array = np.ndarray[Any, np.dtype[np.float64]]


def run_script(
    name: str, folder: Path, *arguments: str, **variables: str
) -> tuple[dict[str, Any], str]:
    """Run a script; return its results and its warnings."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rl_algorithms.compat.nemo_rl"),
            *(str(SCRIPTS / name), str(folder), *arguments),
        ],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text()), done.stderr


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found, warned = run_script("policy_losses.py", tmp_path_factory.mktemp("losses"))
    assert "a clamp cuts off" not in warned
    return found


def log_softmax(logits: Array) -> Array:
    moved = logits - logits.max(-1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(-1, keepdims=True))


def columns(found: dict[str, Any]) -> dict[str, Array]:
    """Return the batch without the first position, which predicts nothing."""
    batch = {k: np.asarray(v, np.float64) for k, v in found["batch"].items()}
    return {k: v[:, 1:] if v.ndim == 2 else v for k, v in batch.items()}


def log_probs(found: dict[str, Any]) -> Array:
    every = log_softmax(np.asarray(found["logits"], np.float64))[:, :-1]
    ids = np.asarray(found["batch"]["input_ids"])[:, 1:, None]
    return np.take_along_axis(every, ids, -1)[..., 0]


def importance(config: dict[str, Any], batch: dict[str, Array]) -> Array:
    """Return the importance weight of each token for the sampler mismatch."""
    weight = np.exp(batch["prev_logprobs"] - batch["generation_logprobs"])
    high = config["truncated_importance_sampling_ratio"]
    low = config["truncated_importance_sampling_ratio_min"] or 0.0
    kind = config["truncated_importance_sampling_type"]
    if kind == "tis":
        weight = np.clip(weight, low, high)
    elif kind == "icepop":
        weight = np.where((weight >= low) & (weight <= high), weight, 0.0)
    return weight if config["use_importance_sampling_correction"] else weight * 0 + 1


def kl_estimate(kind: str, logprobs: Array, reference: Array) -> Array:
    r = reference - logprobs
    return {"k1": -r, "k2": r * r / 2, "k3": np.exp(r) - 1 - r}[kind]


def clipped_surrogate(
    config: dict[str, Any], current: Array, batch: dict[str, Array]
) -> Array:
    """Return the loss of each token, without its weight."""
    advantages, log_ratio = batch["advantages"], current - batch["prev_logprobs"]
    low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
    if config["disable_ppo_ratio"]:
        return -advantages * current
    if config["force_on_policy_ratio"]:
        return -advantages
    if config["sequence_level_importance_ratios"]:
        mask = batch["token_mask"]
        mean = (log_ratio * mask).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)
        log_ratio = np.broadcast_to(mean, log_ratio.shape)
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, low, high)
    if config["use_cispo"]:
        return -advantages * clipped * current
    loss = np.maximum(-advantages * ratio, -advantages * clipped)
    if config["ratio_clip_c"] is not None:
        bound = -advantages * config["ratio_clip_c"]
        loss = np.where(advantages < 0, np.minimum(loss, bound), loss)
    return loss


def expected_loss(
    config: dict[str, Any], current: Array, batch: dict[str, Array]
) -> float:
    """Return the loss of the global batch."""
    rows, tokens = batch["sample_mask"], batch["token_mask"]
    each = clipped_surrogate(config, current, batch) * importance(config, batch)
    mask = tokens * rows[:, None]
    if config["token_level_loss"]:
        loss = (each * mask).sum() / mask.sum()
    else:
        per_row = (each * tokens).sum(-1) / np.maximum(tokens.sum(-1), 1)
        loss = (per_row * rows).sum() / rows.sum()
    kl = kl_estimate(
        config["reference_policy_kl_type"], current, batch["reference_policy_logprobs"]
    )
    return float(
        loss + config["reference_policy_kl_penalty"] * (kl * mask).sum() / mask.sum()
    )


VARIANTS = (
    "ppo", "dapo", "dual_clip", "per_sequence", "gspo", "cispo", "reinforce",
    "on_policy", "corrected", "tis", "icepop", "kl_k1", "kl_k2", "kl_k3",
)  # fmt: skip


def test_every_variant_of_the_loss_script_is_compared(policy: dict[str, Any]) -> None:
    assert set(policy["variants"]) == set(VARIANTS)
    losses = {round(one["loss"], 6) for one in policy["variants"].values()}
    # Each must change something, or the test would prove nothing.
    assert len(losses) == len(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_add_up_to_the_loss_of_the_global_batch(
    name: str, policy: dict[str, Any]
) -> None:
    one, batch = policy["variants"][name], columns(policy)
    current = log_probs(policy)
    expected = expected_loss(one["config"], current, batch)
    assert one["loss"] == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert one["token_level"] is one["config"]["token_level_loss"]
    assert one["metrics"]["num_valid_samples"] == 7.0
    assert one["metrics"]["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    ratio = np.exp(current - batch["prev_logprobs"])
    if name in ("ppo", "dapo", "dual_clip", "tis", "kl_k3"):
        mean = (ratio * mask).sum() / mask.sum()
        assert one["metrics"]["probs_ratio"] == pytest.approx(mean, rel=1e-5)
    if name.startswith("kl_"):
        kind = one["config"]["reference_policy_kl_type"]
        kl = kl_estimate(kind, current, batch["reference_policy_logprobs"])
        mean = (kl * mask).sum() / mask.sum()
        assert one["metrics"]["kl_penalty"] == pytest.approx(mean, rel=1e-4)


def test_gradients_are_those_of_finite_differences(policy: dict[str, Any]) -> None:
    batch, logits = columns(policy), np.asarray(policy["logits"], np.float64)
    for name in ("dapo", "gspo", "tis"):
        config = policy["variants"][name]["config"]

        def loss(moved: Array, config: dict[str, Any] = config) -> float:
            current = log_probs({**policy, "logits": moved})
            return expected_loss(config, current, batch)

        total = 0.0
        for place in np.ndindex(logits.shape):
            moved = np.zeros_like(logits)
            moved[place] = 1e-6
            slope = (loss(logits + moved) - loss(logits - moved)) / 2e-6
            total += slope * slope
        found = policy["variants"][name]["gradient"]
        assert found == pytest.approx(np.sqrt(total), rel=1e-4)


def test_baselines_leave_the_row_out(policy: dict[str, Any]) -> None:
    rewards = np.asarray(policy["rewards"], np.float64).reshape(2, 4)
    for row, place in np.ndindex(rewards.shape):
        others = np.delete(rewards[row], place)
        index = 4 * row + place
        assert policy["baseline"][index] == pytest.approx(others.mean())
        assert policy["std"][index] == pytest.approx(others.std(ddof=1))


def test_the_other_losses_of_the_script(policy: dict[str, Any]) -> None:
    batch, taken = columns(policy), np.asarray(policy["taken"], np.float64)
    tokens = batch["token_mask"]
    assert taken == pytest.approx(log_probs(policy), abs=1e-5)
    assert policy["nll"] == pytest.approx(-(taken * tokens).sum() / tokens.sum(), 1e-5)
    # DPO: sums over the answer of chosen and rejected; the script rolls the reference.
    rewards = ((taken - batch["reference_policy_logprobs"]) * tokens).sum(-1) * 0.3
    margin = rewards[0::2] - rewards[1::2]
    preference = np.log1p(np.exp(-margin)).mean()
    means = (taken * tokens).sum(-1) / tokens.sum(-1)
    # The supervised part averages over all rows' chosen answers.
    expected = preference - 0.2 * means[0::2].mean()
    assert policy["dpo"] == pytest.approx(expected, rel=1e-5)
    metrics = policy["dpo_metrics"]
    assert metrics["accuracy"] == (margin > 0).mean()
    assert metrics["preference_loss"] == pytest.approx(preference, rel=1e-5)
    scores = np.asarray(policy["scores"], np.float64)[:, 0]
    margin = scores[0::2] - scores[1::2]
    assert policy["preference"] == pytest.approx(np.log1p(np.exp(-margin)).mean(), 1e-5)
    assert policy["preference_metrics"]["accuracy"] == (margin > 0).mean()


def test_the_critic_and_the_distillation_of_the_script(policy: dict[str, Any]) -> None:
    whole = {k: np.asarray(v, np.float64) for k, v in policy["batch"].items()}
    values, returns = (
        np.asarray(policy[name], np.float64) for name in ("values", "returns")
    )
    mask = whole["token_mask"] * whole["sample_mask"][:, None]
    old = values - 0.3
    near = np.clip(values, old - 0.2, old + 0.2)
    error = np.maximum((values - returns) ** 2, (near - returns) ** 2)
    counted = mask[:, 1:].sum()
    assert policy["value_loss"] == pytest.approx(
        0.5 * 0.5 * (error * mask).sum() / counted, rel=1e-5
    )
    student, teacher = (
        np.asarray(policy[name], np.float64) for name in ("student", "teacher")
    )
    forward = (np.exp(teacher) * (teacher - student)).sum(-1)
    reverse = (np.exp(student) * (student - teacher)).sum(-1)
    mixed = 0.25 * forward + 0.75 * reverse
    assert policy["distillation"] == pytest.approx(
        (mixed * mask[:, 1:]).sum() / counted, rel=1e-5
    )


def test_the_small_functions_of_the_loss_script(policy: dict[str, Any]) -> None:
    # log-prob -1, reference -2.
    assert policy["kl"] == pytest.approx({"k1": 1.0, "k2": 0.5, "k3": np.exp(-1)})
    assert policy["kl_weighted"] == pytest.approx(2 * np.exp(-1))
    assert policy["masked_mean"] == pytest.approx(9 / 6)


# In a process of its own, as other tests of this package reserve CPUs.
_CLUSTER = """
import sys
import ray
from rl_distributed.testing import local_ray

with local_ray(num_cpus=4):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def sharded(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("workers")
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        # A NeMo RL script joins an existing cluster.
        address = cluster.stdout.readline().strip()
        assert address, "the cluster did not start"
        # Its standard input closes when the block ends, which stops it.
        return *run_script("sharded_workers.py", folder, RAY_ADDRESS=address), folder


@pytest.mark.slow
def test_batches_are_split_along_one_axis_and_repeated_along_the_other(
    sharded: tuple[dict[str, Any], str, Path],
) -> None:
    found, _, _ = sharded
    # Row n holds n three times. Global batches of 4 are split over two ranks; workers
    # of one tensor group get the same rows, and one of them answers.
    answers = [(0, [0, 1, 4, 5]), (2, [2, 3, 6, 7])]
    assert found["train"] == [
        {"rank": rank, "gbs": 4, "ids": ids, "loss": 3.0 * sum(ids) * 2}
        for rank, ids in answers
    ]
    halves = [(0, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]
    free = [
        {"rank": rank, "gbs": None, "ids": ids, "loss": 3.0 * sum(ids) * 2 * 10}
        for rank, ids in halves
    ]
    assert found["free"] == free
    # The others are called too, without data.
    idle = [{"rank": rank, "idle": True} for rank in (1, 3)]
    assert found["free_called"] == [free[0], idle[0], free[1], idle[1]]
    assert [one["ids"] for one in found["each"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.slow
def test_rows_of_dynamic_batches_come_back_in_order(
    sharded: tuple[dict[str, Any], str, Path],
) -> None:
    logprobs = sharded[0]["logprobs"]
    assert logprobs["idx"] == list(range(8))
    assert logprobs["logprobs"] == [[0.0, -2.0 * n, -2.0 * n] for n in range(8)]


@pytest.mark.slow
def test_calls_reach_the_workers_that_they_name(
    sharded: tuple[dict[str, Any], str, Path],
) -> None:
    found, warned, _ = sharded
    # Coordinate on the axis, and the number of batches that the worker has trained on.
    assert found["where"] == [[0, 3], [1, 2], [0, 3], [1, 2]]
    assert found["multiple"] == [[0, 3], [0, 3]]
    assert found["by_place"] == [1, 2]
    assert [one["rank"] for one in found["first_of_tensor"]] == [0, 2]
    assert [one["rank"] for one in found["described"]] == [0, 1, 2, 3]
    for one in found["described"]:
        assert one["config"] == {"scale": 2, "nested": {"a": 1, "b": 2}}
        assert (one["world"], one["leads"]) == ("4", None)
        # The program's environment, without anything that looks like a secret.
        assert (one["driver_said"], one["secret"]) == ("hello", None)
    assert "workers do not get DRIVER_API_KEY" in warned
    assert "init_ray ignores log_dir" in warned
    assert found["shape"] == {"data_parallel": 2, "tensor_parallel": 2}
    assert found["ranks"] == [1, 3]
    assert found["env"] is True
    assert (found["world_size"], found["nodes"]) == (4, 1)
    assert found["bundles"] == [4]


@pytest.mark.slow
def test_workers_that_share_a_model_have_one_leader(
    sharded: tuple[dict[str, Any], str, Path],
) -> None:
    found, _, folder = sharded
    tied = found["tied"]
    assert (tied["dp_size"], tied["leaders"]) == (2, [0, 2])
    bundles = [one["bundles"] for one in tied["described"]]
    # The script's class gets bundles, and a variable, where a group has several.
    assert bundles == [[0, [0, 1]], None, None]
    assert [one["leads"] for one in tied["described"]] == ["1", None, None]
    assert tied["one"]["rank"] == 2
    assert tied["clean"] is True
    left = sorted(path.name for path in folder.glob("goodbye-*"))
    assert left == [f"goodbye-{rank}" for rank in range(3)]


@pytest.mark.slow
def test_environments_are_actors_of_classes_that_import_nemo_rl(tmp_path: Path) -> None:
    found, _ = run_script("environments.py", tmp_path)
    # Right: 1/2 for 0.5 and 0.25 for 1/4. Wrong: no answer, and 3 for 4.
    assert found["math"] == [1.0, 1.0, 0.0, 0.0]
    assert found["math_ends"] == [True] * 4
    assert ["incorrect" in said for said in found["math_says"]] == [
        reward == 0.0 for reward in found["math"]
    ]
    assert found["math_answers"] is None
    # The secret number is 7; the second row needs three turns, the third runs out.
    assert found["said"] == [
        ["right"], ["higher", "lower", "right"], ["higher", "higher", "higher"],
    ]  # fmt: skip
    assert found["turns"] == [1, 3, 3]
    assert found["total"] == [1.0, 1.0, 0.0]
    assert found["metrics"] == {"accuracy": pytest.approx(2 / 3), "pass": 0.5}
    assert found["is_batch"] is True
    assert found["shut"] == [True, True]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("batches.py", tmp_path_factory.mktemp("batches"))[0]


LENGTHS = [46, 24, 55, 88, 11, 14, 73, 17, 30, 60, 5, 9]


def test_message_logs_are_flattened_padded_and_masked(batches: dict[str, Any]) -> None:
    # A token is the length of a word; the first talk has one answer, the other two.
    found = batches["message_logs"]
    assert found["flat_ids"] == [2, 1, 2, 3, 1, 4]
    assert found["flat_roles"] == ["user", "assistant"] * 2
    assert found["ids"] == [[1, 2, 3, 4, 1, 0, 0, 0], [2, 1, 2, 3, 1, 4, 0, 0]]
    assert found["mask"] == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 1, 0, 0]]
    assert (found["lengths"], found["lengths_dtype"]) == ([5, 6], "torch.int32")
    assert found["texts"] == [{"content": "a bb ccc"}, {"content": "dddd e"}]
    assert found["shapes"] == [
        {"token_ids": [n], "token_loss_mask": [n]} for n in (3, 2)
    ]


def test_rows_are_collated_as_there(batches: dict[str, Any]) -> None:
    found = batches["collated"]
    assert found["keys"] == [
        "batch_max_length", "extra_env_info", "idx", "length", "loss_multiplier",
        "message_log", "stop_strings", "task_name",
    ]  # fmt: skip
    assert (found["length"], found["longest"]) == ([3, 2], [3, 3])
    assert found["multiplier"] == [1.0, 0.0]
    assert found["info"] == [{"ground_truth": "0"}, {"ground_truth": "1"}]
    # Repeated rows are independent: one got an extra message.
    assert found["idx"] == [0, 0, 1, 1]
    assert found["messages"] == [2, 1, 1, 1]
    assert found["pairs"] == {
        "input_ids": [[1, 2, 1, 0, 0, 0], [1, 2, 3, 4, 1, 0], [2, 2, 1, 1, 2, 0],
                      [2, 1, 0, 0, 0, 0]],
        "input_lengths": [3, 5, 5, 2],
        "sample_mask": [1.0, 1.0, 0.0, 0.0],
        "token_mask": [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0],
                       [0, 1, 0, 0, 0, 0]],
    }  # fmt: skip


def test_every_packer_fills_bins_without_overflow(batches: dict[str, Any]) -> None:
    assert len(batches["packers"]) == 4
    for name, bins in batches["packers"].items():
        rows = sorted(row for one in bins for row in one)
        assert rows == list(range(len(LENGTHS))), name
        assert all(sum(LENGTHS[row] for row in one) <= 100 for one in bins), name
    # In order; a new bin when the next row does not fit.
    assert batches["packers"]["CONCATENATIVE"] == [
        [0, 1], [2], [3, 4], [5, 6], [7, 8], [9, 10, 11],
    ]  # fmt: skip
    # Longest first, into the first bin with room: 88+11, 73+24, 60+30+9, 55+17+14+5.
    assert batches["packers"]["FIRST_FIT_DECREASING"] == [
        [3, 4], [6, 1], [9, 8, 11], [2, 7, 5, 10], [0],
    ]  # fmt: skip
    # At least 8, and a multiple of 3.
    assert len(batches["multiple"]) == 9


def test_packed_and_dynamic_shards_hold_each_row_once(batches: dict[str, Any]) -> None:
    packed = batches["packed"]
    assert packed["restored"] == list(range(len(LENGTHS)))
    bins = [one for shard in packed["shards"] for one in shard["idx"]]
    assert sorted(row for one in bins for row in one) == list(range(len(LENGTHS)))
    rounded = [-(-length // 4) * 4 for length in LENGTHS]
    sizes = [
        [sum(rounded[r] for r in one) for one in s["idx"]] for s in packed["shards"]
    ]
    assert all(size <= 100 for shard in sizes for size in shard)
    assert [s["count"] for s in packed["shards"]] == [len(shard) for shard in sizes]
    assert [s["longest"] for s in packed["shards"]] == [max(shard) for shard in sizes]
    dynamic = batches["dynamic"]
    assert dynamic["restored"] == list(range(len(LENGTHS)))
    one, two = dynamic["shards"]
    for first, second in zip(one, two, strict=True):
        # All shards are cut alike: at the longest row of either, rounded up to 8.
        assert first["width"] == second["width"]
        longest = max(LENGTHS[row] for row in first["idx"] + second["idx"])
        assert first["width"] == -(-longest // 8) * 8
        assert len(first["idx"]) * first["width"] <= 200


def test_batches_are_cut_as_there(batches: dict[str, Any]) -> None:
    assert batches["ragged"] == [[1.0, 1.0, -1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert batches["texts"] == ["a", "b", "c"]
    assert batches["uneven"] == [[0, 1], [2, 3], [4], []]
    assert batches["chunk"] == batches["second_batch"] == [4, 5, 6, 7]
    assert batches["selected"] == [3, 1]
    assert (batches["size"], batches["is_dict"]) == (12, False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("books")
    overrides = ("policy.max_total_sequence_length=64", "++grpo.extra=1")
    return *run_script("bookkeeping.py", folder, *overrides), folder


def test_overrides_reach_interpolated_keys(
    kept: tuple[dict[str, Any], str, Path],
) -> None:
    found, _, _ = kept
    policy = found["config"]["policy"]
    assert policy["max_total_sequence_length"] == 64
    # Four times the override's length, not the file's.
    assert policy["sequence_packing"] == {"train_mb_tokens": 256}
    assert policy["tokenizer"] == {"name": "tiny"}
    assert found["config"]["grpo"] == {"max_num_steps": 4, "seed": 42, "extra": 1}
    assert "did you mean 'grpo.max_num_steps'" in found["refused"]


def test_checkpoints_are_ranked_and_pruned(
    kept: tuple[dict[str, Any], str, Path],
) -> None:
    found = kept[0]["checkpoints"]
    # Accuracies 0.5, 0.9, 0.7, 0.1: the best two and the newest are kept.
    assert [name for name in found["kept"] if not name.startswith(".")] == [
        "step_2", "step_3", "step_4",
    ]  # fmt: skip
    assert (found["latest"], found["best"]) == ("step_4", "step_2")
    assert found["optimizer"] is None
    assert found["info"] == {"step": 4, "val:accuracy": 0.1}
    assert found["weights"] == [4.0, 4.0]


def test_metrics_reach_the_folder_of_the_experiment(
    kept: tuple[dict[str, Any], str, Path],
) -> None:
    found, _, folder = kept
    assert (found["logs"], found["again"]) == ("logs/exp_001", "logs/exp_002")
    logs = folder / "logs" / "exp_001"
    events = next((logs / "tensorboard").glob("events.*")).read_bytes()
    assert b"train/loss" in events
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    losses = [
        (row["step"], row["metrics"]["train/loss"])
        for row in map(json.loads, lines)
        if "train/loss" in row.get("metrics", {})
    ]
    assert losses == [(1, 1.0), (2, 0.5)]
    assert "timing/train/checkpointing" in "".join(lines)
    batch = (logs / "train_data_step1.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in batch] == ["a", "b"]


def test_timers_seeds_and_estimators(kept: tuple[dict[str, Any], str, Path]) -> None:
    found, warned, _ = kept
    reduced = found["timers"]["reduced"]
    assert reduced.pop("std") == pytest.approx(np.std([1, 2, 6]))
    assert reduced == {
        "mean": 3.0, "median": 2.0, "min": 1.0, "max": 6.0, "sum": 9.0, "count": 3,
    }  # fmt: skip
    assert found["timers"]["labels"] == ["inner", "outer", "step"]
    assert found["timers"]["wrong"] == "ValueError"
    assert found["timers"]["due"] == [True, False, False]
    assert found["seeded"][0] == found["seeded"][1]
    # 2, 0 and 4 correct out of 4 answers.
    assert found["pass"] == pytest.approx([0.5 + 1, 5 / 6 + 1, 2.0])
    # 7 wins and is correct, 2 wins and is wrong, 5 is correct.
    assert found["cons"] == 2.0
    assert found["flat"] == {"a.b": 1, "a.c.0": 1, "a.c.1.d": 2}
    assert "eval_cons_k draws ties by lot" in warned
