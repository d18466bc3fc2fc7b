"""`python -m benchmarks.logprob_memory`: peak memory of log-probs, whole and in chunks.

A step of training on packed tokens with a vocabulary of 152 k, each side in a process
of its own, one after the other: all logits at once, in chunks, and torch's chunked
`linear_cross_entropy`, which returns only a sum and no per-token log-probs. The peak is
the growth of resident memory during the step, of which 519 MiB are the gradient of the
head. One line of JSON per side, then the ratio of the first two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear_cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_models.logit_chunks import logit_chunk_size
from rl_models.ops.logprobs import token_logprobs
from rl_models.training.dtensor.chunked_head import ChunkedHead

VOCABULARY, HIDDEN = 151_936, 896
SIDES = ("whole", "chunked", "linear_cross_entropy")


def main() -> None:
    """Measure all sides, or the named one, in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, help="default: what is chosen by memory")
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.chunk is None:
        chosen = logit_chunk_size(None, options.tokens, VOCABULARY, on_gpu=False)
        options.chunk = chosen or options.tokens
    if options.side is not None:
        line = measure(options.side, options.tokens, options.chunk)
        sys.stdout.write(json.dumps(line) + "\n")
        return
    peaks = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.logprob_memory", "--side", side]
        command += ["--tokens", str(options.tokens), "--chunk", str(options.chunk)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sys.stdout.write(done.stdout)
        peaks[side] = json.loads(done.stdout)["peak_mib"]
    ratio = peaks["chunked"] / peaks["whole"]
    sys.stdout.write(json.dumps({"chunked_to_whole": round(ratio, 3)}) + "\n")


def measure(side: str, num_tokens: int, chunk_size: int) -> dict[str, Any]:
    """Run one step of a side; return its peak and its time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _model()
    tokens = torch.randint(0, VOCABULARY, (num_tokens,))
    _step(side, model, tokens[:16], chunk_size)  # one-off allocations
    model.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _resident("VmRSS"), time.process_time()
    loss = _step(side, model, tokens, chunk_size)
    taken = time.process_time() - start
    return {
        "side": side,
        "tokens": num_tokens,
        "loss": round(loss, 4),
        "gradient": round(float(model.lm_head.weight.grad.norm()), 6),
        "peak_mib": round((_resident("VmHWM") - before) / 1024),
        "cpu_s": round(taken, 1),
    }


def _model() -> Any:
    """Build one small layer between a frozen embedding and a trained head."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)
    return model


def _step(side: str, model: Any, tokens: Tensor, chunk_size: int) -> float:
    """Run forward and backward; return the sum of the negative log-probs."""
    inputs = {"input_ids": tokens[None, :-1], "use_cache": False}
    targets = tokens[1:]
    positions = torch.arange(len(targets))
    if side == "whole":
        logits = model(**inputs, logits_to_keep=positions).logits.squeeze(0)
        loss = -token_logprobs(logits, targets).sum()
        del logits
    elif side == "chunked":
        head = ChunkedHead(None, "the model", asked=True)
        found = head.logprobs(model, inputs, positions, targets, 1.0, chunk_size)
        loss = -found.sum()
    else:
        hidden = model.base_model(**inputs).last_hidden_state.squeeze(0)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size)
        weight = model.lm_head.weight
        loss = linear_cross_entropy(
            hidden, weight, targets, reduction="sum", options=options
        )
    loss.backward()
    return float(loss.detach())


def _resident(field: str) -> int:
    """Return KiB of resident memory, current or peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
