"""A script for NeMo RL."""

import torch
from nemo_rl.algorithms.grpo import grpo_train
from nemo_rl.algorithms.loss import DPOLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.timer import Timer

timer = Timer()
batch = BatchedDataDict({"values": torch.arange(8)})
loss_fn = DPOLossFn({"reference_policy_kl_penalty": 0.05})
train = grpo_train
