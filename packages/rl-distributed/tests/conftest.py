from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from rl_distributed.testing import local_ray

# The sample workers are named by module; worker groups pass this path on.
_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

# Other processes share the machine: the time of one example means nothing.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")


@pytest.fixture(scope="session")
def ray_cluster():
    with local_ray(num_cpus=2):
        yield
