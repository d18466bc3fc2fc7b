from __future__ import annotations

from typing import Any

import pytest

from rl_distributed.errors import ConfigError, RegistryError
from rl_envs import (
    SortingConfig,
    SortingEnvironment,
    create_env,
    env_registry,
    register_env,
)


def test_the_entry_point_is_found() -> None:
    assert "sorting" in env_registry.names()
    assert isinstance(create_env("sorting"), SortingEnvironment)
    environment = create_env("sorting", SortingConfig(credit="positions"))
    assert isinstance(environment, SortingEnvironment)
    assert environment.config.credit == "positions"


def test_a_class_without_a_config_is_made_with_keywords() -> None:
    class Plain(SortingEnvironment):
        config_class = None  # type: ignore[assignment]

        def __init__(self, size: int = 1) -> None:
            super().__init__()
            self.size = size

    register_env("plain_for_test")(Plain)
    environment = create_env("plain_for_test", {"size": 3})
    assert isinstance(environment, Plain)
    assert environment.size == 3
    with pytest.raises(ConfigError, match=r"'plain_for_test' cannot be created with"):
        create_env("plain_for_test", {"siez": 3})


def test_mistakes_are_named() -> None:
    with pytest.raises(RegistryError, match=r"unknown environment 'sortng'.*sorting"):
        create_env("sortng")
    with pytest.raises(RegistryError, match="registered already"):

        @register_env("sorting")
        def other() -> Any:
            return None

    register_env("nothing_for_test")(lambda: None)
    with pytest.raises(ConfigError, match="must be an EnvironmentInterface"):
        create_env("nothing_for_test")
