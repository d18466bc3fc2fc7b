import sys

import torch

import rl_models
from rl_algorithms import GRPOTrainer
from rl_distributed import BatchedDataDict
from rl_models.interfaces import PolicyInterface

MODEL = sys.argv[1]


class CustomPolicy(PolicyInterface):
    def __init__(self):
        self.model = rl_models.load_causal_lm(MODEL)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)

    def logprobs(self, ids):
        logits = self.model(input_ids=ids[:, :-1]).logits
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]

    def generate(self, batch):
        # Custom generation logic: two tokens per row
        num_rows, lengths = len(batch["input_ids"]), batch["input_lengths"]
        rows, at = torch.arange(num_rows), lengths.clone()
        ids = torch.nn.functional.pad(batch["input_ids"], (0, 2))
        logprobs = torch.zeros(ids.shape)
        for _ in range(2):
            with torch.no_grad():
                logits = self.model(input_ids=ids).logits[rows, at - 1]
            chosen = torch.distributions.Categorical(logits=logits)
            ids[rows, at] = chosen.sample()
            logprobs[rows, at] = chosen.log_prob(ids[rows, at])
            at += 1
        return BatchedDataDict(
            output_ids=ids,
            logprobs=logprobs,
            generation_lengths=at - lengths,
            unpadded_sequence_lengths=at,
            truncated=torch.zeros(num_rows, dtype=torch.bool),
        )

    def train(self, batch, loss_fn):
        # Custom training logic: one optimizer step
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        logprobs = self.logprobs(batch["input_ids"]) * (batch["token_mask"][:, 1:] != 0)
        loss, _ = loss_fn(
            batch, batch["sample_mask"].sum(), mask.sum(), next_token_logprobs=logprobs
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


policy = CustomPolicy()
trainer = GRPOTrainer(
    policy,
    model_name=MODEL,  # names the tokenizer
    num_prompts_per_step=4,
    num_generations_per_prompt=8,
    max_num_steps=20,
    max_new_tokens=2,
    reference_policy_kl_penalty=0,
    checkpointing={"enabled": False},
    output_dir="run",
)
result = trainer.train(
    [{"prompt": text} for text in ("1", "12", "2", "21")] * 4,
    reward_fn=lambda prompt, response: response.count("7") / 2,
    progress=False,
)
