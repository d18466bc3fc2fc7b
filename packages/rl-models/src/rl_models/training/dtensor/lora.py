"""Low-rank adapters: base weights are frozen, two small matrices per layer are trained.

peft puts the adapters into the model. To the outside the model keeps its Hugging Face
names: weights are merged one tensor at a time when they are exported or saved, so that
generators, probes and folders need not know of adapters. With its adapters off the
model is the base, which saves a second copy as the reference policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_distributed.errors import CheckpointError, ConfigError
from rl_distributed.suggestion import did_you_mean
from rl_models.errors import ModelLoadError
from rl_models.lora_config import LoRAConfig
from rl_models.training.dtensor.weight_source import place_adapters
from rl_models.training.dtensor.whole_modules import train_modules
from rl_models.weights.adapters import file_name, plain_name, with_adapter

__all__ = ["Adapters"]

_A, _B = "lora_A.default.weight", "lora_B.default.weight"
_BASE = ".base_layer."
_HEADS = ("score.", "classifier.")


class Adapters:
    """The adapters of one model, which is changed in place.

    Args:
        model: A Hugging Face model, unsharded.
        layers: Its decoder layers.
        config: The adapters.
        name: The model's name, for messages.
        seed: Seed of `A`.

    Raises:
        ConfigError: No layer has a name of `target_modules` or `modules_to_save`, or
            peft takes it for experts.
        ModelLoadError: The folder of `adapter_path` is missing, damaged or of another
            model.
    """

    def __init__(
        self,
        model: Any,
        layers: Iterable[nn.Module],
        config: LoRAConfig,
        name: str,
        seed: int,
    ) -> None:
        self._config = config
        self._model_name = name
        targets = _targets(layers, config, name)
        self._peft = LoraConfig(
            r=config.r,
            # peft computes the scale as alpha / r, or alpha / sqrt(r).
            lora_alpha=config.scale * _divisor(config),  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=sorted({path.rpartition(".")[2] for path in targets}),
            use_rslora=config.use_rslora,
            base_model_name_or_path=name,
        )
        # All ranks must draw the same numbers, because their parts make up one adapter.
        # Forked, so that adapters do not shift the random numbers of training.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with place_adapters(model):
                inject_adapter_in_model(self._peft, model)
        _check_experts(model, config, name)
        for path, parameter in model.named_parameters():
            # peft freezes everything but adapters; a new scalar head must learn as
            # well.
            if path.startswith(_HEADS):
                parameter.requires_grad_(True)
        self._modules = train_modules(model, config, name)
        # Only what is saved: peft itself would put a trained copy beside each module,
        # under names that are not the model's.
        self._peft.modules_to_save = self._modules.paths or None
        # Else peft unties what it loads.
        self._peft.ensure_weight_tying = bool(self._modules.aliases)
        self.given: dict[str, Tensor] = {}
        """Whole parameters of `modules_to_save` in the folder of `adapter_path`."""
        if config.adapter_path is not None:
            self._load(model, Path(config.adapter_path).expanduser())
        self.keep_those_of(model)

    def keep_those_of(self, model: nn.Module) -> None:
        """Forget the layers that a model does not have any more: other stages do."""
        self._layers = [m for m in model.modules() if isinstance(m, LoraLayer)]

    @property
    def modules(self) -> list[str]:
        """Names of the parameters of `modules_to_save`."""
        return self._modules.names

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base alone."""
        # peft's own switch also toggles `requires_grad`, which sharded parameters do
        # not allow.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def merged(
        self, whole: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights with their adapters merged, one after the other.

        Args:
            whole: Whole parameters by their names in the model, a layer's base first
                and its `A` and `B` after it.
        """
        # One layer is held at a time: all merged weights would be a second model.
        base: tuple[str, Tensor] | None = None
        held: dict[str, Tensor] = {}
        for name, value in whole:
            if plain_name(name) is not None:
                if _BASE in name and name.endswith(".weight"):
                    base, held = (name.replace(_BASE, "."), value), {}
                else:
                    yield name.replace(_BASE, "."), value
                continue
            held["A" if name.endswith(_A) else "B"] = value
            if len(held) == 2 and base is not None:
                scale = self._config.scale
                yield base[0], with_adapter(base[1], held["A"], held["B"], scale)
                base = None

    def sources(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the parameters that each merged weight is made of, for `merge`.

        Args:
            names: All parameters, by their names in the model.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name in names:
            plain = plain_name(name)
            if plain is None:
                continue
            layer = name.removesuffix("base_layer.weight")
            pair = () if layer == name else (layer + _A, layer + _B)
            found[plain] = (name, *pair)
        return found

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a weight with its adapter, if it has one.

        Args:
            parts: The whole parameters that `sources` names.
        """
        if len(parts) == 1:
            return parts[0]
        base, a, b = parts
        return with_adapter(base, a, b, self._config.scale)

    def save(self, parts: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Write the adapters as peft does.

        Args:
            parts: Whole parameters; those of the base are skipped.
            folder: Target folder.

        Raises:
            CheckpointError: The disk is full or the folder cannot be written.
        """
        tensors = {
            file_name(name): value.detach().cpu().contiguous()
            for name, value in parts
            if plain_name(name) is None or name in self.modules
        }
        for alias, name in self._modules.aliases.items():
            # peft asks for both. A copy, since files have no shared tensors.
            tensors[file_name(alias)] = tensors[file_name(name)].clone()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / "adapter_model.safetensors")
            self._peft.save_pretrained(str(folder))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write the adapter to {folder}: {error}; free disk space or "
                "choose another checkpoint_dir"
            ) from error

    def reset(self, parameters: dict[str, nn.Parameter]) -> None:
        """Reset the adapted model to its base, by setting `B` to zero."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name.endswith(_B):
                    parameter.zero_()

    def _read(self, folder: Path) -> dict[str, Tensor]:
        """Read an adapter's tensors, and check its settings."""
        try:
            saved = PeftConfig.from_pretrained(str(folder))
            tensors: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
        except (OSError, ValueError, SafetensorError, json.JSONDecodeError) as error:
            raise ModelLoadError(
                f"policy.lora.adapter_path: cannot read an adapter from {folder}: "
                f"{error}; give a folder with adapter_config.json and "
                "adapter_model.safetensors"
            ) from error
        # Shapes would not show another alpha, which scales the adapter.
        for field in ("r", "lora_alpha", "use_rslora"):
            found, wanted = getattr(saved, field, None), getattr(self._peft, field)
            if found != wanted:
                raise ModelLoadError(
                    f"policy.lora does not fit the adapter in {folder}: its {field} is "
                    f"{found}, and the settings mean {wanted}; change policy.lora"
                )
        return tensors

    def _load(self, model: Any, folder: Path) -> None:
        tensors = self._read(folder)
        own = {
            file_name(name): parameter
            for name, parameter in model.named_parameters()
            if plain_name(name) is None
        }
        # An adapter trained without these modules has none of them: they begin as those
        # of the model.
        modules = {file_name(name): name for name in self.modules}
        optional = modules.keys() | {file_name(name) for name in self._modules.aliases}
        odd = sorted((own.keys() ^ tensors.keys()) - optional)
        if odd:
            raise ModelLoadError(
                f"the adapter in {folder} does not fit {self._model_name} with "
                "policy.lora.target_modules and modules_to_save: "
                f"{odd[0]} is only in one of the two"
            )
        # Their parameters have no memory yet, or are read from the model later.
        self.given = {
            modules[key]: tensors[key] for key in modules.keys() & tensors.keys()
        }
        whole = dict(model.named_parameters())
        own |= {key: whole[name] for key, name in modules.items() if name in self.given}
        for key, parameter in own.items():
            if parameter.shape != tensors[key].shape:
                raise ModelLoadError(
                    f"the adapter in {folder} does not fit {self._model_name}: "
                    f"{key} has shape {list(tensors[key].shape)}, and "
                    f"{list(parameter.shape)} is needed"
                )
        with torch.no_grad():
            for key in own.keys() - modules.keys():
                own[key].copy_(tensors[key])


def _divisor(config: LoRAConfig) -> float:
    return float(config.r**0.5 if config.use_rslora else config.r)


def _check_experts(model: nn.Module, config: LoRAConfig, name: str) -> None:
    """Refuse adapters of experts, which peft infers from names of linear layers.

    Experts are single parameters here, and their adapters would need other rules to be
    merged.
    """
    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            raise ConfigError(
                "policy.lora.target_modules must name no layers that peft takes for "
                f"experts, as gate_proj, up_proj and down_proj of {name} (at {path}): "
                f"got {config.target_modules or 'null, for all'}; name others, such as "
                "[q_proj, k_proj, v_proj, o_proj]"
            )


def _targets(layers: Iterable[nn.Module], config: LoRAConfig, name: str) -> set[str]:
    """Return the names, within a layer, of the linear layers that get an adapter."""
    linear = {
        path
        for layer in layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    if config.target_modules is None:
        return linear
    leaves = sorted({path.rpartition(".")[2] for path in linear})
    unknown = [target for target in config.target_modules if target not in leaves]
    if unknown:
        raise ConfigError(
            f"policy.lora.target_modules has {unknown[0]!r}, and no linear layer of "
            f"{name} is called so{did_you_mean(unknown[0], leaves)}; its layers have "
            f"{', '.join(leaves)}"
        )
    return {p for p in linear if p.rpartition(".")[2] in config.target_modules}
