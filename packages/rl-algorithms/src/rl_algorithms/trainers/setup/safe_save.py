"""Whether the state of a run that hangs can be saved."""

from __future__ import annotations

from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.setup.components import Components
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["why_unsafe"]

_ASK_S = 3.0


def why_unsafe(signals: SignalGuard, components: Components) -> str | None:
    """Return why no checkpoint can be made now; None if one can.

    Args:
        signals: Signal guard of the run.
        components: Components, whose training workers write the checkpoint.
    """
    if signals.held:
        # A checkpoint could mix weights from before and after the optimizer step.
        return "the weights were being changed"
    for model in (components.policy, components.critic):
        if not isinstance(model, TrainingPolicy):
            continue
        group = model.group
        ranks = range(group.world_size)
        # The last signs of life are from before the wait was given up.
        group.supervisor.watch.ask(ranks, _ASK_S)
        for worker in group.health():
            # A worker takes one call at a time, so a save would wait behind this one.
            if worker.state != "idle":
                who = f"worker {worker.rank} of group {group.name!r}"
                doing = f" in method {worker.method!r}" if worker.method else ""
                return f"{who} is {worker.state}{doing}"
    return None
