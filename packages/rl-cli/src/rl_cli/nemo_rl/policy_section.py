"""The sections `policy` and `teacher` of a recipe."""

from __future__ import annotations

from typing import Any

from rl_cli.nemo_rl.keys import GENERATION, POLICY, VLLM
from rl_cli.nemo_rl.their_recipe import TheirRecipe
from rl_distributed.errors import ConfigError

__all__ = [
    "cluster_sections",
    "copy_keys",
    "generation_section",
    "policy_section",
    "put",
]

_BACKENDS = ("vllm", "megatron")


def put(section: dict[str, Any], path: str, value: Any) -> None:
    """Set a key by its path."""
    *parents, name = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value


def copy_keys(
    recipe: TheirRecipe, theirs: str, names: tuple[str, ...], ours: dict[str, Any]
) -> None:
    """Copy keys with the same meaning if they are set.

    Args:
        recipe: Their recipe.
        theirs: Path of their section.
        names: Keys to copy.
        ours: Our section.
    """
    for name in names:
        value = recipe.take(f"{theirs}.{name}")
        if value is not None and value != {}:
            put(ours, name, value)


def policy_section(recipe: TheirRecipe, at: str = "policy") -> dict[str, Any]:
    """Return our section for a trained model or a teacher."""
    ours: dict[str, Any] = {}
    copy_keys(recipe, at, POLICY, ours)
    precision = recipe.peek(f"{at}.precision", "float32")
    if precision in ("float32", "bfloat16"):
        ours["precision"] = recipe.take(f"{at}.precision", precision)
    else:
        recipe.change(f"{at}.precision", "bfloat16 takes its place")
        ours["precision"] = "bfloat16"
    if recipe.peek(f"{at}.megatron_cfg.enabled", False):
        _megatron(recipe, at, ours)
        recipe.leave(f"{at}.dtensor_cfg", "the backend is megatron")
    else:
        _dtensor(recipe, at, ours)
        recipe.leave(f"{at}.megatron_cfg", "the backend is dtensor")
        _scheduler(recipe, at, ours)
    _token_batches(recipe, at, ours)
    if recipe.peek(f"{at}.draft.enabled", False):
        recipe.leave(f"{at}.draft", "there are no draft models")
    recipe.leave(f"{at}.draft", "switched off")
    chunk = recipe.take(f"{at}.logprob_chunk_size")
    if chunk is not None:
        put(ours, "dtensor.logprob_chunk_size", chunk)
    if recipe.has("rm"):
        # The algorithm implies the head.
        for name in ("enabled", "reward_model_type"):
            recipe.take(f"{at}.reward_model_cfg.{name}")
    recipe.leave(f"{at}.reward_model_cfg", "`rl train rm` has a head of rewards")
    return ours


def _dtensor(recipe: TheirRecipe, at: str, ours: dict[str, Any]) -> None:
    theirs = f"{at}.dtensor_cfg"
    ours["backend"] = "dtensor"
    recipe.take(f"{theirs}.enabled")
    recipe.take(f"{theirs}._v2")
    for name in ("cpu_offload", "activation_checkpointing"):
        if recipe.take(f"{theirs}.{name}", False):
            put(ours, f"dtensor.{name}", True)
    _parallelism(
        recipe,
        ours,
        {
            "tensor": f"{theirs}.tensor_parallel_size",
            "context": f"{theirs}.context_parallel_size",
            "expert": f"{theirs}.expert_parallel_size",
        },
        f"{theirs}.sequence_parallel",
    )
    _lora(recipe, f"{theirs}.lora_cfg", ours)
    if recipe.peek(f"{theirs}.custom_parallel_plan") is not None:
        why = "layers are cut by rules of the model's family"
        recipe.leave(f"{theirs}.custom_parallel_plan", why)


def _megatron(recipe: TheirRecipe, at: str, ours: dict[str, Any]) -> None:
    theirs = f"{at}.megatron_cfg"
    ours["backend"] = "megatron"
    recipe.take(f"{theirs}.enabled")
    if recipe.take(f"{theirs}.activation_checkpointing", False):
        put(ours, "megatron.activation_checkpointing", True)
    _parallelism(
        recipe,
        ours,
        {
            "tensor": f"{theirs}.tensor_model_parallel_size",
            "pipeline": f"{theirs}.pipeline_model_parallel_size",
            "context": f"{theirs}.context_parallel_size",
            "expert": f"{theirs}.expert_model_parallel_size",
        },
        f"{theirs}.sequence_parallel",
    )
    optimizer = f"{theirs}.optimizer"
    if recipe.has(optimizer):
        recipe.take(f"{optimizer}.optimizer")
        kwargs = {
            "lr": recipe.take(f"{optimizer}.lr", 1e-5),
            "weight_decay": recipe.take(f"{optimizer}.weight_decay", 0.01),
            "betas": [
                recipe.take(f"{optimizer}.adam_beta1", 0.9),
                recipe.take(f"{optimizer}.adam_beta2", 0.999),
            ],
            "eps": float(recipe.take(f"{optimizer}.adam_eps", 1e-8)),
        }
        ours["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": kwargs}
        recipe.take(f"{optimizer}.clip_grad")
        _megatron_schedule(recipe, theirs, kwargs["lr"], ours)
    recipe.leave(theirs, "the backend decides, or it is not here")
    recipe.leave(f"{at}.scheduler", "the schedule of megatron_cfg counts")


