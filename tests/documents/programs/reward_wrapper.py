"""FunctionalRewardWrapper, for more control."""

from rl_envs import FunctionalRewardWrapper


def score(prompt: str, response: str) -> float:
    return len(response) / 10 + (0.5 if prompt in response else 0.0)


def batch_reward(prompts: list[str], responses: list[str]) -> list[float]:
    return [score(p, r) for p, r in zip(prompts, responses)]  # noqa: B905


env = FunctionalRewardWrapper(batch_reward, name="batch_scorer")
rewards = env.step({"prompt": ["a", "b"], "response": ["abc", "xy"]}).rewards
