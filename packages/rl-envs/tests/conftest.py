"""One Ray for all tests of this package."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from rl_distributed.testing import local_ray

# A busy machine must not fail a property.
hypothesis.settings.register_profile("rl_envs", deadline=None)
hypothesis.settings.load_profile("rl_envs")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield
