import sys

from rl_algorithms import GRPOTrainer


def my_reward(prompt: str, response: str) -> float:
    return 1.0 if "correct" in response else 0.0


trainer = GRPOTrainer.from_pretrained(
    sys.argv[1],
    num_prompts_per_step=32,
)
trainer.fit(dataset="my-dataset", reward_fn=my_reward)
