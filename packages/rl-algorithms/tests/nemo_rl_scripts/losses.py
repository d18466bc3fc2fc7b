"""A script written for NeMo RL: two losses, an estimator and a checkpoint."""

import json
import sys

import torch
from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
from nemo_rl.algorithms.loss import ClippedPGLossFn, DPOLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.timer import Timer


class EstimatorConfig:
    use_leave_one_out_baseline = True
    normalize_rewards = True

    def __init__(self):
        self.use_leave_one_out_baseline = True
        self.normalize_rewards = True


def main(folder):
    timer = Timer()
    rows, width = 4, 6
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(rows, width - 1, generator=generator)
    logprobs.requires_grad_()
    with timer.time("batch"):
        prompts = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2]])
        rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
        token_mask = torch.ones(rows, width)
        estimator = GRPOAdvantageEstimator(EstimatorConfig(), None)
        advantages = estimator.compute_advantage(prompts, rewards, token_mask)
        data = BatchedDataDict(
            {
                "input_ids": torch.zeros(rows, width, dtype=torch.long),
                "advantages": advantages,
                "prev_logprobs": -torch.rand(rows, width, generator=generator),
                "generation_logprobs": -torch.rand(rows, width, generator=generator),
                "reference_policy_logprobs": -torch.rand(
                    rows, width, generator=generator
                ),
                "token_mask": token_mask,
                "sample_mask": torch.ones(rows),
            }
        )
    counts = torch.tensor(float(rows)), torch.tensor(float(rows * (width - 1)))
    policy_loss = ClippedPGLossFn(
        {
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            "reference_policy_kl_penalty": 0.1,
            "reference_policy_kl_type": "k3",
            "token_level_loss": True,
        }
    )
    loss, metrics = policy_loss(data, *counts, next_token_logprobs=logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    preference_loss = DPOLossFn({"reference_policy_kl_penalty": 0.05})
    reference = data["reference_policy_logprobs"].clone()
    reference[:, 0] = 0.0
    data["reference_policy_logprobs"] = torch.roll(reference, -1, dims=-1)
    preference, preference_metrics = preference_loss(logprobs, data, *counts)
    config = {
        "enabled": True,
        "checkpoint_dir": f"{folder}/checkpoints",
        "metric_name": "val:accuracy",
        "higher_is_better": True,
        "save_period": 1,
        "keep_top_k": 1,
        "checkpoint_must_save_by": None,
        "model_save_format": "safetensors",
        "save_consolidated": False,
        "save_optimizer": True,
    }
    with CheckpointManager(config) as checkpointer:
        path = checkpointer.init_tmp_checkpoint(1, {"val:accuracy": 0.5})
        checkpointer.finalize_checkpoint(path)
        best = checkpointer.get_best_checkpoint_path()
    found = {
        "advantages": advantages[:, 0].tolist(),
        "loss": loss.item(),
        "metrics": metrics,
        "gradient": gradient.tolist(),
        "preference": preference.item(),
        "preference_metrics": preference_metrics,
        "best": best,
        "data": {k: v.tolist() for k, v in data.items()},
        "logprobs": logprobs.tolist(),
        "seconds": timer.get_timing_metrics()["batch"],
    }
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
