"""Modules that are trained whole beside adapters: `policy.lora.modules_to_save`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean
from rl_models.lora_config import LoRAConfig

__all__ = ["WholeModules", "train_modules"]


@dataclass(frozen=True, slots=True)
class WholeModules:
    """What is trained whole."""

    paths: list[str]
    """Paths of the modules: of a bare name peft takes all that end so, such as
    `input_layernorm` for `norm`."""
    names: list[str]
    """Names of the parameters, tied ones once."""
    aliases: dict[str, str]
    """Their names by the further ones of those that are tied."""


def train_modules(model: Any, config: LoRAConfig, name: str) -> WholeModules:
    """Have the parameters of `modules_to_save` trained.

    In place, so that they are cut, sharded, sent and saved as those of a model without
    adapters.

    Args:
        model: The model, with its adapters.
        config: Section `policy.lora`.
        name: The model's name, for messages.

    Raises:
        ConfigError: No module has such a name, or it has layers with an adapter.
    """
    chosen: set[int] = set()
    paths: list[str] = []
    for wanted in config.modules_to_save or ():
        ending = f".{wanted}"
        found = {p: m for p, m in model.named_modules() if f".{p}".endswith(ending)}
        if not found:
            plain = (p for p, module in model.named_modules() if _is_plain(module))
            own = sorted({path.rpartition(".")[2] for path in plain})
            raise ConfigError(
                f"policy.lora.modules_to_save has {wanted!r}, and no module of {name} "
                f"is called so{did_you_mean(wanted, own)}; it has {', '.join(own)}"
            )
        paths += found
        for module in found.values():
            if any(isinstance(part, LoraLayer) for part in module.modules()):
                raise ConfigError(
                    "policy.lora.modules_to_save must name no module that has layers "
                    f"with an adapter: got {wanted!r}; name others, or leave it out of "
                    "policy.lora.target_modules"
                )
            chosen |= {id(parameter) for parameter in module.parameters()}
    names = [path for path, p in model.named_parameters() if id(p) in chosen]
    first = {id(p): path for path, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {
        path: first[id(p)]
        for path, p in every
        if id(p) in chosen and path != first[id(p)]
    }
    for parameter in model.parameters():
        if id(parameter) in chosen:
            parameter.requires_grad_(True)
    return WholeModules(paths, names, aliases)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has weights of its own and no adapter."""
    own = dict(module.named_parameters(recurse=False))
    return bool(own) and not isinstance(module, LoraLayer)
