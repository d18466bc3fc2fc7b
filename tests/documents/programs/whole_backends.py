"""Two backends with their full protocols, on two ranks; they inherit from nothing."""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_algorithms as rl
from rl_distributed import BatchedDataDict
from rl_models import register_generation_backend, register_training_backend


@register_training_backend("data-parallel")
class DataParallelBackend:
    """A whole model on each rank; gradients are summed, as losses are shares."""

    def setup(
        self,
        config,
        *,
        init_reference_model=False,
        weights_path=None,
        optimizer_path=None,
    ):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.tokenizer_name = config["tokenizer"]["name"] or config["model_name"]
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"])
        self.reference = copy.deepcopy(self.model) if init_reference_model else None
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), **config["optimizer"]["kwargs"]
        )
        if weights_path or optimizer_path:
            self.load_checkpoint(weights_path, optimizer_path)

    def _sum(self, tensor):
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _logprobs(self, model, batch):
        ids = batch["input_ids"]  # right-padded, so no mask is needed
        scores = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None])[..., 0]

    def train_step(
        self, data, loss_fn, *, eval_mode=False, global_batch_size, micro_batch_size
    ):
        rows = (
            global_batch_size // self.world_size
        )  # of each global batch, in this rank's shard
        steps = {"loss": [], "grad_norm": [], "lr": []}
        metrics = {}
        for start in range(0, data.size, rows):
            loss = self._backward(
                data.slice(start, start + rows),
                loss_fn,
                micro_batch_size,
                eval_mode,
                metrics,
            )
            norm = 0.0
            if not eval_mode:
                for parameter in self.model.parameters():
                    self._sum(parameter.grad)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            steps["loss"].append(self._sum(torch.tensor(loss)).item())
            steps["grad_norm"].append(float(norm))
            steps["lr"].append(self.optimizer.param_groups[0]["lr"])
        columns = {name: torch.tensor(values) for name, values in steps.items()}
        return {**columns, "all_mb_metrics": metrics}

    def _backward(self, batch, loss_fn, micro_batch_size, eval_mode, metrics):
        counted = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        num_rows = self._sum(batch["sample_mask"].sum().float())
        num_tokens = self._sum(counted.sum().float())
        total = 0.0
        for start in range(0, batch.size, micro_batch_size):
            part = batch.slice(start, min(start + micro_batch_size, batch.size))
            with torch.set_grad_enabled(not eval_mode):
                logprobs = self._logprobs(self.model, part)
                # A log-prob that is not trained on has no effect on a step.
                logprobs = torch.where(part["token_mask"][:, 1:] != 0, logprobs, 0.0)
                loss, own = loss_fn(
                    part, num_rows, num_tokens, next_token_logprobs=logprobs
                )
            if not eval_mode:
                loss.backward()
            total += loss.item()
            for name, value in own.items():
                metrics.setdefault(name, []).append(value)
        return total

    @torch.no_grad()
    def get_logprobs(self, data, *, micro_batch_size, reference=False):
        model = self.reference if reference else self.model
        parts = [
            self._logprobs(
                model, data.slice(start, min(start + micro_batch_size, data.size))
            )
            for start in range(0, data.size, micro_batch_size)
        ]
        logprobs = torch.nn.functional.pad(torch.cat(parts), (1, 0))
        positions = torch.arange(logprobs.shape[1])
        return torch.where(positions < data["input_lengths"][:, None], logprobs, 0.0)

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        if self.rank:
            return
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
        self.model.save_pretrained(weights_path)
        tokenizer.save_pretrained(tokenizer_path or weights_path)
        if optimizer_path is not None:
            Path(optimizer_path).mkdir(parents=True, exist_ok=True)
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, f"{optimizer_path}/state.pt")

    def load_checkpoint(self, weights_path, optimizer_path=None):
        if optimizer_path is not None:
            state = torch.load(f"{optimizer_path}/state.pt")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            saved = AutoModelForCausalLM.from_pretrained(weights_path)
            self.model.load_state_dict(saved.state_dict())

    def export_weights(self, precision):
        for name, value in self.model.named_parameters():  # tied weights come once
            yield name, value.detach()

    def weight_specs(self):
        return {n: v.to("meta") for n, v in self.export_weights("float32")}

    def shutdown(self):
        if dist.is_initialized():
            dist.destroy_process_group()


@register_generation_backend("one-by-one")
class OneByOneBackend:
    """Samples one row after the other, with transformers alone."""

    @staticmethod
    def check_config(config, *, on_gpu):
        if config.top_k is not None or config.top_p < 1.0:
            raise ValueError("one-by-one samples without top_k and top_p")

    def setup(self, config, *, model_name, tokenizer_name=None, **context):
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(model_name)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name or model_name)
        self.stop_token_id = tokenizer.eos_token_id
        self.version = 0

    @torch.no_grad()
    def generate(self, data, *, greedy=False, sampling=None):
        settings = {**self.config, **({} if sampling is None else vars_of(sampling))}
        seeds = data.get("seeds", torch.arange(data.size))
        rows = [
            self._row(ids[:length].tolist(), seed, greedy, settings)
            for ids, length, seed in zip(
                data["input_ids"],
                data["input_lengths"].tolist(),
                seeds.tolist(),
                strict=True,
            )
        ]
        width = max(len(row["output_ids"]) for row in rows)
        fills = {"output_ids": 0, "logprobs": 0.0, "token_versions": -1}
        columns = {
            name: torch.tensor(
                [row[name] + [fill] * (width - len(row[name])) for row in rows]
            )
            for name, fill in fills.items()
        }
        totals = torch.tensor([len(row["output_ids"]) for row in rows])
        return BatchedDataDict(
            **columns,
            generation_lengths=totals - data["input_lengths"],
            unpadded_sequence_lengths=totals,
            truncated=torch.tensor([row["truncated"] for row in rows]),
            weight_version=torch.full((data.size,), self.version),
        )

    def _row(self, ids, seed, greedy, settings):
        generator = torch.Generator().manual_seed(seed)
        num_given = len(ids)
        logprobs = [0.0] * num_given
        temperature = 1.0 if greedy else settings["temperature"]
        is_done = False
        while not is_done and len(ids) < num_given + settings["max_new_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores = (logits / temperature).log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=generator)
            token = int(scores.argmax() if greedy else drawn)
            ids.append(token)
            logprobs.append(scores[token].item())
            is_done = token == self.stop_token_id
        versions = [-1] * num_given + [self.version] * (len(ids) - num_given)
        return {
            "output_ids": ids,
            "logprobs": logprobs,
            "token_versions": versions,
            "truncated": not is_done,
        }

    def load_weights(self, tensors, version):
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                own[name].copy_(value)
        self.version = version
        return version

    def shutdown(self):
        pass


def vars_of(sampling):
    """Return the settings of one call that are not left to the config."""
    names = ("temperature", "max_new_tokens")
    found = {name: getattr(sampling, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


if __name__ == "__main__":
    result = rl.train(
        model=sys.argv[1],
        dataset=[{"prompt": f"{n}+"} for n in range(8)],
        reward_fn=lambda prompt, response: float(response[:1].isdigit()),
        max_num_steps=12,
        num_prompts_per_step=4,
        num_generations_per_prompt=8,
        max_new_tokens=2,
        lr=0.02,
        output_dir="run",
        backend="data-parallel",
        **{
            "policy.generation.backend": "one-by-one",
            "cluster.workers_per_node": 2,
            "cluster.use_gpus": False,
        },
    )
