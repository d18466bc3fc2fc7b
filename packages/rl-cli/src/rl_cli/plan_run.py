"""Plans of all stages of a run, with alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_cli.gpus import Gpus
from rl_cli.missing_keys import UNSET, how_to_set
from rl_cli.plan_advice import Remedies, find_remedies, other_layouts
from rl_cli.run_config import Run
from rl_cli.run_plan import Place, StagePlan, chosen_backend, plan_stage
from rl_distributed.cluster.config import ClusterSize
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.planning.layouts import Layout, layout_problems
from rl_models.planning.model_config import model_config
from rl_models.planning.model_shape import (
    ModelShape,
    shape_of_build,
    shape_of_config,
)

__all__ = ["Planned", "plan_run"]


@dataclass(frozen=True)
class Planned:
    """The plan of one stage."""

    plan: StagePlan
    layouts: list[StagePlan]
    """Other layouts of the same ranks, best first."""
    remedies: Remedies | None
    """Settings with which it fits, if it does not."""


def plan_run(run: Run, gpus: Gpus | None, generator_ranks: int | None) -> list[Planned]:
    """Plan every stage of a run.

    Args:
        run: The run.
        gpus: GPUs to plan for; None: the ranks of the section `cluster`.
        generator_ranks: Number of ranks that only sample; None: those of the section
            `generation_cluster`.

    Raises:
        ConfigError: A layout or batch size is not divisible.
        ModelLoadError: The sizes of a model cannot be read.
    """
    found: list[Planned] = []
    first: TrainerConfig | None = None
    for stage in run.stages:
        first = first or stage.config
        shapes = _shapes(run, stage.config, first.policy)
        place = _place(stage.config, gpus, generator_ranks)
        layout = _layout(stage.config.policy, place.num_ranks)
        _check(layout, shapes["policy"], stage.config, place)
        plan = plan_stage(stage.name, stage.config, shapes, layout, place)
        remedies = find_remedies(plan, shapes) if plan.fits is False else None
        found.append(Planned(plan, other_layouts(plan, shapes), remedies))
    return found


def _shapes(
    run: Run, config: TrainerConfig, first: PolicyConfig
) -> dict[str, ModelShape]:
    """Return the sizes of a stage's models; later stages use the first one's."""
    own = config.policy.model_name
    sections = {"policy": config.policy}
    for name in ("critic", "teacher"):
        section = getattr(config, name, None)
        if isinstance(section, PolicyConfig):
            sections[name] = section
    shapes = {}
    for name, section in sections.items():
        if section.model_name == UNSET:
            key = f"{name}.model_name"
            raise ConfigError(
                f"a plan of {run.name} needs {key}: add {how_to_set([key])}"
            )
        handed_on = section.model_name == own
        if handed_on and run.model is not None:
            shapes[name] = shape_of_build(run.model, section.head)
            continue
        # A later stage's folder does not exist yet, but its model has the sizes of the
        # first one's.
        source = first if handed_on else section
        shapes[name] = shape_of_config(
            model_config(source), source.model_name, section.head
        )
    return shapes


def _place(
    config: TrainerConfig, gpus: Gpus | None, generator_ranks: int | None
) -> Place:
    cluster, apart = config.cluster, config.sampling_cluster
    option = "--generator-gpus"
    if generator_ranks is None:
        option = "generation_cluster"
        generator_ranks = 0 if apart is None else apart.num_bundles
        if gpus is None:
            # The sections name the ranks of both.
            nodes, per_node = cluster.num_nodes, cluster.workers_per_node
            if apart is None:
                return Place(gpus, nodes, per_node)
            return Place(
                gpus, nodes, per_node, generator_ranks,
                generator_ranks_per_node=apart.workers_per_node,
                all_nodes=nodes + apart.num_nodes,
            )  # fmt: skip
        if apart is not None and apart.workers_per_node > gpus.per_node:
            raise ConfigError(
                "generation_cluster.workers_per_node must not exceed the GPUs of a "
                f"node: got {apart.workers_per_node} with {gpus.describe()}; use at "
                f"most {gpus.per_node}, and generation_cluster.num_nodes for more"
            )
    if gpus is None:
        nodes, per_node = cluster.num_nodes, cluster.workers_per_node
    else:
        nodes, per_node = gpus.num_nodes, gpus.per_node
    if generator_ranks == 0:
        return Place(gpus, nodes, per_node)
    if config.policy.generation is None:
        raise ConfigError(
            f"{option} must be 0 if nothing samples: got {generator_ranks}"
        )
    left = nodes * per_node - generator_ranks
    if left < 1:
        raise ConfigError(
            f"{option} must leave some of the {nodes * per_node} GPUs for "
            f"training: got {generator_ranks}"
        )
    if left >= per_node and left % per_node:
        # The nearest numbers on both sides, so that the remedy is a number that works.
        below = generator_ranks - (per_node - left % per_node)
        raise ConfigError(
            f"{option} must leave whole nodes, or some GPUs of one: got "
            f"{generator_ranks} of {nodes} x {per_node}; use {max(0, below)} or "
            f"{generator_ranks + left % per_node}"
        )
    return Place(
        gpus, max(1, left // per_node), min(left, per_node), generator_ranks,
        generator_ranks_per_node=_ranks_per_node(
            generator_ranks, per_node, apart if option == "generation_cluster" else None
        ),
        all_nodes=nodes,
    )  # fmt: skip


def _ranks_per_node(num_ranks: int, most: int, section: ClusterSize | None) -> int:
    """Return the generator's ranks per node: those of its section, or the most."""
    if section is not None:
        return section.workers_per_node
    # Nodes of a section have equal numbers of workers.
    return num_ranks if num_ranks <= most else gcd(num_ranks, most)


def _layout(policy: PolicyConfig, num_ranks: int) -> Layout:
    """Return the layout configured in the section `policy`."""
    asked = policy.parallelism
    return Layout(
        data=asked.data_size(num_ranks),
        tensor=asked.tensor,
        pipeline=asked.pipeline,
        context=asked.context,
        expert=asked.expert,
        sequence=asked.sequence,
        replicas=policy.dtensor.data_replicas,
        backend=policy.backend,
        has_adapters=policy.lora is not None,
    )


def _check(
    layout: Layout, shape: ModelShape, config: TrainerConfig, place: Place
) -> None:
    problems = layout_problems(shape, layout, place.num_ranks)
    if problems:
        raise ConfigError("; ".join(problems))
    _check_replicas(config, place)


def _check_replicas(config: TrainerConfig, place: Place) -> None:
    """Refuse replicas of vLLM that ranks of the generator cannot make up."""
    generation = config.policy.generation
    if generation is None:
        return
    on_gpu = place.gpus is not None or bool(config.cluster.use_gpus)
    size = generation.vllm.tensor_parallel_size
    ranks = place.generator_ranks or place.num_ranks
    if chosen_backend(generation, on_gpu=on_gpu).backend != "vllm" or ranks % size == 0:
        return
    source = "generation_cluster" if place.generator_ranks else "cluster"
    raise ConfigError(
        "policy.generation.vllm.tensor_parallel_size must divide the ranks that sample "
        f"({source}): got {size} with {ranks}; change either"
    )
