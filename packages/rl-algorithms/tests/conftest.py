"""One Ray and one tiny model for all tests of the package."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Deliver SIGHUP to runs even if the tests run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def ray_cluster():
    from rl_distributed.testing import local_ray  # noqa: PLC0415

    # Two CPUs beside those held by the pool below.
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="session")
def pool(ray_cluster):
    """Processes shared by all runs of one shape."""
    from rl_algorithms import KeptWorkers  # noqa: PLC0415

    with KeptWorkers() as kept:
        yield kept


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from rl_models.build.model import ModelBuildConfig, build_model  # noqa: PLC0415

    config = ModelBuildConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return build_model(config, tmp_path_factory.mktemp("model") / "tiny")
