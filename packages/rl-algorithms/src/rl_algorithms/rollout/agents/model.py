"""`ServedModel`: the policy as `PolicyServer` serves it to agents."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from rl_algorithms.data.types import Tokenizer
from rl_algorithms.rollout.agents.choices import ToolUse
from rl_algorithms.rollout.observations import ObservationEncoder
from rl_distributed.logs.logging import get_logger
from rl_envs.agents.tasks import AgentLimits
from rl_models.serving.errors import ApiError
from rl_models.types import SamplingParams

__all__ = ["ServedModel", "Settings"]

_logger = get_logger(__name__)
_MOST_ENCODERS = 64

# The run fixes the distribution of tokens, because the trainer computes log-probs under
# it. Requests that set these fields are answered, but the fields are ignored.
_OF_THE_RUN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "verbosity",
)


@dataclass(frozen=True)
class Settings:
    """Sampling parameters of the answers of a task."""

    greedy: bool = False
    sampling: SamplingParams | None = None
    """Overrides of the generator's parameters; None for none."""
    base: SamplingParams = field(default_factory=SamplingParams)
    """The complete parameters."""

    def limited(self, limit: int) -> tuple[bool, SamplingParams | None]:
        """Return the parameters of an answer of at most `limit` tokens."""
        if limit == self.base.max_new_tokens:
            return self.greedy, self.sampling
        return self.greedy, replace(self.base, max_new_tokens=limit)


class ServedModel:
    """The policy as agents see it; used in the policy server's thread.

    Args:
        tokenizer: The policy's tokenizer.
        limits: Limits of agents.
        row_limit: Maximum length of a row, prompt and answer together; None: no limit.
        use_chat_template: Whether to format messages with the chat template; None: if
            the tokenizer has one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: AgentLimits,
        row_limit: int | None,
        use_chat_template: bool | None,
    ) -> None:
        self.tokenizer, self.limits, self.row_limit = tokenizer, limits, row_limit
        self._use_chat_template = use_chat_template
        self._encoders: OrderedDict[str, ObservationEncoder] = OrderedDict()
        self._told: set[str] = set()

    def encoder(self, use: ToolUse) -> ObservationEncoder:
        """Return the renderer of messages for a policy with these tools."""
        # Popped and set again, which makes it the most recently used.
        found = self._encoders.pop(use.key, None)
        if found is None:
            found = ObservationEncoder(
                self.tokenizer,
                self._use_chat_template,
                tools=use.tools,
                branch=True,
            )
        self._encoders[use.key] = found
        if len(self._encoders) > _MOST_ENCODERS:
            # The least recently used one: agents may send other tools in each request.
            self._encoders.popitem(last=False)
        return found

    def check_name(self, fields: dict[str, Any]) -> None:
        """Reject a request for another model.

        Raises:
            ApiError: The model is unknown.
        """
        name = fields.get("model", self.limits.model_name)
        if name != self.limits.model_name:
            raise ApiError(
                404,
                f"The model {name!r} does not exist; the policy is called "
                f"{self.limits.model_name!r} (task.model, OPENAI_MODEL; "
                "env.settings.model_name changes it).",
                "model_not_found",
                param="model",
            )

    def without_sampling(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a request without fields that the run fixes; warn once per field."""
        given = [name for name in _OF_THE_RUN if fields.get(name) is not None]
        for name in given:
            if name not in self._told:
                self._told.add(name)
                _logger.info(
                    "agents set %s=%r: answers are sampled as policy.generation says",
                    name,
                    fields[name],
                )
        return {name: value for name, value in fields.items() if name not in given}
