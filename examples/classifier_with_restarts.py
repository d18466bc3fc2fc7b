"""Training that goes on after a worker was killed, to the same result.

Two workers train one small classifier together: each computes the gradients of half a
batch, and gloo averages them. The program trains it twice. The second time it kills a
worker in the middle of a step: the group is restarted, reads the newest checkpoint and
goes on from there. Both runs end with the same weights, bit for bit.

    python examples/classifier_with_restarts.py
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rl_distributed import (
    CheckpointManager,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartGroup,
    WorkerDiedError,
    init_ray,
)
from rl_distributed.checkpoint import CheckpointingConfig
from rl_distributed.collectives import process_group

NUM_WORKERS = 2
NUM_STEPS = 60
SAVE_EVERY = 10
KILL_AT = 37
BATCH_SIZE = 64
NUM_CLASSES = 3


class ClassifierWorker:
    """Trains a copy of the classifier, in step with the other workers."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank, self.world_size = (
            int(os.environ[n]) for n in ("RANK", "WORLD_SIZE")
        )
        self.model = torch.nn.Sequential(
            torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, NUM_CLASSES)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.scope = process_group("gloo", deadline_s=60)
        self.scope.__enter__()

    def train_step(self, step: int) -> float:
        """One step on the batch of this number; returns the loss of all workers."""
        points_B2, classes_B = spirals(seed=step)
        own = slice(self.rank, None, self.world_size)
        loss = torch.nn.functional.cross_entropy(
            self.model(points_B2[own]), classes_B[own]
        )
        self.optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for tensor in (total, *(p.grad for p in self.model.parameters())):
            torch.distributed.all_reduce(tensor)
            tensor /= self.world_size
        self.optimizer.step()
        return total.item()

    def save(self, path: str) -> None:
        """Write weights and momentum; all workers have the same, one of them writes."""
        if self.rank == 0:
            np.savez(path, **{k: v.numpy() for k, v in self._tensors().items()})

    def load(self, path: str) -> None:
        """Take up what `save` wrote."""
        with np.load(path, allow_pickle=False) as saved, torch.no_grad():
            for parameter in self.model.parameters():
                buffer = torch.zeros_like(parameter)
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
            for name, tensor in self._tensors().items():
                tensor.copy_(torch.from_numpy(saved[name]))

    def accuracy(self) -> float:
        """Share of points of an unseen batch that are classified rightly."""
        points_B2, classes_B = spirals(seed=-1)
        return (self.model(points_B2).argmax(1) == classes_B).float().mean().item()

    def digest(self) -> str:
        """Return a short name of the weights: equal if and only if they are."""
        bytes_ = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(bytes_).hexdigest()[:16]

    def _tensors(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self.model.parameters()):
            named[f"weight_{index}"] = parameter.detach()
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            zeros = torch.zeros_like(parameter)
            named[f"momentum_{index}"] = zeros if momentum is None else momentum
        return named


def spirals(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [B, 2] on three arms of a spiral, and the arm [B] of each."""
    random = np.random.default_rng(seed + 1)
    classes = random.integers(NUM_CLASSES, size=BATCH_SIZE)
    radius = random.uniform(0.1, 1.0, BATCH_SIZE)
    angle = 2.0 * radius + classes * 2 * np.pi / NUM_CLASSES
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) * 2
    return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(classes)


def train(cluster: RayVirtualCluster, folder: Path, kill_at: int | None) -> str:
    """Train once; returns the digest of the weights."""
    checkpoints = CheckpointManager(CheckpointingConfig(), folder)
    position = {"step": 0}

    def restore(group: RayWorkerGroup, ranks: Sequence[int]) -> None:
        newest = checkpoints.get_latest_checkpoint_path()
        assert newest is not None, "there is one of step 0"
        results(group, "load", path=str(newest / "state.npz"))
        position["step"] = checkpoints.load_training_info(newest)["step"]
        print(f"  workers {list(ranks)} are new; all go on from {newest.name}")

    policy = RestartGroup(max_restarts=3, on_restart=restore)
    with RayWorkerGroup(
        cluster, RayWorkerBuilder(ClassifierWorker), failure_policy=policy
    ) as group:
        save(group, checkpoints, 0)
        while position["step"] < NUM_STEPS:
            step = position["step"]
            call = group.run_all_workers_single_data("train_step", step=step)
            if step == kill_at:
                kill_at = None
                os.kill(group.worker_pids[1], signal.SIGKILL)
            try:
                losses = group.get_all_worker_results(call, deadline_s=60)
            except WorkerDiedError as error:
                # The group has restarted, and `restore` has set the step.
                print(f"  in step {step}: {str(error).partition(' (')[0]} died")
                continue
            position["step"] = step + 1
            if (step + 1) % SAVE_EVERY == 0:
                print(f"  step {step + 1}: loss {losses[0]:.3f}")
                save(group, checkpoints, step + 1)
        accuracy, *_ = results(group, "accuracy")
        digest, *others = results(group, "digest")
        assert others == [digest] * len(others)
        print(f"  accuracy {accuracy:.2f}, weights {digest}")
    return digest


def save(group: RayWorkerGroup, checkpoints: CheckpointManager, step: int) -> None:
    """Write a checkpoint: whole, or not at all."""
    with checkpoints.writing(step, {"step": step}) as path:
        results(group, "save", path=str(path / "state.npz"))


def results(group: RayWorkerGroup, method: str, **arguments: object) -> list:
    """Call all workers and wait for them."""
    call = group.run_all_workers_single_data(method, **arguments)
    return group.get_all_worker_results(call, deadline_s=60)


def main() -> None:
    """Train twice and compare."""
    init_ray(num_cpus=NUM_WORKERS)
    with (
        tempfile.TemporaryDirectory() as folder,
        RayVirtualCluster([NUM_WORKERS], use_gpus=False) as cluster,
    ):
        print("undisturbed:")
        expected = train(cluster, Path(folder) / "undisturbed", None)
        print(f"one worker is killed in step {KILL_AT}:")
        actual = train(cluster, Path(folder) / "disturbed", KILL_AT)
    if actual != expected:
        raise SystemExit("the two runs end with different weights")
    print("both runs end with the same weights")


if __name__ == "__main__":
    main()