def _megatron_schedule(
    recipe: TheirRecipe, theirs: str, lr: float, ours: dict[str, Any]
) -> None:
    style = recipe.take(f"{theirs}.scheduler.lr_decay_style", "constant")
    warmup = recipe.take(f"{theirs}.scheduler.lr_warmup_iters", 0)
    steps = recipe.take(f"{theirs}.scheduler.lr_decay_iters")
    lowest = recipe.take(f"{theirs}.optimizer.min_lr", 0.0)
    schedule: dict[str, Any] = {"name": "constant", "warmup_steps": warmup}
    if style in ("linear", "cosine") and isinstance(steps, int) and steps > warmup:
        ratio = lowest / lr if lr else 0.0
        schedule |= {
            "name": style,
            "kwargs": {"total_steps": steps, "min_lr_ratio": ratio},
        }
    ours["scheduler"] = schedule


def _parallelism(
    recipe: TheirRecipe, ours: dict[str, Any], sizes: dict[str, str], sequence: str
) -> None:
    for name, path in sizes.items():
        size = recipe.take(path, 1)
        if size > 1:
            put(ours, f"parallelism.{name}", size)
    if recipe.take(sequence, False):
        put(ours, "parallelism.sequence", True)


def _lora(recipe: TheirRecipe, theirs: str, ours: dict[str, Any]) -> None:
    if not recipe.take(f"{theirs}.enabled", False):
        recipe.leave(theirs, "switched off")
        return
    lora = {
        "r": recipe.take(f"{theirs}.dim", 8),
        "alpha": recipe.take(f"{theirs}.alpha", 32),
    }
    if dropout := recipe.take(f"{theirs}.dropout", 0.0):
        lora["dropout"] = dropout
    matches_all = recipe.take(f"{theirs}.match_all_linear", True)
    modules = recipe.take(f"{theirs}.target_modules", [])
    if modules and not matches_all:
        lora["target_modules"] = modules
    recipe.leave(theirs, "peft makes the adapters as its defaults are")
    ours["lora"] = lora


def _token_batches(recipe: TheirRecipe, at: str, ours: dict[str, Any]) -> None:
    for name, more in (
        ("dynamic_batching", ("sequence_length_round",)),
        ("sequence_packing", ("algorithm",)),
    ):
        place = f"{at}.{name}"
        if not recipe.take(f"{place}.enabled", False):
            recipe.leave(place, "switched off")
            continue
        section: dict[str, Any] = {}
        keys = ("train_mb_tokens", "logprob_mb_tokens", *more)
        copy_keys(recipe, place, keys, section)
        ours[name] = section
        recipe.leave(place, "bins are dealt so that workers are even")


def _scheduler(recipe: TheirRecipe, at: str, ours: dict[str, Any]) -> None:
    """Carry over a single schedule, or a warm-up followed by one."""
    place = f"{at}.scheduler"
    given = recipe.peek(place)
    if given is None:
        return
    lr = recipe.peek(f"{at}.optimizer.kwargs.lr", 1e-5)
    parts = given if isinstance(given, list) else [given]
    named = [part for part in parts if "name" in part]
    warmup = 0
    if len(named) > 1 and named[0]["name"].endswith(".LinearLR"):
        kwargs = named.pop(0).get("kwargs", {})
        # Defaults of PyTorch's LinearLR.
        warmup = kwargs.get("total_iters", 5)
        start = kwargs.get("start_factor", 1 / 3)
        recipe.change(
            place,
            f"the rate grows from 1/{warmup} of lr over {warmup} steps, there from "
            f"{start} of it; it steps with the optimizer",
        )
    schedule = _schedule_of(named[0], warmup, lr) if len(named) == 1 else None
    if schedule is None:
        recipe.leave(place, "set policy.scheduler: constant, linear, cosine or a class")
        return
    recipe.take(place)
    ours["scheduler"] = schedule


def _schedule_of(part: Any, warmup: int, lr: float) -> dict[str, Any] | None:
    kwargs = dict(part.get("kwargs", {}))
    name = part["name"].rpartition(".")[2]
    if name == "ConstantLR" and kwargs.get("factor", 1.0) == 1.0:
        return {"name": "constant", "warmup_steps": warmup}
    if name == "CosineAnnealingLR" and "T_max" in kwargs:
        ratio = kwargs.get("eta_min", 0.0) / lr if lr else 0.0
        total = {"total_steps": kwargs["T_max"] + warmup, "min_lr_ratio": ratio}
        return {"name": "cosine", "warmup_steps": warmup, "kwargs": total}
    # A class of another kind cannot be combined with a warm-up here.
    return None if warmup else {"name": part["name"], "kwargs": kwargs}


