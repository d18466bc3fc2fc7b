"""A rank that dies while the others wait for it in a collective."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import WorkerDiedError
from rl_models.config import PolicyConfig
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.testing import TokenCrossEntropy

pytestmark = pytest.mark.slow

# A measured limit: it is the promise. Usually it takes about two seconds.
RELEASED_S = 10.0


class Fatal(TokenCrossEntropy):
    """Kills one rank as it computes its loss; the others go on."""

    def __call__(self, *arguments, **inputs):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*arguments, **inputs)


@pytest.mark.parametrize(
    "parallelism", [{"tensor": 2}, {"data": 2}, {"context": 2}, {"pipeline": 2}]
)
def test_the_others_are_released_with_the_cause(
    ray_cluster, tiny_model, make_batch, parallelism
):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        config = PolicyConfig.from_dict(
            {
                "model_name": str(tiny_model),
                "max_total_sequence_length": 32,
                "parallelism": parallelism,
            }
        )
        policy = TrainingPolicy(cluster, config)
        processes = [psutil.Process(worker.pid) for worker in policy.group.health()]
        policy.get_logprobs(make_batch(4))  # whatever is built at first use is there
        began = time.monotonic()
        with pytest.raises(
            WorkerDiedError, match=r"(?s)worker 1 of group 'policy'.*SIGKILL"
        ):
            policy.train(make_batch(4), Fatal())
        assert time.monotonic() - began < RELEASED_S
        # The rank that waited is not left in its collective.
        _, left = psutil.wait_procs(processes, 60)
        assert left == []
        policy.shutdown()
