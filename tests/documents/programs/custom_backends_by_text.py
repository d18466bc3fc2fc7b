"""Two custom backends: answers are text, and there are no log-probs."""

import sys

import torch
from transformers import AutoTokenizer

import rl_algorithms as rl
from rl_models import register_generation_backend, register_training_backend

CHARACTERS = [chr(code) for code in range(32, 127)]


class Guesser(torch.nn.Module):
    """One distribution over the tokens, whatever came before."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.zeros(128))

    def forward(self, ids):
        return self.scores.log_softmax(-1)[ids]


@register_training_backend("guesser")
class GuesserTraining:
    def setup(self, config):
        self.model = Guesser()
        rate = config["optimizer"]["kwargs"]["lr"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    def get_logprobs(self, batch):
        return self.model(batch["input_ids"])

    def train_step(self, batch, loss_fn):
        loss = loss_fn(batch, self.get_logprobs(batch))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def state_dict(self):
        return self.model.state_dict()

    def save_checkpoint(self, path):
        torch.save(self.model.state_dict(), f"{path}/state.pt")

    def load_checkpoint(self, path):
        self.model.load_state_dict(torch.load(f"{path}/state.pt"))

    def shutdown(self):
        pass


@register_generation_backend("guesser")
class GuesserGeneration:
    def setup(self, config):
        tokenizer = AutoTokenizer.from_pretrained(config["tokenizer_name"])
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in CHARACTERS]
        self.letters = [(c, i[0]) for c, i in zip(CHARACTERS, ids, strict=True) if i]
        self.scores = torch.zeros(128)

    def generate(self, prompts, sampling_params):
        chances = self.scores[[number for _, number in self.letters]].softmax(-1)
        answers = []
        for _, seed in zip(prompts, sampling_params.seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.multinomial(
                chances, sampling_params.max_new_tokens, True, generator=generator
            )
            answers.append("".join(self.letters[index][0] for index in drawn))
        return answers

    def update_weights(self, state_dict):
        self.scores = state_dict["scores"]

    def shutdown(self):
        pass


result = rl.train(
    model=sys.argv[1],
    dataset=[{"prompt": f"{n}+"} for n in range(8)],
    reward_fn=lambda prompt, response: response.count("7") / 4,
    max_num_steps=20,
    num_prompts_per_step=4,
    num_generations_per_prompt=16,
    max_new_tokens=4,
    lr=40.0,
    output_dir="run",
    backend="guesser",
    **{"policy.generation.backend": "guesser"},
)
