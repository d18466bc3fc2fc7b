"""A script written for NeMo RL: configuration, checkpoints, loggers and timers."""

import argparse
import json
import os
import random

import numpy as np
import torch
from nemo_rl.algorithms.utils import set_seed
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.evals.eval import eval_cons_k, eval_pass_k
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import (
    OverridesError,
    load_config,
    parse_hydra_overrides,
    register_omegaconf_resolvers,
)
from nemo_rl.utils.logger import Logger, flatten_dict, get_next_experiment_dir
from nemo_rl.utils.timer import TimeoutChecker, Timer

PARENT = """
defaults: []
policy:
  model_name: tiny
  max_total_sequence_length: 512
  tokenizer: {name: "${policy.model_name}"}
  sequence_packing:
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, 4}
grpo: {max_num_steps: 5, seed: 42}
checkpointing:
  enabled: true
  checkpoint_dir: results
  metric_name: "val:accuracy"
  higher_is_better: true
  keep_top_k: 2
  save_period: 1
  checkpoint_must_save_by: null
  model_save_format: safetensors
  save_consolidated: false
  save_optimizer: true
logger:
  log_dir: logs
  num_val_samples_to_print: 0
  wandb_enabled: false
  tensorboard_enabled: true
  mlflow_enabled: false
  swanlab_enabled: false
  monitor_gpus: false
  wandb: {project: grpo-dev, name: grpo-dev-logger}
  swanlab: {project: grpo-dev, name: grpo-dev-logger}
  tensorboard: {}
  mlflow: {experiment_name: grpo-dev, run_name: grpo-dev-logger}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
"""
CHILD = """
defaults: parent.yaml
grpo: {max_num_steps: 4}
"""


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--config", default=None)
    return parser.parse_known_args()


def save(checkpointer, step, accuracy, config, timer):
    with timer.time("checkpointing"):
        path = checkpointer.init_tmp_checkpoint(
            step, {"step": step, "val:accuracy": accuracy}, config
        )
        weights = os.path.join(path, "policy", "weights")
        os.makedirs(weights)
        torch.save({"w": torch.full((2,), float(step))}, f"{weights}/model.pt")
        torch.save({"at": step}, os.path.join(path, "train_dataloader.pt"))
        checkpointer.finalize_checkpoint(path)


def checkpoints(config, timer):
    accuracies = [0.5, 0.9, 0.7, 0.1]
    with CheckpointManager(config["checkpointing"]) as checkpointer:
        assert checkpointer.get_latest_checkpoint_path() is None
        for step, accuracy in enumerate(accuracies, start=1):
            save(checkpointer, step, accuracy, config, timer)
        latest = checkpointer.get_latest_checkpoint_path()
        best = checkpointer.get_best_checkpoint_path()
        weights, optimizer = checkpointer.get_resume_paths(latest)
        info = checkpointer.load_training_info(latest)
        loaded = torch.load(os.path.join(weights, "model.pt"))
        return {
            "kept": sorted(os.listdir(config["checkpointing"]["checkpoint_dir"])),
            "latest": os.path.basename(latest),
            "best": os.path.basename(best),
            "optimizer": optimizer,
            "info": info,
            "weights": loaded["w"].tolist(),
        }


def log(config, timer):
    config["logger"]["log_dir"] = get_next_experiment_dir(config["logger"]["log_dir"])
    logger = Logger(config["logger"])
    logger.log_hyperparams(config)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0 / step, "nested": step}, step, prefix="train")
        logger.log_metrics(
            timer.get_timing_metrics(reduction_op="sum"), step, prefix="timing/train"
        )
    batch = BatchedDataDict({"idx": torch.tensor([1, 2]), "text": ["a", "b"]})
    logger.log_batched_dict_as_jsonl(batch, "train_data_step1.jsonl")
    logger.log_string_list_as_jsonl(["x", "y"], "texts.jsonl")
    return config["logger"]["log_dir"]


def seeded():
    set_seed(11)
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def timers():
    timer = Timer()
    for elapsed in (1.0, 2.0, 6.0):
        timer.record("step", elapsed)
    with timer.time("outer"), timer.time("inner"):
        pass
    try:
        timer.stop("never")
    except ValueError as error:
        wrong = type(error).__name__
    checker = TimeoutChecker("00:00:00:00", fit_last_save_time=True)
    checker.start_iterations()
    checker.mark_iteration()
    never = TimeoutChecker(None)
    never.start_iterations()
    operations = ("mean", "median", "min", "max", "std", "sum", "count")
    return {
        "reduced": {op: timer.reduce("step", op) for op in operations},
        "elapsed": timer.get_elapsed("step"),
        "latest": timer.get_latest_elapsed("step"),
        "labels": sorted(timer.get_timing_metrics()),
        "wrong": wrong,
        "due": [checker.check_save(), checker.check_save(), never.check_save()],
    }


def main():
    register_omegaconf_resolvers()
    args, overrides = parse_args()
    os.chdir(args.folder)
    for name, text in (("parent.yaml", PARENT), ("child.yaml", CHILD)):
        with open(name, "w") as file:
            file.write(text)
    config = parse_hydra_overrides(load_config("child.yaml"), overrides)
    try:
        parse_hydra_overrides(load_config("child.yaml"), ["grpo.max_num_stps=3"])
    except OverridesError as error:
        refused = str(error)
    timer = Timer()
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    found = {
        "config": config,
        "refused": refused,
        "checkpoints": checkpoints(config, timer),
        "logs": log(config, timer),
        "again": get_next_experiment_dir("logs"),
        "flat": flatten_dict({"a": {"b": 1, "c": [1, {"d": 2}]}}),
        "seeded": [seeded(), seeded()],
        "timers": timers(),
        "pass": [eval_pass_k(rewards, num_tests_per_prompt=4, k=k) for k in (1, 2, 4)],
        "cons": eval_cons_k(
            rewards,
            num_tests_per_prompt=4,
            k=4,
            extracted_answers=[*"7127", *"1222", *"5555"],
        ),
    }
    with open("found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
