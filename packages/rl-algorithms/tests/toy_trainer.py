"""A trainer without Ray or a model, to test the loop alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.config import Config

POLICY = {"model_name": "toy", "train_global_batch_size": 2}


class ToySettings(Config):
    max_num_epochs: int | None = 2
    max_num_steps: int | None = None
    val_period: int = 0
    val_at_start: bool = False
    val_at_end: bool = False
    goal: float | None = None


class ToyConfig(TrainerConfig):
    toy: ToySettings = Field(default_factory=ToySettings)


class ToyPolicy:
    """A policy whose weight is a function of all batches in order."""

    def __init__(self):
        self.weight = 1
        self.closed = False

    def train(self, batch):
        self.weight = (self.weight * 31 + sum(batch)) % 1_000_003
        return self.weight

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        Path(weights_path).mkdir(parents=True)
        Path(weights_path, "w.json").write_text(json.dumps(self.weight))
        if optimizer_path is not None:
            Path(optimizer_path).mkdir(parents=True)

    def load_checkpoint(self, weights_path, optimizer_path=None):
        self.weight = json.loads(Path(weights_path, "w.json").read_text())

    def shutdown(self):
        self.closed = True


class ToyLoader:
    def __init__(self, rows, size):
        self.rows, self.size, self.position = rows, size, 0

    def __len__(self):
        return len(self.rows) // self.size

    def __iter__(self):
        while self.position < len(self.rows):
            start = self.position
            self.position += self.size
            yield self.rows[start : self.position]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class ToyTrainer(BaseTrainer[ToyConfig]):
    algorithm: ClassVar[str] = "toy"
    config_class: ClassVar[type[ToyConfig]] = ToyConfig
    in_step: Any = None
    in_training: Any = None

    def _limits(self):
        return self.config.toy.max_num_epochs, self.config.toy.max_num_steps

    def _validation_schedule(self):
        s = self.config.toy
        return ValidationSchedule(s.val_period, -1, s.val_at_start, s.val_at_end)

    def _early_stop(self):
        goal = self.config.toy.goal
        return EarlyStop() if goal is None else EarlyStop("val:accuracy", goal)

    def _load_data(self, dataset, val_dataset):
        return ToyLoader(dataset, 2), val_dataset

    def _train_step(self, batch):
        with self.phase("generation"):
            if self.in_step:
                self.in_step(self)
        with self.phase("policy_training"):
            weight = self.components.policy.train(batch)
            if self.in_training:
                self.in_training(self)
        return {"loss": weight, "num_samples": len(batch), "num_tokens": 10}

    def _validate(self, loader):
        return ValidationResult({"accuracy": loader[self.state.step]})


class Recorder(Callback):
    def __init__(self):
        self.calls = []
        self.steps_seen = 0

    def on_train_begin(self, trainer, step):
        self.calls.append("train_begin")

    def on_train_end(self, trainer, step):
        self.calls.append("train_end")

    def on_epoch_begin(self, trainer, epoch):
        self.calls.append(f"epoch_begin {epoch}")

    def on_epoch_end(self, trainer, epoch, metrics):
        self.calls.append(f"epoch_end {epoch}")

    def on_step_begin(self, trainer, step):
        self.calls.append(f"step_begin {step}")

    def on_step_end(self, trainer, step, metrics):
        self.steps_seen += 1
        self.calls.append(f"step_end {step}")

    def on_phase(self, trainer, steps_done, phase, step, total):
        self.calls.append(f"{phase} {step}/{total}")

    def on_validation_begin(self, trainer, step):
        self.calls.append("validation_begin")

    def on_validation_end(self, trainer, step, metrics):
        self.calls.append(f"validation_end {metrics['val:accuracy']}")

    def on_checkpoint(self, trainer, step, path):
        self.calls.append(f"checkpoint {path.name}")

    def on_exception(self, trainer, step, error):
        self.calls.append(f"exception {type(error).__name__}")

    def state_dict(self):
        return {"steps_seen": self.steps_seen}

    def load_state_dict(self, state):
        self.steps_seen = state["steps_seen"]
