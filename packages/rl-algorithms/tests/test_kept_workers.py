"""Processes that one training leaves for the next."""

from __future__ import annotations

from contextlib import ExitStack

import psutil
import pytest

import rl_algorithms as rl
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.config import EnvConfig
from rl_algorithms.trainers.setup.component_start import start_components
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_distributed import ClusterConfig

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
ONE, TWO = ClusterConfig(), ClusterConfig(workers_per_node=2)


def lives(pid: int) -> bool:
    """Return whether a process runs; an unreaped zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Part:
    """Records when it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    def shutdown(self) -> None:
        self.closed.append(self.name)


def filled(pool: rl.KeptWorkers, closed: list[str]) -> None:
    for name in ("cluster", "policy", "environment"):
        pool.parts[name] = Part(name, closed)
        pool.closing.callback(pool.parts[name].shutdown)


def test_what_is_kept_serves_the_same_cluster_only() -> None:
    closed: list[str] = []
    pool = rl.KeptWorkers()
    assert not pool.kept_for(ONE, ("policy",))
    filled(pool, closed)
    assert pool.kept_for(ClusterConfig(), ("policy",))
    assert not closed
    assert not pool.kept_for(TWO, ("policy",))
    assert closed == ["environment", "policy", "cluster"]
    filled(pool, closed)
    # A second group needs a different share of each bundle.
    assert not pool.kept_for(TWO, ("policy", "teacher"))
    assert len(closed) == 6
    filled(pool, closed)
    # The slot of one model is not free for another.
    assert not pool.kept_for(TWO, ("policy", "critic"))
    assert len(closed) == 9
    pool.close()
    assert len(closed) == 9


def test_an_environment_is_kept_for_its_own_section_only() -> None:
    closed: list[str] = []
    with rl.KeptWorkers() as pool:
        sorting = EnvConfig(name="sorting")
        assert not pool.keeps_environment(sorting)
        filled(pool, closed)
        assert pool.keeps_environment(EnvConfig(name="sorting"))
        assert not pool.keeps_environment(EnvConfig(name="sorting", num_workers=2))
        assert closed == ["environment"]
        assert "environment" not in pool.parts
        # A stage without an environment, then one with the last section again.
        assert not pool.keeps_environment(None)
        assert not pool.keeps_environment(sorting)


def test_an_environment_object_is_left_to_its_maker() -> None:
    closed: list[str] = []

    class Own(Part):
        def step(self) -> None:
            """Do nothing; having a `step` makes it an environment."""

    own = Own("own", closed)
    config = rl.GRPOConfig.from_dict({"policy": {"model_name": "m"}})
    config = config.replace(env=EnvConfig(name="sorting"))
    with rl.KeptWorkers() as pool:
        for _ in range(2):
            parts = start_components(
                config,
                Components(policy=object()),
                Needs(environment=True),
                ExitStack(),
                checkpoint=None,
                environment=own,
                signals=SignalGuard(),
                pool=pool,
            )
            assert parts.environment is own
        assert "environment" not in pool.parts
    assert not closed


@pytest.mark.usefixtures("ray_cluster")
def test_trainers_hand_on_their_processes(tiny_model, tmp_path) -> None:
    pids: list[list[int]] = []

    class Pids(rl.Callback):
        def on_train_begin(self, trainer, step):
            pids.append(trainer.components.policy.group.worker_pids)

    def train(pool: rl.KeptWorkers, name: str, **cluster: int) -> None:
        config = rl.SFTConfig.from_dict(
            {
                "policy": {
                    "model_name": str(tiny_model),
                    "train_global_batch_size": 4,
                    "max_total_sequence_length": 16,
                },
                "cluster": cluster,
                "sft": {"max_num_steps": 1},
                "output_dir": str(tmp_path / name),
            }
        )
        rl.SFTTrainer(config, pool=pool).fit(dataset=ROWS, callbacks=[Pids()])

    with rl.KeptWorkers() as pool:
        train(pool, "first")
        train(pool, "second")
        train(pool, "two_workers", workers_per_node=2)
        alive = [lives(pid) for pid in (*pids[1], *pids[2])]
    assert pids[0] == pids[1]
    assert len(set(pids[2])) == 2
    assert not set(pids[1]) & set(pids[2])
    assert alive == [False, True, True]
    assert not any(lives(pid) for pid in pids[2])
