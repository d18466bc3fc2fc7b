from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch

import rl_algorithms
from rl_algorithms.compat.nemo_rl import (
    DifferenceWarning,
    differences,
    finder,
    install,
    uninstall,
)
from rl_algorithms.compat.nemo_rl.name_map import read_name_map
from rl_algorithms.errors import LossInputError
from rl_distributed.errors import ConfigError
from rl_envs.errors import RewardError

SCRIPTS = Path(__file__).parent / "nemo_rl_scripts"
NAMES = read_name_map()
ENTRIES = [e for names in NAMES.modules.values() for e in names.values()]


@pytest.fixture(autouse=True)
def names():
    install()
    differences.forget_differences()
    yield
    uninstall()


def load(path):
    """Import a name as a script does, suppressing its warning."""
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if not e.absent], ids=lambda e: e.path
)
def test_every_name_resolves_and_warns_once_of_its_new_place(entry):
    assert entry.load_new_place() is not None
    module = importlib.import_module(entry.module)
    with pytest.warns(DeprecationWarning, match=re.escape(entry.ours)) as told:
        value = getattr(module, entry.name)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(module, entry.name) is value
    if not entry.via:
        assert value is entry.load_new_place()


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.absent], ids=lambda e: e.path
)
def test_every_absent_name_says_what_to_use_instead(entry):
    code = f"from {entry.module} import {entry.name}"
    with pytest.raises(ImportError, match=re.escape(entry.absent)):
        exec(code)
    module = importlib.import_module(entry.module)
    assert not hasattr(module, entry.name)
    with pytest.raises(AttributeError, match=re.escape(entry.absent)):
        getattr(module, entry.name)


@pytest.mark.parametrize("module", NAMES.absent_modules)
def test_every_absent_module_says_what_to_use_instead(module):
    instead = re.escape(NAMES.absent_modules[module])
    for statement in (f"import {module}", f"import {module}.below"):
        with pytest.raises(ModuleNotFoundError, match=instead):
            exec(statement)
    parent, _, name = module.rpartition(".")
    with pytest.raises(ImportError, match=instead):
        exec(f"from {parent} import {name}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from nemo_rl.algorithms.loss import ClippedPGLoss",
            "did you mean 'ClippedPGLossFn'",
        ),
        (
            "from nemo_rl.algorithms.grpo import ClippedPGLossFn",
            "nemo_rl.algorithms.loss has ClippedPGLossFn",
        ),
        ("import nemo_rl.algorithms.los", "did you mean 'nemo_rl.algorithms.loss'"),
        ("import nemo_rl.packageinfo", "did you mean 'nemo_rl.package_info'"),
        ("from nemo_rl.utils import nothing_like_it", "is not in the map"),
        ("import nemo_rl.distributed.nothing", "is not in the map"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(statement, message):
    with pytest.raises(ImportError, match=message) as told:
        exec(statement)
    # What an installed user has: the map alone, without the repository's files.
    assert "rl_algorithms.compat.nemo_rl --table lists what is" in str(told.value)
    assert ".md" not in str(told.value)


def test_modules_that_have_only_the_beginning_in_common_are_not_alike():
    with pytest.raises(ImportError) as told:
        exec("import nemo_rl.qqqqqq_zzzz")
    assert "did you mean" not in str(told.value)


# Every name that NeMo RL's guides and reference mention, by module.
MENTIONED = {
    "nemo_rl.distributed.virtual_cluster": "ClusterConfig PY_EXECUTABLES init_ray "
    "get_ray_cluster_topology select_segment_nodes prepare_segment_topology "
    "get_reordered_bundle RayVirtualCluster ResourceInsufficientError",
    "nemo_rl.distributed.worker_groups": "MultiWorkerFuture RayWorkerBuilder "
    "RayWorkerGroup",
    "nemo_rl.distributed.worker_group_utils": "get_nsight_config_if_pattern_matches "
    "recursive_merge_options",
    "nemo_rl.distributed.ray_actor_environment_registry": "ACTOR_ENVIRONMENT_REGISTRY "
    "get_actor_python_env",
    "nemo_rl.distributed.batched_data_dict": "SequencePackingArgs DynamicBatchingArgs "
    "BatchedDataDict SlicedDataDict",
    "nemo_rl.distributed.named_sharding": "NamedSharding REPLICATED_AXES",
    "nemo_rl.distributed.collectives": "rebalance_nd_tensor gather_jagged_object_lists",
    "nemo_rl.distributed.stateless_process_group": "StatelessProcessGroup",
    "nemo_rl.distributed.numa_utils": "bind_to_gpu_numa resolve_visible_gpu_id",
    "nemo_rl.distributed.model_utils": "DistributedLogprob distributed_vocab_topk "
    "from_parallel_logits_to_logprobs vocab_parallel_gather_columns",
    "nemo_rl.utils.venvs": "create_local_venv create_local_venv_on_each_node "
    "make_actor_runtime_env",
    "nemo_rl.utils.config": "load_config load_config_with_inheritance "
    "parse_hydra_overrides OverridesError register_omegaconf_resolvers",
    "nemo_rl.models.policy.interfaces": "PolicyInterface LogprobOutputSpec "
    "ReferenceLogprobOutputSpec ScoreOutputSpec ColocatablePolicyInterface",
    "nemo_rl.models.generation.interfaces": "GenerationInterface GenerationDatumSpec "
    "GenerationOutputSpec GenerationConfig GenerationSamplingParams "
    "verify_right_padding should_use_async_rollouts CollectiveSenderSpec",
    "nemo_rl.models.generation": "configure_generation_config",
    "nemo_rl.models.generation.vllm": "VllmGeneration VllmConfig",
    "nemo_rl.models.generation.sglang": "SGLangGeneration",
    "nemo_rl.models.generation.trtllm": "TrtllmGeneration",
    "nemo_rl.models.generation.megatron": "MegatronGeneration",
    "nemo_rl.models.generation.dynamo": "DynamoGeneration",
    "nemo_rl.models.value.interfaces": "ValueInterface",
    "nemo_rl.models.policy": "PolicyConfig TokenizerConfig DTensorConfig LoRAConfig "
    "SequencePackingConfig DynamicBatchingConfig MegatronConfig RewardModelConfig",
    "nemo_rl.models.policy.lm_policy": "Policy",
    "nemo_rl.models.policy.tq_policy": "TQPolicy",
    "nemo_rl.models.policy.workers": "DTensorPolicyWorker MegatronPolicyWorker",
    "nemo_rl.weight_sync.interfaces": "WeightSynchronizer",
    "nemo_rl.algorithms.grpo": "MasterConfig GRPOConfig GRPOSaveState setup grpo_train "
    "async_grpo_train validate dynamic_sampling scale_rewards AsyncGRPOConfig "
    "RewardScalingConfig refit_policy_generation extract_initial_prompt_messages "
    "add_grpo_token_loss_masks_and_generation_logprobs shutdown_environments "
    "compute_and_apply_seq_logprob_error_masking aggregate_rollout_metrics",
    "nemo_rl.algorithms.grpo_sync": "grpo_train_sync",
    "nemo_rl.algorithms.single_controller": "SingleControllerActor",
    "nemo_rl.algorithms.async_utils": "AsyncTrajectoryCollector ReplayBuffer",
    "nemo_rl.algorithms.ppo": "MasterConfig PPOConfig PPOSaveState setup ppo_train "
    "async_ppo_train validate",
    "nemo_rl.algorithms.sft": "MasterConfig SFTConfig SFTSaveState setup sft_train "
    "validate",
    "nemo_rl.algorithms.dpo": "MasterConfig DPOConfig DPOSaveState setup dpo_train "
    "validate",
    "nemo_rl.algorithms.rm": "MasterConfig RMConfig RMSaveState setup rm_train "
    "validate",
    "nemo_rl.algorithms.distillation": "MasterConfig DistillationConfig setup validate "
    "DistillationSaveState distillation_train",
    "nemo_rl.algorithms.loss": "ClippedPGLossConfig ClippedPGLossFn NLLLossFn "
    "PreferenceLossFn DPOLossFn DPOLossConfig DistillationLossFn MseValueLossFn "
    "DistillationLossConfig MseValueLossConfig DraftCrossEntropyLossFn "
    "CrossTokenizerDistillationLossFn SequencePackingLossWrapper DraftLossWrapper "
    "SequencePackingFusionLossWrapper prepare_loss_input prepare_packed_loss_input "
    "wrap_loss_fn_with_input_preparation ClippedPGLossDataDict DPOLossDataDict "
    "PreferenceLossDataDict DistillationLossDataDict",
    "nemo_rl.algorithms.loss.interfaces": "LossFunction LossType LossInputType "
    "MetricNormalizer",
    "nemo_rl.algorithms.advantage_estimator": "GRPOAdvantageEstimator "
    "GDPOAdvantageEstimator ReinforcePlusPlusAdvantageEstimator OPDAdvantageEstimator "
    "RawRewardAdvantageEstimator GeneralizedAdvantageEstimator",
    "nemo_rl.algorithms.utils": "calculate_baseline_and_std_per_prompt calculate_kl "
    "masked_mean get_tokenizer set_seed maybe_pad_last_batch print_performance_metrics",
    "nemo_rl.algorithms.logits_sampling_utils": "TrainingSamplingParams",
    "nemo_rl.algorithms.reward_functions": "apply_reward_shaping RewardShapingConfig",
    "nemo_rl.environments.interfaces": "EnvironmentInterface EnvironmentReturn",
    "nemo_rl.environments.utils": "ENV_REGISTRY create_env register_env "
    "chunk_list_to_workers",
    "nemo_rl.environments.math_environment": "MathEnvironment "
    "MathMultiRewardEnvironment",
    "nemo_rl.environments.dapo_math_verifier": "compute_score",
    "nemo_rl.environments.code_environment": "CodeEnvironment",
    "nemo_rl.environments.code_jaccard_environment": "CodeJaccardEnvironment",
    "nemo_rl.environments.vlm_environment": "VLMEnvironment",
    "nemo_rl.environments.reward_model_environment": "RewardModelEnvironment",
    "nemo_rl.environments.nemo_gym": "NemoGym",
    "nemo_rl.environments.games.sliding_puzzle": "SlidingPuzzleEnv",
    "nemo_rl.environments.tools.retriever": "RAGEnvironment",
    "nemo_rl.environments.metrics": "calculate_pass_rate_per_prompt",
    "nemo_rl.environments.rewards": "combine_reward_functions format_reward "
    "exact_answer_alphanumeric_reward math_expression_reward bbox_giou_reward "
    "geo3k_reward",
    "nemo_rl.experience.rollouts": "generate_responses generate_responses_async "
    "calculate_rewards run_multi_turn_rollout run_async_multi_turn_rollout "
    "run_async_multi_turn_rollout_groups run_async_nemo_gym_rollout",
    "nemo_rl.experience.rollout_manager": "RolloutRetryPolicy RolloutTimeouts "
    "RolloutOutcome",
    "nemo_rl.data": "DataConfig",
    "nemo_rl.data.interfaces": "DatumSpec PreferenceDatumSpec LLMMessageLogType "
    "FlatMessagesType TaskDataSpec TaskDataProcessFnCallable",
    "nemo_rl.data.datasets": "AllTaskProcessedDataset PreferenceDataset",
    "nemo_rl.data.processors": "register_processor math_hf_data_processor",
    "nemo_rl.data.utils": "setup_response_data setup_preference_data "
    "load_dataloader_state",
    "nemo_rl.data.chat_templates": "COMMON_CHAT_TEMPLATES",
    "nemo_rl.data.collate_fn": "rl_collate_fn eval_collate_fn preference_collate_fn",
    "nemo_rl.data.llm_message_utils": "message_log_to_flat_messages "
    "get_keys_from_message_log add_loss_mask_to_message_log message_log_shape "
    "batched_message_log_to_flat_message get_formatted_message_log "
    "remap_dataset_keys decompose_message_log reconstruct_message_log",
    "nemo_rl.data.multimodal_utils": "PackedTensor",
    "nemo_rl.data.packing": "PackingAlgorithm get_packer SequencePacker "
    "PackingMetrics ConcatenativePacker FirstFitDecreasingPacker "
    "FirstFitShufflePacker ModifiedFirstFitDecreasingPacker",
    "nemo_rl.data.packing.algorithms": "get_packer ModifiedFirstFitDecreasingPacker",
    "nemo_rl.data.packing.metrics": "PackingMetrics",
    "nemo_rl.data_plane": "DataPlaneClient KVBatchMeta",
    "nemo_rl.evals.eval": "MasterConfig EvalConfig setup run_env_eval eval_pass_k "
    "eval_cons_k",
    "nemo_rl.evals.answer_parsing": "extract_answer",
    "nemo_rl.utils.logger": "LoggerInterface LoggerConfig TensorboardLogger "
    "WandbLogger SwanlabLogger MLflowLogger Logger RayGpuMonitorLogger "
    "GPUMonitoringConfig WandbConfig SwanlabConfig TensorboardConfig MLflowConfig "
    "get_next_experiment_dir flatten_dict print_message_log_samples "
    "configure_rich_logging",
    "nemo_rl.utils.checkpoint": "CheckpointManager CheckpointingConfig",
    "nemo_rl.utils.timer": "Timer ThreadSafeTimer TimeoutChecker convert_to_seconds",
    "nemo_rl.utils.memory_tracker": "MemoryTracker",
    "nemo_rl.utils.flops_tracker": "FLOPTracker",
    "nemo_rl.utils.nvml": "get_device_uuid get_free_memory_bytes",
    "nemo_rl.package_info": "__version__",
    # The interface sketched in its guides.
    "nemo_rl": "train GRPOTrainer",
    "nemo_rl.algorithms": "DPOTrainer GRPOTrainer SFTTrainer",
    "nemo_rl.backends": "get_training_backend get_generation_backend",
    "nemo_rl.backends.training.base": "TrainingBackend register_training_backend",
    "nemo_rl.backends.generation.base": "GenerationBackend register_generation_backend",
    "nemo_rl.distributed": "RayVirtualCluster RayWorkerGroup",
    "nemo_rl.environments": "FunctionalRewardWrapper",
    "nemo_rl.models": "HuggingFacePolicy",
    "nemo_rl.models.interfaces": "PolicyInterface",
    "nemo_rl.trainers.base": "BaseTrainer",
    "nemo_rl.trainers.callbacks": "Callback",
}


def missing(statement):
    """Return why an import fails; "" where it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            exec(statement)
        except ImportError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("module", MENTIONED)
def test_every_name_that_nemo_rl_mentions_is_here_or_says_what_is(module):
    for name in MENTIONED[module].split():
        why = missing(f"from {module} import {name}")
        assert not why or " is not here: " in why, name


def test_loaded_configurations_have_their_parents(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "base.yaml").write_text("a: 1\nb: ${a}\n")
    (tmp_path / "below" / "child.yaml").write_text("defaults: ../base.yaml\na: 2\n")
    load_it = load("nemo_rl.utils.config.load_config_with_inheritance")
    assert load_it("below/child.yaml", tmp_path) == {"a": 2, "b": 2}
    assert load_it(tmp_path / "below" / "child.yaml") == {"a": 2, "b": 2}


@pytest.mark.filterwarnings("ignore:DPOLossFn of nemo_rl reads")
@pytest.mark.parametrize("loss", ["ClippedPGLossFn", "NLLLossFn", "DPOLossFn"])
@pytest.mark.parametrize("name", ["next_token_logits", "logits", None])
def test_losses_that_get_logits_say_so_and_what_to_pass(loss, name):
    data, counts, _ = loss_batch()
    data["reference_policy_logprobs"][:, -1] = 0.0
    logits = torch.zeros(4, 5, 11)
    args, named = ((), {name: logits}) if name else ((logits,), {})
    config = [] if loss == "NLLLossFn" else [{}]
    loss_fn = load(f"nemo_rl.algorithms.loss.{loss}")(*config)
    with pytest.raises(LossInputError) as told:
        loss_fn(data, *counts, *args, **named)
    assert "takes next_token_logprobs [B, S-1]" in str(told.value)
    assert f"no logits: got {name or 'next_token_logprobs'} [4, 5, 11]" in str(
        told.value
    )
    # The remedy in the message is what the loss accepts.
    input_ids = torch.randint(0, 11, (4, 5))
    remedy = str(told.value).partition("pass ")[2]
    made = eval(remedy, {"torch": torch, "logits": logits, "input_ids": input_ids})
    assert made.shape == (4, 4)


def test_distillation_that_gets_logits_says_so():
    data, counts, _ = loss_batch()
    with pytest.raises(LossInputError, match=r"no logits: got student_logits; torch"):
        load("nemo_rl.algorithms.loss.DistillationLossFn")({})(
            data, *counts, student_logits=torch.zeros(4, 5, 11)
        )


def test_the_table_has_every_name_once_and_says_what_it_is():
    table = NAMES.to_markdown()
    for entry in ENTRIES:
        assert f"| `{entry.name}` |" in table
        assert entry.kind in table
    assert len({entry.path for entry in ENTRIES}) == len(ENTRIES) > 200


def test_modules_list_their_names_and_travel_to_other_processes():
    module = importlib.import_module("nemo_rl.utils.timer")
    assert {"Timer", "TimeoutChecker"} <= set(dir(module))
    assert pickle.loads(pickle.dumps(module)) is module
    sent = cloudpickle.dumps(lambda: module.Timer)
    code = f"import cloudpickle; print(cloudpickle.loads({sent!r})().__module__)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "rl_distributed.timing.timer"


def test_the_real_package_is_not_hidden(tmp_path):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").write_text("REAL = True\n")
    code = (
        "try:\n import rl_algorithms.compat.nemo_rl\n"
        "except ImportError as error:\n print(error)\n"
        "import nemo_rl; print(nemo_rl.REAL)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "nemo_rl is installed in this environment" in out
    assert out.strip().endswith("True")


@pytest.mark.parametrize("first", ["", "import rl_algorithms.compat.nemo_rl; "])
def test_processes_that_a_program_starts_find_the_names(first):
    code = first + "from nemo_rl.utils.timer import Timer; print(Timer.__module__)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": finder.STAND_IN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "rl_distributed.timing.timer"


@pytest.mark.parametrize("is_first", [False, True])
def test_a_process_with_the_real_package_imports_that(tmp_path, is_first):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").write_text("REAL = True\n")
    (tmp_path / "nemo_rl" / "below.py").write_text("BELOW = True\n")
    folders = [str(tmp_path), finder.STAND_IN]
    code = "import nemo_rl.below as b, nemo_rl; print(nemo_rl.REAL, b.BELOW)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders if is_first else folders[::-1]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == ["True", "True"]


def test_other_folders_of_the_path_stay(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}{finder.STAND_IN}")
    uninstall()
    assert os.environ["PYTHONPATH"] == "/a"
    install()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/a", finder.STAND_IN]
    monkeypatch.setenv("PYTHONPATH", finder.STAND_IN)
    uninstall()
    assert "PYTHONPATH" not in os.environ
    install()


def test_uninstall_leaves_nothing():
    importlib.import_module("nemo_rl.utils.timer")
    uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nemo_rl")
    install()
    install()
    assert sum(isinstance(f, finder._NameFinder) for f in sys.meta_path) == 1


def run_script(name, folder):
    return subprocess.run(
        [
            *(sys.executable, "-m", "rl_algorithms.compat.nemo_rl"),
            *(str(SCRIPTS / name), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_loss_script_runs_unchanged(tmp_path):
    done = run_script("losses.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    # Leave-one-out of 1, 0, 0, 1, as the reference has it.
    assert found["advantages"] == pytest.approx(
        [1.1547, -1.1547, -1.1547, 1.1547], 1e-4
    )
    data = {k: torch.tensor(v) for k, v in found["data"].items()}
    logprobs = torch.tensor(found["logprobs"], requires_grad=True)
    advantages, prev = data["advantages"][:, 1:], data["prev_logprobs"][:, 1:]
    ratio = (logprobs - prev).exp()
    clipped = ratio.clamp(0.8, 1.2)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    # The script rolls the column before it is read a second time.
    rolled = data["reference_policy_logprobs"]
    reference = rolled[:, :-1]
    moved = reference - logprobs
    kl = (moved.exp() - 1 - moved) * (logprobs - logprobs.detach()).exp()
    loss = (surrogate + 0.1 * kl).mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(
        torch.tensor(found["gradient"]), gradient, rtol=1e-4, atol=1e-7
    )
    assert found["metrics"]["probs_ratio"] == pytest.approx(ratio.mean().item())
    margin = 0.05 * (logprobs - reference).sum(-1)
    preference = -torch.nn.functional.logsigmoid(margin[0::2] - margin[1::2]).mean()
    assert found["preference"] == pytest.approx(preference.item(), rel=1e-5)
    assert found["best"].endswith("step_1")
    assert found["seconds"] > 0
    told = re.findall(r"DeprecationWarning: (\S+) is (\S+) here", done.stderr)
    assert ("nemo_rl.algorithms.loss.DPOLossFn", "rl_algorithms.DPOLossFn") in told
    assert len(told) == len(set(told)) == 6
    assert "reads reference_policy_logprobs as rolled by -1" in done.stderr


@pytest.mark.slow
def test_a_worker_group_script_runs_unchanged(tmp_path):
    done = run_script("workers.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["shards"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert found["sums"] == [10 + 2 * 10, 10 + 2 * 18]
    assert found["by_handle"] == [30, 30]
    assert found["by_place"] == 46
    first, second = found["names"]
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert len({first["pid"], second["pid"], found["driver"]}) == 3
    assert (first["COLOUR"], first["FRUIT"]) == ("green", "pear")
    assert [first["MASTER_ADDR"], first["MASTER_PORT"]] == found["master"]


def test_decorated_classes_are_unwrapped_for_their_workers():
    import ray  # noqa: PLC0415

    class Plain:
        @staticmethod
        def configure_worker(num_gpus):
            return {"num_gpus": num_gpus - 1}, {"A": "1"}, {"start": 1}

    decorated = ray.remote(max_concurrency=2, num_cpus=3)(Plain)
    builder = load("nemo_rl.distributed.worker_groups.RayWorkerBuilder")
    made = builder(decorated, 5, scale=2)
    assert made.worker_class is Plain
    assert (made.args, made.kwargs) == ((5,), {"scale": 2})
    loaded = pickle.loads(made.with_options(num_threads=2).portable_class())
    options, env_vars, init_kwargs, _ = loaded.configure_worker(num_gpus=1)
    # The bundle holds the CPUs.
    assert options == {"max_concurrency": 2, "num_gpus": 0}
    assert (env_vars, init_kwargs) == ({"A": "1"}, {"start": 1})
    assert pickle.loads(builder(Plain).portable_class()).__name__ == "Plain"
    with pytest.raises(ConfigError, match="path of a Python interpreter"):
        load(
            "nemo_rl.distributed.ray_actor_environment_registry"
            ".ACTOR_ENVIRONMENT_REGISTRY"
        )["a.B"] = "uv run --extra vllm"


def test_the_runner_says_what_is_wrong(tmp_path):
    missing = run_script("nothing.py", tmp_path)
    assert missing.returncode == 2
    assert "there is no script" in missing.stderr
    base = [sys.executable, "-m", "rl_algorithms.compat.nemo_rl"]
    table = subprocess.run(
        [*base, "--table"], capture_output=True, text=True, check=True
    )
    assert table.stdout == NAMES.to_markdown()
    usage = subprocess.run(base, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "usage:" in usage.stdout


def loss_batch(rows=4, width=5, seed=0):
    made = torch.Generator().manual_seed(seed)

    def column():
        return -torch.rand(rows, width, generator=made)

    data = {
        "advantages": torch.randn(rows, width, generator=made),
        "prev_logprobs": column(),
        "generation_logprobs": column(),
        "reference_policy_logprobs": column(),
        "token_mask": torch.ones(rows, width),
        "sample_mask": torch.ones(rows),
    }
    counts = torch.tensor(float(rows)), torch.tensor(float(rows * (width - 1)))
    return data, counts, column()[:, 1:]


def test_metrics_are_floats_whose_shares_add_up():
    loss_fn = load("nemo_rl.algorithms.loss.ClippedPGLossFn")({"ratio_clip_min": 0.1})
    data, counts, logprobs = loss_batch()
    with pytest.warns(DifferenceWarning, match="js_divergence_error, policy_kl_error"):
        loss, whole = loss_fn(data, *counts, logprobs)
    ours = rl_algorithms.ClippedPGLossFn({"ratio_clip_min": 0.1})
    expected, typed = ours(data, *counts, next_token_logprobs=logprobs)
    assert loss == expected
    assert all(type(value) is float for value in whole.values())
    assert whole["probs_ratio"] == pytest.approx(float(typed["probs_ratio"]))
    parts = [
        loss_fn({k: v[rows] for k, v in data.items()}, *counts, logprobs[rows])[1]
        for rows in (slice(0, 1), slice(1, 4))
    ]
    for name in ("loss", "probs_ratio", "approx_entropy", "num_valid_samples"):
        assert parts[0][name] + parts[1][name] == pytest.approx(whole[name], rel=1e-5)


def test_an_empty_micro_batch_has_the_extremes_of_theirs():
    loss_fn = load("nemo_rl.algorithms.loss.ClippedPGLossFn")({})
    data, counts, logprobs = loss_batch()
    data["sample_mask"] = torch.zeros(4)
    with pytest.warns(DifferenceWarning):
        loss, metrics = loss_fn(data, *counts, logprobs)
    assert loss == 0
    assert metrics["probs_ratio_min"] == float("inf")
    assert metrics["probs_ratio_max"] == -float("inf")


def test_clamped_kl_estimates_are_told():
    keys = {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 0.01}
    loss_fn = load("nemo_rl.algorithms.loss.ClippedPGLossFn")(keys)
    data, counts, logprobs = loss_batch()
    with pytest.warns(DifferenceWarning) as told:
        loss_fn(data, *counts, logprobs)
    assert any("a clamp cuts off KL estimates" in str(w.message) for w in told)
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ratio_clip_mni": 0.2}, "ratio_clip_min"),
        ({"positive_example_nll_weight": 0.1}, "positive_nll_coef"),
    ],
)
def test_keys_that_are_not_here_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        load("nemo_rl.algorithms.loss.ClippedPGLossFn")(keys)


def test_the_reference_column_of_dpo_is_rolled_back_or_refused():
    data, counts, logprobs = loss_batch()
    reference = data["reference_policy_logprobs"]
    reference[:, 0] = 0.0
    theirs = load("nemo_rl.algorithms.loss.DPOLossFn")({})
    ours = rl_algorithms.DPOLossFn({})
    expected, _ = ours(data, *counts, next_token_logprobs=logprobs)
    rolled = {**data, "reference_policy_logprobs": torch.roll(reference, -1, -1)}
    with pytest.warns(DifferenceWarning, match="rolled by -1"):
        found, metrics = theirs(rolled, *counts, logprobs)
    assert found == expected
    # Reading the column unshifted gives a different loss.
    assert ours(rolled, *counts, next_token_logprobs=logprobs)[0] != expected
    assert metrics["accuracy"] in (0.0, 0.5, 1.0)
    with pytest.raises(LossInputError, match="must be rolled by -1"):
        theirs(data, *counts, logprobs)


def test_preference_and_distillation_take_their_inputs():
    data = {"sample_mask": torch.ones(4)}
    counts = torch.tensor(4.0), torch.tensor(4.0)
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0])
    loss, metrics = load("nemo_rl.algorithms.loss.PreferenceLossFn")()(
        data, *counts, logits=rewards.unsqueeze(-1)
    )
    expected = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
    assert loss.item() == pytest.approx(expected.item())
    assert metrics["accuracy"] == 0.5
    data, counts, _ = loss_batch()
    made = torch.Generator().manual_seed(1)
    student, teacher = (
        torch.log_softmax(torch.randn(4, 4, 3, generator=made), -1) for _ in range(2)
    )
    distil = load("nemo_rl.algorithms.loss.DistillationLossFn")
    for kind, value in (
        ("forward", (teacher.exp() * (teacher - student)).sum(-1).mean()),
        ("reverse", (student.exp() * (student - teacher)).sum(-1).mean()),
    ):
        loss, _ = distil({"kl_type": kind})(data, *counts, student, teacher)
        assert loss.item() == pytest.approx(value.item(), rel=1e-5)


def test_arguments_of_losses_stand_in_either_order_or_are_named():
    data, counts, logprobs = loss_batch()
    loss_fn = load("nemo_rl.algorithms.loss.NLLLossFn")()
    expected = -logprobs.mean()
    named = dict(zip(("global_valid_seqs", "global_valid_toks"), counts, strict=True))
    for found, _ in (
        loss_fn(logprobs, data, *counts),
        loss_fn(data, *counts, logprobs),
        loss_fn(data, *counts, next_token_logprobs=logprobs),
        loss_fn(logprobs, data=data, **named),
        loss_fn(data=data, next_token_logprobs=logprobs, **named),
    ):
        torch.testing.assert_close(found, expected)
    for wrong in (
        lambda: loss_fn(logprobs, data),
        lambda: loss_fn(logprobs, data, *counts, logprobs),
        lambda: loss_fn(logprobs, data, *counts, data=data),
        lambda: loss_fn(logprobs, logprobs, *counts),
    ):
        with pytest.raises(LossInputError, match="NLLLossFn takes"):
            wrong()
    with pytest.raises(LossInputError, match="sft_loss_weight"):
        loss_fn(logprobs, data, *counts, dpo_loss=True)


@pytest.mark.parametrize("cliprange", [0.0, 0.3])
def test_values_belong_to_the_returns_of_the_same_entry(cliprange):
    made = torch.Generator().manual_seed(2)
    values, returns, old = (torch.randn(3, 5, generator=made) for _ in range(3))
    mask = (torch.rand(3, 5, generator=made) > 0.4).float()
    data = {"token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0])}
    data |= {"returns": returns, "values": old}
    counted = mask * data["sample_mask"][:, None]
    counts = torch.tensor(2.0), counted.sum()
    error = (values - returns).square()
    if cliprange:
        near = torch.clamp(values, old - cliprange, old + cliprange)
        error = torch.maximum(error, (near - returns).square())
    expected = 0.5 * 2.0 * (error * counted).sum() / counted.sum()
    loss_fn = load("nemo_rl.algorithms.loss.MseValueLossFn")(
        {"scale": 2.0, "cliprange": cliprange}
    )
    loss, metrics = loss_fn(values.unsqueeze(-1), data, *counts)
    torch.testing.assert_close(loss, expected)
    mean = (values * counted).sum() / counted.sum()
    assert metrics["values_mean"] == pytest.approx(mean.item(), rel=1e-5)
    assert {"returns_mean", "vf_clipfrac", "loss"} <= set(metrics)
    with pytest.raises(LossInputError, match="takes logits"):
        loss_fn(data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1])


def test_distillation_is_mixed_by_default():
    assert load("nemo_rl.algorithms.loss.DistillationLossConfig")().kl_type == "mixed"
    loss_fn = load("nemo_rl.algorithms.loss.DistillationLossFn")
    assert loss_fn({}).config.kl_type == "mixed"
    assert loss_fn({"kl_type": "reverse"}).config.kl_type == "reverse"
    # With the student's whole probability counted, and none outside the top k.
    data, counts, _ = loss_batch()
    made = torch.Generator().manual_seed(1)
    whole = torch.log_softmax(torch.randn(4, 4, 5, generator=made), -1)
    student = whole[..., :3]
    teacher = torch.log_softmax(torch.randn(4, 4, 3, generator=made), -1)
    entropy = (whole.exp() * whole).sum(-1)
    inside = student.exp() * student
    rest, outside = entropy - inside.sum(-1), 1 - student.exp().sum(-1)
    kl = (student.exp() * (student - teacher)).sum(-1) + rest + 100 * outside
    loss, _ = loss_fn({"kl_type": "reverse", "zero_outside_topk": True})(
        student, teacher, entropy, data, *counts
    )
    assert loss.item() == pytest.approx(kl.mean().item(), rel=1e-5)


def test_log_probs_of_the_whole_vocabulary_are_told():
    data, counts, _ = loss_batch()
    made = torch.Generator().manual_seed(1)
    whole = torch.log_softmax(torch.randn(4, 4, 5, generator=made), -1)
    top = torch.log_softmax(torch.randn(4, 4, 3, generator=made), -1)
    loss_fn = load("nemo_rl.algorithms.loss.DistillationLossFn")({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(top, top, None, data, *counts)
    with pytest.warns(DifferenceWarning, match="normalises log-probs over the k"):
        loss_fn(whole[..., :3], top, None, data, *counts)


def test_the_reward_of_one_in_eight_is_told():
    estimator = load("nemo_rl.algorithms.advantage_estimator.GRPOAdvantageEstimator")
    made = estimator({"use_leave_one_out_baseline": True}, None)
    prompts, mask = torch.zeros(8, 2), torch.ones(8, 3)
    rewards = torch.tensor([1.0, *[0.0] * 7])
    with pytest.warns(DifferenceWarning, match="agree but for one"):
        found = made.compute_advantage(prompts, rewards, mask)
    assert found.shape == (8, 3)
    assert found[:2, 0].tolist() == pytest.approx([2.828, -0.378], abs=1e-3)


def test_other_estimators_take_their_arguments():
    module = "nemo_rl.algorithms.advantage_estimator."
    prompts, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0])
    batch = {"reward/a": rewards, "reward/b": 1 - rewards}
    gdpo = load(module + "GDPOAdvantageEstimator")({"reward_weights": [2.0, 1.0]}, {})
    with pytest.warns(DifferenceWarning):
        found = gdpo.compute_advantage(prompts, rewards, mask, batch)
    assert found[:, 0].mean().item() == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ConfigError, match="one weight for each"):
        load(module + "GDPOAdvantageEstimator")(
            {"reward_weights": [1.0]}, {}
        ).compute_advantage(prompts, rewards, mask, batch)
    plus = load(module + "ReinforcePlusPlusAdvantageEstimator")({}, {})
    with pytest.warns(DifferenceWarning, match="N - 1"):
        found = plus.compute_advantage(prompts, rewards, mask)
    # Rewards without their groups' means, each of which counts for two tokens.
    centred = torch.tensor([0.5, -0.5, -1.5, 1.5])
    expected = centred / (centred.square().sum() * 2 / 7).sqrt()
    torch.testing.assert_close(found[:, 0], expected)
    raw = load(module + "RawRewardAdvantageEstimator")(
        {"normalize_advantages": False}, {}
    )
    assert raw.compute_advantage(prompts, rewards, mask)[0].tolist() == [
        [r, r] for r in rewards.tolist()
    ]


def test_rewards_are_scaled_and_shaped_in_the_batch():
    scale = load("nemo_rl.algorithms.grpo.scale_rewards")
    ranges = {"source_min": 0.0, "source_max": 1.0, "target_min": -1.0}
    batch = {"total_reward": torch.tensor([0.0, 1.0])}
    scaled = scale(batch, {"enabled": True, **ranges, "target_max": 1.0})
    assert scaled["total_reward"].tolist() == [-1.0, 1.0]
    shape = load("nemo_rl.algorithms.reward_functions.apply_reward_shaping")
    answer = {"role": "assistant", "token_ids": torch.zeros(30)}
    batch = {"total_reward": torch.zeros(1), "message_log": [[answer]]}
    config = {
        "enabled": True,
        "max_response_length": 25,
        "overlong_buffer_length": 5,
        "overlong_buffer_penalty": 0.5,
    }
    with pytest.warns(DifferenceWarning, match="grows without end"):
        shaped = shape(batch, config)
    assert shaped["total_reward"].tolist() == [-0.5]
    assert shaped["unshaped_total_reward"].tolist() == [0.0]


def test_evaluation_sums_over_prompts_and_tells_of_ties():
    pass_k = load("nemo_rl.evals.eval.eval_pass_k")
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert pass_k(rewards, 3, 2) == pytest.approx(2 / 3)
    cons_k = load("nemo_rl.evals.eval.eval_cons_k")
    with pytest.warns(DifferenceWarning, match="by lot"):
        assert cons_k(rewards, 3, 3, ["1", "2", "3", *"456"]) == pytest.approx(1 / 3)


def test_loggers_take_their_configuration(tmp_path):
    config = {
        "log_dir": str(tmp_path),
        "wandb_enabled": False,
        "tensorboard_enabled": False,
        "mlflow_enabled": False,
        "swanlab_enabled": False,
        "monitor_gpus": False,
        "wandb": {"project": "p", "name": "n"},
    }
    logger = load("nemo_rl.utils.logger.Logger")(config)
    logger.log_metrics({"loss": 1.5}, 3, "train", step_metric="train/step")
    logger.finish()
    written = "".join(p.read_text() for p in tmp_path.rglob("*.jsonl"))
    assert "train/loss" in written
    with pytest.raises(ConfigError, match="swanlab_enabled"):
        load("nemo_rl.utils.logger.Logger")({**config, "swanlab_enabled": True})
    flatten = load("nemo_rl.utils.logger.flatten_dict")
    assert flatten({"a": {"b": [1, 2]}}) == {"a.b.0": 1, "a.b.1": 2}


def test_configurations_are_read_with_their_parents(tmp_path):
    (tmp_path / "base.yaml").write_text("a: {b: 2}\nc: ${mul:${a.b},4}\n")
    (tmp_path / "own.yaml").write_text("defaults: base.yaml\na: {b: 3}\n")
    load_config = load("nemo_rl.utils.config.load_config")
    assert load_config(tmp_path / "own.yaml") == {"a": {"b": 3}, "c": 12}


def test_overrides_of_a_changed_configuration_are_told(tmp_path):
    (tmp_path / "own.yaml").write_text("a: 2\nb: ${mul:${a},4}\n")
    read, parse = (
        load(f"nemo_rl.utils.config.{name}")
        for name in ("load_config", "parse_hydra_overrides")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(read(tmp_path / "own.yaml"), ["a=3"]) == {"a": 3, "b": 12}
        assert parse({"a": 2}, ["+c=1"]) == {"a": 2, "c": 1}
    changed = read(tmp_path / "own.yaml")
    changed["extra"] = 1
    with pytest.warns(DifferenceWarning, match="does not follow overrides"):
        assert parse(changed, ["a=3"]) == {"a": 3, "b": 8, "extra": 1}


def test_clusters_refuse_what_they_cannot_do():
    cluster = load("nemo_rl.distributed.virtual_cluster.RayVirtualCluster")
    made = cluster([2], use_gpus=False, segment_size=None)
    assert (made.world_size(), made.max_colocated_worker_groups) == (2, 1)
    with pytest.raises(ConfigError, match="segment_size=2 is not here: tied_bundles"):
        cluster([2], use_gpus=False, segment_size=2)


def test_experiments_are_numbered_on(tmp_path):
    make = load("nemo_rl.utils.logger.get_next_experiment_dir")
    (tmp_path / "exp_007").mkdir()
    (tmp_path / "exp_last").mkdir()
    assert make(tmp_path) == str(tmp_path / "exp_008")
    assert make(str(tmp_path)) == str(tmp_path / "exp_009")
    assert make(tmp_path / "new" / "logs") == str(tmp_path / "new" / "logs" / "exp_001")


def test_lists_are_dealt_to_workers_as_there():
    chunk = load("nemo_rl.environments.utils.chunk_list_to_workers")
    assert chunk([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert chunk([1, 2, 3, 4, 5], 4) == [[1, 2], [3, 4], [5]]
    assert chunk([1, 2], 4) == [[1], [2], [], []]
    with pytest.raises(ConfigError, match="at least 1"):
        chunk([1], 0)


def test_rewards_are_combined_by_their_weights():
    combine = load("nemo_rl.environments.rewards.combine_reward_functions")
    made = combine(
        [(lambda truth, text: (float(truth == text), truth == text), 3.0),
         (lambda truth, text: (0.5, None), 1.0)]
    )  # fmt: skip
    assert made("a", "a") == (0.875, True)
    assert made("a", "b") == (0.125, False)
    with pytest.raises(RewardError, match="add up to"):
        combine([])


def test_message_logs_take_their_arguments():
    mask = load("nemo_rl.data.llm_message_utils.add_loss_mask_to_message_log")
    flat = load("nemo_rl.data.llm_message_utils.batched_message_log_to_flat_message")
    log = [
        {"role": "user", "content": "1", "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": "2", "token_ids": torch.tensor([3])},
    ]
    mask(batch_message_log=[log], roles_to_train_on=["Assistant"])
    batch, lengths = flat(message_log_batch=[log], make_sequence_length_divisible_by=4)
    assert batch["token_loss_mask"].tolist() == [[0, 0, 1, 0]]
    assert lengths.tolist() == [3]
    shape = load("nemo_rl.data.llm_message_utils.message_log_shape")
    assert shape(log)[0]["token_ids"] == (2,)


def test_an_environment_of_theirs_is_stepped_with_their_arguments():
    base = load("nemo_rl.environments.interfaces.EnvironmentInterface")
    returned = load("nemo_rl.environments.interfaces.EnvironmentReturn")

    class Echo(base):
        def step(self, message_log_batch, metadata, return_extracted_answer=False):
            size = len(message_log_batch)
            answers = ["x"] * size if return_extracted_answer else None
            return returned(
                observations=[{"role": "environment", "content": ""}] * size,
                metadata=metadata,
                next_stop_strings=[None] * size,
                rewards=torch.ones(size),
                terminateds=torch.ones(size),
                answers=answers,
            )

        def global_post_process_and_metrics(self, batch):
            return batch, {}

    logs = [[{"role": "assistant", "content": "2"}]]
    assert Echo().step(logs, [{}]).answers is None
    assert Echo().step(logs, [{}], True).answers == ["x"]


@pytest.mark.slow
def test_environments_are_actors(ray_cluster):
    import ray  # noqa: PLC0415

    create = load("nemo_rl.environments.utils.create_env")
    env = create("math", {"num_workers": 1, "math_verify_impl": "hf_math_verify"})
    log = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    result = ray.get(env.step.remote([log], [{"ground_truth": "2"}]))
    assert result.rewards.tolist() == [1.0]
    assert result.answers is None
    assert ray.get(env.shutdown.remote())
    ray.kill(env)
    with pytest.raises(ConfigError, match="registered already"):
        load("nemo_rl.environments.utils.register_env")("math", "mine.Env")


def test_scripts_here_import_only_what_is_in_the_map():
    for script in SCRIPTS.glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("nemo_rl"):
                for alias in node.names:
                    assert not NAMES.find(node.module, alias.name).absent
