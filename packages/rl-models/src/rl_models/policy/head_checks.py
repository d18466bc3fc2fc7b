"""Checks that calls fit the head of a model, in the driver and before any worker."""

from __future__ import annotations

from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.loss_traits import LossTraits
from rl_models.types import LossInputType

__all__ = ["check_lm_head", "check_loss_fits_head", "check_scalar_head"]


def check_lm_head(config: PolicyConfig, what: str) -> None:
    """Refuse a call that needs a language-model head.

    Raises:
        ConfigError: The model has a scalar head.
    """
    if config.head != "lm":
        raise ConfigError(
            f"{what} needs policy.head lm: got {config.head!r}, whose model gives "
            "numbers and no log-probs; use get_values, or a policy with head lm"
        )


def check_scalar_head(config: PolicyConfig, what: str) -> None:
    """Refuse a call that needs a scalar head.

    Raises:
        ConfigError: The model has a language-model head.
    """
    if config.head == "lm":
        raise ConfigError(
            f"{what} needs policy.head value or reward: got 'lm', whose model gives "
            "log-probs and no values; build the policy with head='value'"
        )


def check_loss_fits_head(config: PolicyConfig, loss_fn: object) -> None:
    """Refuse a loss whose input the head does not provide.

    Raises:
        ConfigError: It does not fit.
    """
    name = type(loss_fn).__name__
    kind = LossTraits.of(loss_fn).input_type
    what = f"the loss {name} (input_type {kind.value!r})"
    if kind is LossInputType.VALUE:
        check_scalar_head(config, what)
    else:
        check_lm_head(config, what)
