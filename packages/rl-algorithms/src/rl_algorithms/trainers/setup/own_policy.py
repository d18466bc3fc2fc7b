"""`OwnPolicy`: a user's own policy, which trains and samples in the driver's process.

Such a policy may have just two methods, `generate(batch)` and `train(batch, loss_fn)`.
A run needs more than that. `OwnPolicy` adapts it: it makes one call per optimizer step,
counts weight versions, and checks the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.steps.training_rows import join_outputs
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_distributed.errors import BatchError
from rl_distributed.timing.timer import Timer
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import LossFunction, PolicyInterface
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
    TrainingRows,
)

__all__ = ["OwnPolicy", "check_own_policy", "samples_itself"]

_SAMPLED = (
    "output_ids",
    "generation_lengths",
    "unpadded_sequence_lengths",
    "truncated",
)


def samples_itself(policy: object) -> bool:
    """Return whether a policy samples and cannot send its weights to a generator."""
    return _has(policy, "generate") and not _has(policy, "start_weight_export")


def check_own_policy(config: TrainerConfig, policy: object, *, reference: bool) -> None:
    """Reject a run that needs methods which the policy does not have.

    Args:
        config: The run's configuration.
        policy: A policy that samples itself.
        reference: Whether the run compares with the initial weights.

    Raises:
        UnsupportedModelError: Methods are missing; the message names each one with a
            remedy.
    """
    asked = {
        "get_reference_policy_logprobs": (
            reference,
            "loss_fn.reference_policy_kl_penalty=0",
        ),
        "save_checkpoint": (
            config.checkpointing.enabled,
            "checkpointing.enabled=false",
        ),
    }
    missing = [
        f"{name} (not needed with {remedy})"
        for name, (is_asked, remedy) in asked.items()
        if is_asked and not _has(policy, name)
    ]
    if missing:
        raise UnsupportedModelError(
            f"this run needs {' and '.join(missing)} of {type(policy).__name__}: "
            "implement it, or change the setting"
        )


class OwnPolicy:
    """The policy and the generator of a run in one, so that no weights are sent.

    Args:
        policy: The user's policy. Its other methods are available here as well.
        sampling: Sampling parameters for calls without any.
    """

    def __init__(self, policy: PolicyInterface, sampling: SamplingParams) -> None:
        self.policy = policy
        self._sampling = sampling
        self._name = type(policy).__name__
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the policy."""
        if name == "policy":  # not set yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.policy, name)

    @property
    def weight_version(self) -> int:
        """Version of the weights: the policy's own count, or optimizer steps so far."""
        return int(getattr(self.policy, "weight_version", self._num_steps))

    def go_on_at(self, version: int) -> None:
        """Continue counting from the weight version of a checkpoint.

        A policy with its own count saves that count itself.
        """
        self._num_steps = version

    def train(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Train; a policy that takes no `global_batch_size` is called once per step.

        Raises:
            UnsupportedModelError: `eval_mode` is requested, but not supported.
            BatchError: The policy returns no loss.
        """
        optional = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "timer": timer,
        }
        arguments: dict[str, Any] = {
            name: value
            for name, value in optional.items()
            if value is not None and _takes(self.policy.train, name)
        }
        if eval_mode:
            self._require("train", "eval_mode", "train without held-out data")
            arguments["eval_mode"] = True
        size = global_batch_size or data.size
        parts = [data]
        if "global_batch_size" not in arguments and size < data.size:
            ends = range(size, data.size + 1, size)
            parts = [data.slice(end - size, end) for end in ends]
        outputs = []
        for part in parts:
            output = self.policy.train(part, loss_fn, **arguments)
            outputs.append(self._checked_loss(output))
            # One call may take several optimizer steps, and each makes a new version.
            self._num_steps += 0 if eval_mode else max(1, part.size // size)
        return join_outputs(outputs)

    def _checked_loss(self, output: Any) -> Mapping[str, Any]:
        if isinstance(output, Mapping) and "loss" in output:
            return output
        raise BatchError(
            f"{self._name}.train must return a mapping with the loss of the step, such "
            f"as {{'loss': 0.5}} or a TrainOutput: got {type(output).__name__}"
        )

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample; add the weight version to rows of a policy that does not.

        Raises:
            UnsupportedModelError: The call has settings that the policy cannot take.
            BatchError: Columns are missing in the result.
        """
        arguments: dict[str, Any] = {}
        if greedy:
            self._require("generate", "greedy", "validate with val_greedy=false")
            arguments["greedy"] = True
        if sampling is not None and _takes(self.policy.generate, "sampling"):
            arguments["sampling"] = sampling
        # The policy samples with its own settings, so only others need a parameter.
        elif sampling not in (None, self._sampling):
            self._require(
                "generate",
                "sampling",
                "leave val_temperature, val_top_p and val_top_k of policy.generation "
                "out",
            )
        output = self.policy.generate(data, **arguments)
        return self._with_versions(output, data.size)

    def _with_versions(self, output: Any, num_rows: int) -> GenerationOutput:
        found = output if isinstance(output, Mapping) else {}
        missing = [name for name in _SAMPLED if name not in found]
        if missing:
            raise BatchError(
                f"{self._name}.generate must return the columns of "
                f"GenerationOutputSpec: {', '.join(missing)} are missing in "
                f"{sorted(found) or type(output).__name__}"
            )
        rows: GenerationOutput = BatchedDataDict(dict(found))
        if rows.size != num_rows:
            raise BatchError(
                f"{self._name}.generate must return a row for each row: got "
                f"{rows.size} for {num_rows}"
            )
        if "weight_version" not in rows:
            rows["weight_version"] = torch.full((num_rows,), self.weight_version)
        return rows

    def _require(self, method: str, parameter: str, remedy: str) -> None:
        if not _takes(getattr(self.policy, method), parameter):
            raise UnsupportedModelError(
                f"{self._name}.{method} takes no {parameter}, which this run needs: "
                f"{remedy}, or give the method a parameter {parameter}"
            )


def _has(policy: object, name: str) -> bool:
    """Return whether a policy implements a method, instead of inheriting a refusal."""
    found = getattr(type(policy), name, None)
    return callable(found) and found is not getattr(PolicyInterface, name, None)


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters
