"""A run that trains on one host and samples on another.

python apart_run.py CONFIG OUTPUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from rl_algorithms import GRPOTrainer
from rl_distributed import RayVirtualCluster
from rl_models import GenerationConfig, GenerationPolicy


def main(config: str, output_dir: str) -> None:
    """Train with the settings of a run, on the hosts with these resources of Ray."""
    settings = yaml.safe_load(Path(config).read_text())
    settings["output_dir"] = output_dir
    model = settings["policy"]["model_name"]
    sampling = GenerationConfig(**settings["policy"]["generation"])
    with (
        RayVirtualCluster([1], bundle_resources={"trainer": 1}) as here,
        RayVirtualCluster([1], bundle_resources={"sampler": 1}) as there,
    ):
        generation = GenerationPolicy(
            there, sampling, model_name=model, load_weights=False
        )
        try:
            GRPOTrainer.from_pretrained(
                model, config=settings, cluster=here, generation=generation
            ).fit()
        finally:
            generation.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
