"""A toy run whose limits and periods can be changed, here and from another process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from pydantic import Field
from toy_trainer import POLICY, ToyPolicy, ToyTrainer

from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings

ROWS = list(range(40))
ACCURACIES = [0.1] * 60


class LiveSettings(RunSettings):
    goal: float | None = None


class LiveConfig(TrainerConfig):
    toy: LiveSettings = Field(default_factory=LiveSettings)


class LivePolicy(ToyPolicy):
    """Its weight depends on the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.settings = {"lr": 1e-5, "weight_decay": 0.01}
        self.rates, self.decays = [], []

    def change_optimizer(self, **settings):
        self.settings |= settings

    def train(self, batch):
        self.rates.append(self.settings["lr"])
        self.decays.append(self.settings["weight_decay"])
        return super().train([*batch, round(self.settings["lr"] * 1e9)])


class LiveTrainer(ToyTrainer):
    algorithm = "live"
    config_class = LiveConfig

    def _validation_schedule(self):
        s = self.config.toy
        return ValidationSchedule(s.val_period, -1, s.val_at_start, s.val_at_end)

    def _early_stop(self):
        return EarlyStop()


class At(Callback):
    """Runs a function in one hook of one step."""

    def __init__(self, step, do, hook="on_step_end"):
        self.step, self.do = step, do
        setattr(self, hook, self._call)

    def _call(self, trainer, *_):
        if trainer.state.step == self.step:
            self.do(trainer)


def make(folder, policy=None, **settings):
    values = {
        "policy": POLICY,
        "toy": {"val_period": 0, "max_num_epochs": 2},
        "checkpointing": {"save_period": 4},
        "output_dir": str(folder),
        **settings,
    }
    return LiveTrainer(
        values, policy=policy or LivePolicy(), cluster=object(), tokenizer=object()
    )


def kill(trainer):
    signal.raise_signal(signal.SIGKILL)


def updating(trainer):
    trainer.update_config({"lr": 2e-5, "max_num_steps": 12}, by="the test")


if __name__ == "__main__":
    # A run killed in its eleventh step, after updates at two points.
    make(Path(sys.argv[1])).fit(
        ROWS,
        callbacks=[
            At(3, updating),
            At(9, lambda t: t.update_config({"lr": 4e-5}, by="later")),
            At(11, kill),
        ],
        progress=False,
    )
