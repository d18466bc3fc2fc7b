"""The environment of `environments.py`: created as an actor by its path."""

from typing import TypedDict

import ray
import torch
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt


class GuessConfig(TypedDict):
    max_turns: int


class GuessMetadata(TypedDict):
    secret: int
    turn: int


@ray.remote
class GuessEnvironment(EnvironmentInterface[GuessMetadata]):
    """Says higher or lower until the number is guessed, or the turns are used up."""

    def __init__(self, cfg: GuessConfig):
        self.max_turns = cfg["max_turns"]

    def step(
        self,
        message_log_batch: list[LLMMessageLogType],
        metadata: list[GuessMetadata],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[GuessMetadata]:
        rows = zip(message_log_batch, metadata, strict=True)
        turns = [self._turn(log[-1]["content"], row) for log, row in rows]
        said, rewards, ends, guesses = zip(*turns, strict=True)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text in said],
            metadata=[{**row, "turn": row["turn"] + 1} for row in metadata],
            next_stop_strings=[["\n"]] * len(turns),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ends),
            answers=list(guesses) if return_extracted_answer else None,
        )

    def _turn(self, text, row):
        guess = int(text)
        if guess == row["secret"]:
            return "right", 1.0, True, text
        last = row["turn"] + 1 >= self.max_turns
        return "lower" if guess > row["secret"] else "higher", 0.0, last, text

    def global_post_process_and_metrics(self, batch: BatchedDataDict):
        rate = calculate_pass_rate_per_prompt(batch["text"], batch["total_reward"])
        return batch, {"accuracy": batch["total_reward"].mean().item(), "pass": rate}

    def shutdown(self):
        return True
