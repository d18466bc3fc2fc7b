"""A complete environment, as in the guide to extensions, in a GRPO run."""

import sys

import torch

import rl_algorithms as rl
from rl_envs import EnvironmentInterface, EnvironmentReturn
from rl_envs.interfaces import last_response


class MyEnvironment(EnvironmentInterface):
    def _compute_rewards(self, message_log_batch):
        return [float("7" in last_response(log)) for log in message_log_batch]

    def step(self, message_log_batch, metadata):
        # Compute rewards
        rewards = self._compute_rewards(message_log_batch)

        return EnvironmentReturn(
            observations=[],
            metadata=[None] * len(message_log_batch),
            next_stop_strings=[None] * len(message_log_batch),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(message_log_batch), dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"mean_reward": batch["rewards"].mean().item()}


trainer = rl.GRPOTrainer.from_pretrained(
    sys.argv[1],
    max_num_steps=2,
    num_prompts_per_step=4,
    num_generations_per_prompt=4,
    max_new_tokens=4,
    generation={"backend": "huggingface"},
    reference_policy_kl_penalty=0.0,
)
data = [{"prompt": f"{n}+"} for n in range(8)]
result = trainer.fit(dataset=data, environment=MyEnvironment())
