"""Keys with the same meaning in both, and keys without a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CHECKPOINTING",
    "GENERATION",
    "GRPO",
    "LEFT_OUT",
    "LOSS",
    "POLICY",
    "SUPERVISED",
    "VLLM",
]

POLICY = (
    "model_name",
    "tokenizer.name",
    "tokenizer.chat_template",
    "hf_config_overrides",
    "max_total_sequence_length",
    "train_global_batch_size",
    "train_micro_batch_size",
    "logprob_batch_size",
    "max_grad_norm",
    "optimizer.name",
    "optimizer.kwargs",
)
GENERATION = (
    "temperature",
    "top_p",
    "top_k",
    "val_temperature",
    "val_top_p",
    "val_top_k",
    "stop_token_ids",
    "stop_strings",
)
VLLM = (
    "async_engine",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
)
SUPERVISED = (
    "max_num_epochs",
    "max_num_steps",
    "val_period",
    "val_batches",
    "val_global_batch_size",
    "val_at_start",
    "val_at_end",
)
GRPO = (
    "num_prompts_per_step",
    "num_generations_per_prompt",
    "max_rollout_turns",
    "max_num_epochs",
    "max_num_steps",
    "val_period",
    "val_start_at",
    "val_at_start",
    "val_at_end",
    "val_batch_size",
    "max_val_samples",
    "val_num_generations_per_prompt",
    "stop_at_validation_metric",
    "stop_at_validation_threshold",
)
LOSS: Mapping[str, tuple[str, ...]] = {
    "grpo": (
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "use_on_policy_kl_approximation",
        "use_importance_sampling_correction",
        "truncated_importance_sampling_type",
        "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
        "sequence_level_importance_ratios",
        "token_level_loss",
        "force_on_policy_ratio",
        "use_kl_in_reward",
        "use_cispo",
        "disable_ppo_ratio",
    ),
    "dpo": (
        "reference_policy_kl_penalty",
        "preference_loss_weight",
        "sft_loss_weight",
        "preference_average_log_probs",
        "sft_average_log_probs",
    ),
    "distillation": ("kl_type", "mixed_kl_weight", "zero_outside_topk"),
}
CHECKPOINTING = (
    "enabled",
    "higher_is_better",
    "save_period",
    "keep_top_k",
    "checkpoint_must_save_by",
    "save_optimizer",
)

_FILES = "a model is written in the format of transformers"
_PORTS = "ports are chosen among the free ones"
_PAD = "rows are padded, or packed, to what a layout needs"
LEFT_OUT: Mapping[str, str] = {
    "checkpointing.checkpoint_dir": "checkpoints lie in the run folder: --output-dir",
    "checkpointing.model_save_format": _FILES,
    "checkpointing.save_consolidated": _FILES,
    "logger.log_dir": "logs lie in the run folder: --output-dir",
    "logger.num_val_samples_to_print": "samples are kept, and `rl report` shows them",
    "logger.wandb.log_nemo_gym_full_result_tables": "there is no NeMo Gym",
    "data.num_workers": "data are read in the program itself",
    "data.use_multiple_dataloader": "give data.train as a list of sources",
    "data_plane": "batches go through Ray",
    "cluster.master_port_range_low": _PORTS,
    "cluster.master_port_range_high": _PORTS,
    "cluster.segment_size": "tied workers are placed by node and NVLink domain",
    "on_policy_distillation": "`rl train distillation` has one teacher",
    "policy.generation_batch_size": "it is read nowhere there either",
    "policy.make_sequence_length_divisible_by": _PAD,
    "policy.tokenizer.use_fastokens": "tokenizers are those of transformers",
    "policy.offload_optimizer_for_logprob": "policy.dtensor.cpu_offload keeps it there",
    "policy.generation.port_range_low": _PORTS,
    "policy.generation.port_range_high": _PORTS,
    "policy.generation.refit_cfg": "policy.generation.weight_sync says how",
    "policy.generation.refit_transport": "policy.generation.weight_sync.transport",
    "policy.generation.real_quant_export_cpu_offload": "there is no quantisation",
    "policy.generation.mcore_generation_config": "Megatron samples by its own layers",
}
"""Keys and sections that are always dropped, with the reason."""
