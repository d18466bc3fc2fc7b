"""Output of `rl plan`: tables for people, one object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.padding import Padding
from rich.text import Text

from rl_algorithms.trainers.settings.asynchronous_config import AheadConfig
from rl_algorithms.trainers.settings.rollout_config import RolloutTrainerConfig
from rl_cli.console import Listing, Terminal, table
from rl_cli.plan_advice import Remedies
from rl_cli.run_plan import StagePlan
from rl_models.planning.adapter_shape import AdapterShape
from rl_models.planning.layouts import Layout
from rl_models.planning.model_shape import ModelShape
from rl_models.planning.phases import PARTS
from rl_models.planning.rank_memory import optimizer_copies

__all__ = ["print_stage", "remarks", "stage_to_dict"]

_GIB, _MIB = 1 << 30, 1 << 20
_UNITS = ((1 << 40, "TiB"), (_GIB, "GiB"), (_MIB, "MiB"), (1 << 10, "KiB"))
_LARGE = 8 * _GIB
_WHOLE = 100
"""Numbers of a table from here on are shown without decimals."""


def print_stage(
    terminal: Terminal,
    plan: StagePlan,
    layouts: list[StagePlan],
    remedies: Remedies | None,
) -> None:
    """Print the plan of one stage.

    Args:
        terminal: The terminal.
        plan: The plan.
        layouts: Other layouts of the same ranks.
        remedies: Settings that would make it fit, if it does not.
    """
    terminal.result(Padding(Text(_headline(plan), style="bold"), 0))
    terminal.result(_memory_table(plan))
    terminal.result(_figures(plan))
    if len(layouts) > 1 or plan.fits is False:
        terminal.result(_layout_table(plan, layouts))
    if remedies is not None:
        terminal.result(_remedy(remedies))
    for remark in remarks(plan):
        terminal.result(Padding(Text(f"- {remark}"), 0))
    terminal.raw("")


def _remedy(remedies: Remedies) -> str:
    """Describe how to make a stage fit, with overrides on one line to copy."""
    changes = " ".join(remedies.overrides)
    peak = _size(remedies.plan.memory.peak().total)
    if remedies.plan.fits:
        return f"It fits ({peak} at the peak) with:\n  {changes}"
    return f"It does not fit ({peak} at the peak) even with:\n  {changes}"


def _headline(plan: StagePlan) -> str:
    shape = plan.shape
    active = ""
    if shape.num_experts:
        active = f", {_count(shape.num_active_parameters)} of them per token"
    if plan.config.policy.lora is not None:
        active += f", {_count(_trained(plan))} of adapters trained"
    place = plan.place
    where = (
        f"{place.num_ranks} rank(s)" if place.gpus is None else place.gpus.describe()
    )
    return (
        f"{plan.name}: {shape.family} of {_count(shape.num_parameters)} parameters"
        f"{active}; {where}; {plan.layout.describe()}"
    )


def _trained(plan: StagePlan) -> int:
    """Return the number of trained parameters."""
    shape, lora = plan.shape, plan.config.policy.lora
    if lora is None:
        return shape.num_parameters
    head = shape.head_parameters if shape.head != "lm" else 0
    adapters = AdapterShape(shape, lora)
    return adapters.num_parameters + adapters.modules_of_rank(Layout()) + head


def _memory_table(plan: StagePlan) -> Listing:
    phases = plan.memory.phases
    largest = max(phase.total for phase in phases)
    unit, name = (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")
    rows: list[list[Any]] = [
        [part, *(_cell(phase.parts.get(part, 0) / unit) for phase in phases)]
        for part in PARTS
        if any(phase.parts.get(part) for phase in phases)
    ]
    rows.append(["total", *(_cell(phase.total / unit) for phase in phases)])
    size = plan.place.device_bytes
    if size is not None:
        free = [_cell((size - phase.total) / unit) for phase in phases]
        rows.append(["free", *free])
    columns = [f"{name} per rank, at most", *(phase.name for phase in phases)]
    return table("Memory by phase", columns, rows)


def _cell(value: float) -> float:
    return round(value) if abs(value) >= _WHOLE else round(value, 1)


def _figures(plan: StagePlan) -> Listing:
    return table("Step", ["what", "how much"], list(_step_rows(plan)))


def _step_rows(plan: StagePlan) -> Iterator[tuple[str, str]]:
    batches = plan.batches
    sizes = batches.plan
    yield "samples", sizes.describe()
    last = batches.rows_per_rank % max(1, sizes.micro_batch_size)
    if last and batches.num_micro_batches > 1 and not _is_by_tokens(plan):
        yield "last micro-batch", f"{last} row(s) of {sizes.micro_batch_size}"
    tokens = sizes.num_samples * batches.row_length
    trained = sizes.num_samples * batches.answer_length
    yield (
        "tokens",
        f"at most {tokens:,} in rows of {batches.row_length:,}; at most {trained:,} "
        "of them trained on",
    )
    generator = plan.generator
    if generator is not None:
        yield (
            "sampling",
            f"{generator.rows_at_once:,} of {generator.wanted_rows:,} rows of full "
            f"length at once per replica; {_size(generator.cache_bytes_per_token)} of "
            "cache per token",
        )
    if plan.sync is not None:
        sync = plan.sync
        yield (
            "weight sync",
            f"{_size(sync.num_bytes)} by {sync.transport}: about {sync.seconds:.2g} s, "
            f"if it moves {sync.bytes_per_second / 1e9:g} GB/s (assumed)",
        )
    if isinstance(plan.config, RolloutTrainerConfig):
        yield "staleness", _staleness(plan.config, batches.optimizer_steps)
    yield "loading", f"at most {_size(plan.host_bytes)} of memory per node"


def _is_by_tokens(plan: StagePlan) -> bool:
    policy = plan.config.policy
    return policy.sequence_packing is not None or policy.dynamic_batching is not None


def _staleness(config: RolloutTrainerConfig, steps: int) -> str:
    ahead = (
        config.asynchronous.max_staleness
        if isinstance(config, AheadConfig) and config.asynchronous
        else 0
    )
    if ahead > 0:
        return (
            f"asynchronous: tokens come from weights that are at most {ahead} step(s) "
            f"older, each of {steps} optimizer step(s)"
        )
    if steps == 1:
        return "on-policy: each answer is used once, by the weights that sampled it"
    return (
        f"{steps} optimizer steps per batch: the last one trains on answers of weights "
        f"that are {steps - 1} step(s) older"
    )


def _layout_table(plan: StagePlan, layouts: list[StagePlan]) -> Listing:
    rows = []
    for other in layouts:
        peak = other.memory.peak()
        # Without known GPUs nothing can be said, so the cell stays empty.
        fits = {None: "", True: "yes", False: "no"}[other.fits]
        fits = "cannot run" if other.layout.missing else fits
        note = _reason(other)
        if other.layout == plan.layout:
            note = f"as planned above; {note}"
        rows.append((other.layout.describe(), _size(peak.total), fits, note))
    columns = ["layout", "peak", "fits", "why"]
    return table("Layouts of these ranks", columns, rows)


def _reason(plan: StagePlan) -> str:
    layout = plan.layout
    missing = layout.missing
    if missing:
        return f"{layout.backend} does not support {' and '.join(missing)}"
    generator = plan.generator
    if generator is not None and not generator.holds_a_row:
        return "the cache cannot hold a row of full length"
    return _traffic(layout)


def _traffic(layout: Layout) -> str:
    if layout.num_ranks == 1:
        return "no communication between ranks"
    if layout.tensor > 1:
        return "communication in every layer: keep the ranks in a node"
    return "communication once per layer of weights"


def remarks(plan: StagePlan) -> list[str]:
    """Return remarks for readers of the plan."""
    return list(_remarks(plan))


def _remarks(plan: StagePlan) -> Iterator[str]:
    shape, policy = plan.shape, plan.config.policy
    missing = plan.layout.missing
    if missing:
        backend = plan.layout.backend
        yield f"{' and '.join(missing)}: not supported by {backend} for this model"
    if policy.backend not in ("dtensor", "megatron"):
        yield f"assuming that {policy.backend} shards weights like dtensor"
    if not shape.is_known:
        yield _unknown_family(shape)
    if not optimizer_copies(policy.optimizer)[1]:
        yield (
            f"the state of {policy.optimizer.name} is unknown: assuming two numbers "
            "per parameter, as in AdamW"
        )
    # 4 bytes each: gradients are accumulated in float32.
    whole = 4 * plan.layout.parameters_of_rank(shape)
    several = plan.batches.num_micro_batches > 1
    # Those of `megatron` are whole in any case.
    is_dtensor = plan.layout.backend != "megatron"
    if is_dtensor and several and plan.layout.data > 1 and whole > _LARGE:
        yield (
            f"gradients stay unsharded ({_size(whole)}) on every rank between "
            "micro-batches; with one micro-batch per optimizer step they are sharded"
        )
    if is_dtensor and plan.memory.peak().name == "start" and plan.fits is False:
        yield (
            "each rank holds the whole model in float32 while loading; "
            "policy.dtensor.cpu_offload=true loads it in host memory"
        )
    if plan.place.gpus is not None and policy.precision == "float32":
        yield "policy.precision=bfloat16 is faster on GPUs and needs less memory"
    if plan.place.generator_ranks:
        yield from _apart(plan)
    if plan.place.gpus is not None:
        yield "5 % and 1 GiB of each GPU are reserved for fragmentation and the driver"


def _apart(plan: StagePlan) -> Iterator[str]:
    """Name the sections of a generator apart, where they are not those of the plan."""
    place, apart = plan.place, plan.config.sampling_cluster
    ranks, size = place.generator_ranks, place.ranks_per_node
    workers = place.generator_ranks_per_node
    if apart is None or apart.num_bundles != ranks:
        yield (
            "to run it so, set "
            f"cluster.num_nodes={place.num_nodes} cluster.workers_per_node={size} "
            f"generation_cluster.num_nodes={ranks // workers} "
            f"generation_cluster.workers_per_node={workers}"
        )


def _unknown_family(shape: ModelShape) -> str:
    return (
        f"the family {shape.family!r} is unknown: its parameters are counted as those "
        "of a Llama of these sizes"
    )


def stage_to_dict(
    plan: StagePlan, layouts: list[StagePlan], remedies: Remedies | None
) -> dict[str, Any]:
    """Return the plan of one stage as plain values; memory in bytes."""
    batches, sync, generator = plan.batches, plan.sync, plan.generator
    return {
        "stage": plan.name,
        "family": plan.shape.family,
        "parameters": plan.shape.num_parameters,
        "active_parameters": plan.shape.num_active_parameters,
        "trained_parameters": _trained(plan),
        "layout": _layout_to_dict(plan.layout),
        "fits": plan.fits,
        "cannot_run": list(plan.layout.missing),
        "usable_bytes": plan.place.device_bytes,
        "memory": {
            p.name: {**p.parts, "together": p.total} for p in plan.memory.phases
        },
        "host_bytes": plan.host_bytes,
        "samples": batches.plan.num_samples,
        "optimizer_steps": batches.optimizer_steps,
        "rows_per_rank": batches.rows_per_rank,
        "micro_batches": batches.num_micro_batches,
        "tokens": batches.plan.num_samples * batches.row_length,
        "weight_sync": None
        if sync is None
        else {
            "transport": sync.transport,
            "bytes": sync.num_bytes,
            "assumed_bytes_per_s": sync.bytes_per_second,
            "seconds": sync.seconds,
        },
        "generator": None
        if generator is None
        else {
            "cache_bytes_per_token": generator.cache_bytes_per_token,
            "rows_at_once": generator.rows_at_once,
        },
        "layouts": [
            {
                "layout": _layout_to_dict(other.layout),
                "peak_bytes": other.memory.peak().total,
                "fits": other.fits,
                "cannot_run": list(other.layout.missing),
            }
            for other in layouts
        ],
        # Only those that suffice: a program would apply them without reading on.
        "remedies": list(remedies.overrides)
        if remedies is not None and remedies.plan.fits
        else [],
        "remarks": remarks(plan),
    }


def _layout_to_dict(layout: Layout) -> dict[str, Any]:
    names = ("data", "tensor", "pipeline", "context", "expert", "sequence", "replicas")
    return {name: getattr(layout, name) for name in names}


def _size(num_bytes: float) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
