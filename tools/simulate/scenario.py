"""`Scenario`: the shape of a simulated run, and its faults.

A scenario is determined by its seed. Its faults are listed, not drawn during the run,
so that a failing one can be shrunk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.settings import (
    ScheduleSettings,
    WaitLimits,
    WeightUpdates,
)
from rl_algorithms.asynchronous.workers import TRAINER, Worker

__all__ = ["Fault", "FaultKind", "Scenario", "draw_scenario"]

FaultKind = Literal[
    "dies",
    "vanishes",
    "hangs",
    "slow",
    "answers_twice",
    "answers_late",
    "old_version",
    "raises",
    "starts_badly",
    "never_starts",
    "noticed_late",
    "node_lost",
    "poison",
    "bad_step",
    "stop",
    "driver_killed",
]
_OF_WORKERS: tuple[FaultKind, ...] = (
    "dies",
    "vanishes",
    "hangs",
    "slow",
    "starts_badly",
    "never_starts",
    "noticed_late",
)
_OF_GENERATORS: tuple[FaultKind, ...] = (
    *_OF_WORKERS,
    "answers_twice",
    "answers_late",
    "old_version",
    "raises",
)
_OF_ENVIRONMENTS: tuple[FaultKind, ...] = (
    *_OF_WORKERS,
    "answers_twice",
    "answers_late",
    "raises",
)
_OF_TRAINER: tuple[FaultKind, ...] = (*_OF_WORKERS, "answers_twice")
LIMITS = WaitLimits(
    start_s=60.0,
    answer_s=60.0,
    score_s=20.0,
    load_s=20.0,
    step_s=60.0,
    save_s=60.0,
    # Far longer than anything may take: it must never be what ends a run.
    progress_s=20_000.0,
)


@dataclass(frozen=True)
class Fault:
    """A fault."""

    at_s: float
    kind: FaultKind
    worker: Worker | None = None
    """The worker affected; None: the driver, or a prompt."""
    number: int = 0
    """The poisoned prompt, the failing step, the strength of a slow-down, or the lower
    `max_staleness` with which a killed driver is resumed, plus one."""
    per_step: int = 0
    """Prompts per step with which a killed driver is resumed; 0: as before."""
    others: tuple[Worker, ...] = ()
    """Other workers on the same node."""


@dataclass(frozen=True)
class Scenario:
    """A simulated run."""

    seed: int
    num_prompts_per_step: int = 2
    num_generations: int = 2
    prompts_per_epoch: int = 8
    num_epochs: int = 1
    max_num_steps: int | None = None
    num_generators: int = 2
    num_environments: int = 1
    max_staleness: int = 1
    weight_updates: WeightUpdates = "between_answers"
    max_groups: int | None = None
    places: int = 4
    """Number of answers that a generator, or an environment, handles at a time."""
    checkpoint_period: int | None = 2
    faults: tuple[Fault, ...] = field(default=())

    @property
    def num_prompts(self) -> int:
        """Prompts of all epochs."""
        return self.prompts_per_epoch * self.num_epochs

    def settings(self, resumed: Fault | None = None) -> ScheduleSettings:
        """Return the settings of the schedule.

        Args:
            resumed: The kill after which the run is resumed with other settings.
        """
        stale, per_step = self.max_staleness, self.num_prompts_per_step
        if resumed is not None:
            stale = resumed.number - 1 if resumed.number else stale
            per_step = resumed.per_step or per_step
        return ScheduleSettings(
            num_prompts_per_step=per_step,
            num_generations_per_prompt=self.num_generations,
            prompts_per_epoch=self.prompts_per_epoch,
            max_num_epochs=self.num_epochs,
            max_num_steps=self.max_num_steps,
            num_generators=self.num_generators,
            num_environments=self.num_environments,
            max_staleness=stale,
            weight_updates=self.weight_updates,
            max_groups=self.max_groups,
            answers_per_generator=self.places,
            answers_per_environment=self.places,
            max_attempts=3,
            max_drops_in_row=64,
            checkpoint_period=self.checkpoint_period,
            restarts=RestartPolicy(max_restarts=3, backoff_s=1.0, max_backoff_s=8.0),
            limits=LIMITS,
        )

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers except the trainer."""
        return (
            *(Worker("generator", rank) for rank in range(self.num_generators)),
            *(Worker("environment", rank) for rank in range(self.num_environments)),
        )


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(seed)
    per_step = rng.randint(1, 3)
    per_epoch = rng.randint(1, 14)
    num_epochs = rng.randint(1, 2)
    staleness = rng.choice((0, 1, 1, 2, 3))
    few = rng.random() < 0.15
    scenario = Scenario(
        seed=seed,
        num_prompts_per_step=per_step,
        num_generations=rng.randint(1, 3),
        prompts_per_epoch=per_epoch,
        num_epochs=num_epochs,
        max_num_steps=rng.randint(1, 5) if rng.random() < 0.2 else None,
        num_generators=rng.randint(1, 3),
        num_environments=rng.randint(1, 2),
        max_staleness=staleness,
        weight_updates=rng.choice(("between_answers", "between_tokens")),
        max_groups=rng.randint(per_step, 3 * per_step) if few else None,
        places=rng.randint(1, 4),
        checkpoint_period=rng.choice((None, 1, 2, 3)),
    )
    # About the duration of a fault-free run, so that faults strike all parts of it.
    length_s = 15.0 + 9.0 * scenario.num_prompts / per_step
    num_faults = rng.choice((0, 1, 2, 3, 4, 6, 9))
    faults = [_draw_fault(rng, scenario, length_s) for _ in range(num_faults)]
    if rng.random() < 0.2:
        faults = _on_one_worker(rng, scenario, faults)
    changed: dict[str, object] = {"faults": tuple(sorted(faults, key=_when))}
    return Scenario(**{**vars(scenario), **changed})  # type: ignore[arg-type]


