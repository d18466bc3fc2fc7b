"""A custom generation backend: four methods, registered, selected by name."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_algorithms as rl
from rl_models import (
    GenerationBackend,
    get_generation_backend,
    register_generation_backend,
)


@register_generation_backend("custom")
class CustomGenerationBackend(GenerationBackend):
    """Samples one prompt after the other, with transformers alone."""

    def setup(self, config):
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"])
        self.tokenizer = AutoTokenizer.from_pretrained(config["tokenizer_name"])

    def generate(self, prompts, sampling_params):
        return [
            self._answer(prompt, sampling_params, seed)
            for prompt, seed in zip(prompts, sampling_params.seeds, strict=True)
        ]

    @torch.no_grad()
    def _answer(self, prompt, params, seed):
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        start, logprobs = len(ids), []
        generator = torch.Generator().manual_seed(seed)
        while len(logprobs) < params.max_new_tokens:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores = (logits / params.temperature).log_softmax(-1)
            token = torch.multinomial(scores.exp(), 1, generator=generator).item()
            ids.append(token)
            logprobs.append(scores[token].item())
            if token in params.stop_token_ids:
                break
        return {"token_ids": ids[start:], "logprobs": logprobs}

    def update_weights(self, state_dict):
        self.model.load_state_dict(state_dict, strict=False)  # tied weights come once

    def shutdown(self):
        pass


backend = get_generation_backend("custom")

result = rl.train(
    model=sys.argv[1],
    dataset=[{"prompt": f"{n}+"} for n in range(4)],
    reward_fn=lambda prompt, response: float("7" in response),
    max_num_steps=3,
    num_prompts_per_step=2,
    num_generations_per_prompt=4,
    max_new_tokens=4,
    lr=0.01,
    output_dir="run",
    **{"policy.generation.backend": "custom"},
)
