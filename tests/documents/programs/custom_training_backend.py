"""A custom training backend: six methods, registered, selected by name."""

import json
import sys
from pathlib import Path

import torch

import rl_algorithms as rl
from rl_models import TrainingBackend, get_training_backend, register_training_backend


@register_training_backend("custom")
class CustomTrainingBackend(TrainingBackend):
    """Predicts each token from the previous one."""

    def setup(self, config):
        model = json.loads(Path(config["model_name"], "config.json").read_text())
        size = model["vocab_size"]
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(size, 16), torch.nn.Linear(16, size)
        )
        rate = config["optimizer"]["kwargs"]["lr"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def get_logprobs(self, batch):
        ids = batch["input_ids"]
        logprobs = self.model(ids[:, :-1]).log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(chosen, (1, 0))

    def train_step(self, batch, loss_fn):
        loss = loss_fn(batch, self.get_logprobs(batch))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def save_checkpoint(self, path):
        state = {"model": self.model, "optimizer": self.optimizer}
        torch.save({k: v.state_dict() for k, v in state.items()}, f"{path}/state.pt")

    def load_checkpoint(self, path):
        state = torch.load(f"{path}/state.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def shutdown(self):
        pass


backend = get_training_backend("custom")

settings = {
    "model": sys.argv[1],
    "dataset": [{"prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(8)],
    "val_dataset": [{"prompt": "3+1=", "response": "4"}],
    "algorithm": "sft",
    "backend": "custom",
    "lr": 0.05,
    "train_global_batch_size": 8,
    "output_dir": "run",
    "save_period": 5,
    "val_at_end": True,
}
first = rl.train(**settings, max_num_steps=10)
resumed = rl.train(**settings, max_num_steps=20, resume=True)
whole = rl.train(**{**settings, "output_dir": "whole"}, max_num_steps=20)