def _when(fault: Fault) -> float:
    return fault.at_s


def _on_one_worker(
    rng: random.Random, scenario: Scenario, faults: list[Fault]
) -> list[Fault]:
    """Return deaths of one worker instead of faults of many."""
    worker = rng.choice((*scenario.workers, TRAINER))
    return [Fault(fault.at_s, "dies", worker) for fault in faults]


def _draw_fault(rng: random.Random, scenario: Scenario, length_s: float) -> Fault:
    at_s = round(rng.uniform(0.0, length_s), 2)
    draw = rng.random()
    if draw < 0.02:
        return Fault(at_s, "stop")
    if draw < 0.04:
        return Fault(at_s, "bad_step", number=rng.randint(0, 4))
    if draw < 0.14:
        lower = rng.randint(0, scenario.max_staleness) + 1
        per_step = rng.randint(1, min(3, scenario.max_groups or 3))
        return Fault(
            at_s,
            "driver_killed",
            number=lower if rng.random() < 0.3 else 0,
            per_step=per_step if rng.random() < 0.2 else 0,
        )
    if draw < 0.20:
        return Fault(at_s, "poison", number=rng.randrange(scenario.num_prompts))
    if draw < 0.27:
        others = tuple(w for w in scenario.workers if rng.random() < 0.5)
        return Fault(at_s, "node_lost", TRAINER, others=others)
    strength = rng.choice((3, 10, 30))
    if draw < 0.42:
        return Fault(at_s, rng.choice(_OF_TRAINER), TRAINER, strength)
    if draw < 0.60:
        worker = Worker("environment", rng.randrange(scenario.num_environments))
        return Fault(at_s, rng.choice(_OF_ENVIRONMENTS), worker, strength)
    worker = Worker("generator", rng.randrange(scenario.num_generators))
    return Fault(at_s, rng.choice(_OF_GENERATORS), worker, strength)