def generation_section(recipe: TheirRecipe, policy: dict[str, Any]) -> dict[str, Any]:
    """Return our section `policy.generation`."""
    at = "policy.generation"
    ours: dict[str, Any] = {}
    backend = recipe.peek(f"{at}.backend", "vllm")
    if backend in _BACKENDS:
        ours["backend"] = recipe.take(f"{at}.backend", backend)
    else:
        recipe.change(f"{at}.backend", "vllm takes its place")
        ours["backend"] = "vllm"
    copy_keys(recipe, at, GENERATION, ours)
    ours["max_new_tokens"] = _max_new_tokens(recipe, policy)
    if ours["backend"] == "vllm":
        _vllm(recipe, at, ours)
    recipe.leave(f"{at}.vllm_cfg", "the engine decides; vllm.engine_args takes more")
    return ours


def cluster_sections(recipe: TheirRecipe, backend: str | None) -> dict[str, Any]:
    """Return our sections `cluster` and, for a generator apart, `generation_cluster`.

    Their generator gets some GPUs of the only node, or whole nodes of several, and the
    trainer what is left.

    Args:
        recipe: The recipe.
        backend: Our generation backend; None if nothing samples.

    Raises:
        ConfigError: A number is none, or the cluster has too few GPUs for both.
    """
    nodes = _whole(recipe, "cluster.num_nodes", 1)
    per_node = _whole(recipe, "cluster.gpus_per_node", 1)
    cluster = {"num_nodes": nodes, "workers_per_node": per_node}
    at = "policy.generation.colocated"
    is_apart = not recipe.peek(f"{at}.enabled", True)
    if is_apart and backend == "megatron":
        recipe.change(f"{at}.enabled", "megatron samples in the workers that train")
    if not is_apart or backend in (None, "megatron"):
        recipe.take(f"{at}.enabled")
        recipe.leave(at, "the generator has the workers of the cluster")
        return {"cluster": cluster}
    recipe.take(f"{at}.enabled")
    own_nodes = _whole(recipe, f"{at}.resources.num_nodes", 0)
    own_per_node = _whole(recipe, f"{at}.resources.gpus_per_node", 0)
    if own_per_node > per_node:
        raise ConfigError(
            f"{at}.resources.gpus_per_node must not exceed cluster.gpus_per_node "
            f"({per_node}): got {own_per_node}; lower it, or raise that"
        )
    recipe.leave(at, "generation_cluster has the machines of the generator")
    if nodes == 1:
        own_nodes, own_per_node = 1, own_per_node or per_node // 2
        cluster["workers_per_node"] = per_node - own_per_node
    else:
        own_nodes, own_per_node = own_nodes or nodes // 2, own_per_node or per_node
        cluster["num_nodes"] = nodes - own_nodes
    if min(*cluster.values(), own_per_node) < 1:
        raise ConfigError(
            f"{at}.resources must leave the trainer some of the {nodes} x {per_node} "
            f"GPUs of cluster: got {own_nodes} x {own_per_node}"
        )
    apart = {"num_nodes": own_nodes, "workers_per_node": own_per_node}
    return {"cluster": cluster, "generation_cluster": apart}


def _whole(recipe: TheirRecipe, path: str, default: int) -> int:
    """Return the whole number at a path, marking it as used."""
    value = recipe.take(path, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ConfigError(
        f"{path} must be a whole number: got {value!r}; write it without quotes"
    )


def _vllm(recipe: TheirRecipe, at: str, ours: dict[str, Any]) -> None:
    vllm: dict[str, Any] = {}
    copy_keys(recipe, f"{at}.vllm_cfg", VLLM, vllm)
    if arguments := recipe.take(f"{at}.vllm_kwargs"):
        vllm["engine_args"] = arguments
    if length := recipe.take(f"{at}.vllm_cfg.max_model_len"):
        ours["max_context_length"] = length
    precision = recipe.take(f"{at}.vllm_cfg.precision")
    if precision in ("float32", "bfloat16"):
        ours["precision"] = precision
    if vllm:
        ours["vllm"] = vllm


def _max_new_tokens(recipe: TheirRecipe, policy: dict[str, Any]) -> int:
    """Return the maximum answer length, leaving room for a prompt."""
    longest = policy.get("max_total_sequence_length")
    path = "policy.generation.max_new_tokens"
    given = recipe.peek(path, longest or 256)
    if not isinstance(longest, int) or given < longest:
        recipe.take(path)
        return int(given)
    half = longest // 2
    recipe.change(
        path,
        f"{half}: an answer must leave room for its prompt in "
        f"policy.max_total_sequence_length ({longest}); there it is cut where that "
        "ends",
    )
    return half
