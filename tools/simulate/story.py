"""Sentences that describe a simulated run."""

from __future__ import annotations

from typing import Any

from tools.simulate.scenario import Fault

from rl_algorithms.asynchronous import actions as act, events as ev

__all__ = ["tell"]

_FAULTS = {
    "dies": "{0.worker} dies, and that is noticed",
    "vanishes": "{0.worker} vanishes without a word",
    "hangs": "{0.worker} hangs",
    "slow": "{0.worker} becomes {0.number} times as slow for a while",
    "answers_twice": "{0.worker} will say its next result twice",
    "answers_late": "{0.worker} will be too late with its next result",
    "old_version": "{0.worker} will confirm its next weights and keep the old ones",
    "raises": "{0.worker} will fail at its next two pieces of work",
    "starts_badly": "{0.worker} dies, and will not start well",
    "node_lost": "a node vanishes with {0.worker}{1}",
    "never_starts": "{0.worker} dies, and will never start again",
    "noticed_late": "{0.worker} dies, and that is noticed very late",
    "bad_step": "the trainer dies from now on whenever it trains step {0.number}",
    "stop": "somebody asks for an end",
    "poison": "prompt {0.number} becomes poison: it cannot be scored",
    "driver_killed": "the driver is killed and resumed{2}",
}
_EVENTS: dict[type[Any], str] = {
    ev.Begin: "the driver begins",
    ev.Tick: "a deadline has passed",
    ev.StopRequested: "a stop is requested: {0.reason}",
    ev.RunPaused: "the run is paused",
    ev.RunResumed: "the run goes on",
    ev.WorkerReady: "{0.worker} (start {0.incarnation}) has started",
    ev.TrainerReady: "the trainer (start {0.incarnation}) has started",
    ev.WorkerFailed: "{0.worker} (start {0.incarnation}) has failed: {0.reason}",
    ev.Answered: "{0.worker} has sampled task {0.task} with versions "
    "{0.oldest_version} to {0.newest_version}",
    ev.AnswerFailed: "{0.worker} could not sample task {0.task}: {0.reason}",
    ev.Scored: "{0.worker} has scored task {0.task}: {0.reward:.2f}",
    ev.ScoreFailed: "{0.worker} could not score task {0.task}: {0.reason}",
    ev.WeightsLoaded: "{0.worker} confirms version {0.version}",
    ev.StepTrained: "step {0.step} is trained",
    ev.CheckpointSaved: "the checkpoint after {0.step} steps is complete",
}
_ACTIONS: dict[type[Any], str] = {
    act.StartWorker: "start {0.worker} (start {0.incarnation})",
    act.StopWorker: "end {0.worker} (start {0.incarnation}): {0.reason}",
    act.RetireWorker: "give {0.worker} up: {0.reason}",
    act.LoadWeights: "{0.worker} is to load version {0.version}",
    act.Sample: "{0.worker} is to sample answer {0.name.sample} of prompt "
    "{0.prompt.number} (task {0.task})",
    act.Score: "{0.worker} is to score what task {0.rows} sampled (task {0.task})",
    act.Cancel: "{0.worker} is to end task {0.task}",
    act.Discard: "the rows of task {0.rows} are no longer kept",
    act.Train: "train step {0.step} on prompts {1}",
    act.SaveCheckpoint: "save a checkpoint after {0.step} steps",
    act.DropGroup: "prompt {0.prompt.number} is dropped: {0.reason}",
    act.Finish: "the run is done after {0.step} steps: {0.reason}",
    act.Fail: "the run fails: {0.reason}",
}


def tell(what: ev.Event | act.Action | Fault) -> str:
    """Return a sentence about an event, an action or a fault."""
    if isinstance(what, Fault):
        others = "".join(f" and {worker}" for worker in what.others)
        resumed = f" with max_staleness={what.number - 1}" if what.number else ""
        if what.per_step:
            resumed += f" with {what.per_step} prompts per step"
        return _FAULTS[what.kind].format(what, others, resumed)
    if type(what) in _EVENTS:
        return _EVENTS[type(what)].format(what)
    prompts = [g.prompt for g in what.groups] if isinstance(what, act.Train) else []
    return f"-> {_ACTIONS[type(what)].format(what, prompts)}"
