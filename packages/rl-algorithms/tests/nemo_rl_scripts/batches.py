"""A script written for NeMo RL: message logs, collation, packing and sharding."""

import json
import sys

import torch
from nemo_rl.data.collate_fn import preference_collate_fn, rl_collate_fn
from nemo_rl.data.interfaces import DatumSpec, LLMMessageLogType
from nemo_rl.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_keys_from_message_log,
    message_log_shape,
    message_log_to_flat_messages,
)
from nemo_rl.data.packing import PackingAlgorithm, get_packer
from nemo_rl.distributed.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
)

LENGTHS = [46, 24, 55, 88, 11, 14, 73, 17, 30, 60, 5, 9]


class Tokenizer:
    """One token for each word."""

    pad_token_id = 0

    def encode(self, text):
        return torch.tensor([len(word) for word in text.split()])


def conversation(tokenizer, *texts) -> LLMMessageLogType:
    roles = ("user", "assistant")
    return [
        {
            "role": roles[place % 2],
            "content": text,
            "token_ids": tokenizer.encode(text),
        }
        for place, text in enumerate(texts)
    ]


def message_logs(tokenizer):
    logs = [
        conversation(tokenizer, "a bb ccc", "dddd e"),
        conversation(tokenizer, "ff", "g hh iii", "j", "kkkk"),
    ]
    add_loss_mask_to_message_log(logs, roles_to_train_on=["assistant"])
    flat = message_log_to_flat_messages(logs[1])
    batch, lengths = batched_message_log_to_flat_message(
        logs,
        pad_value_dict={"token_ids": tokenizer.pad_token_id},
        make_sequence_length_divisible_by=4,
    )
    return {
        "flat_ids": flat["token_ids"].tolist(),
        "flat_roles": flat["role"],
        "ids": batch["token_ids"].tolist(),
        "mask": batch["token_loss_mask"].tolist(),
        "lengths": lengths.tolist(),
        "lengths_dtype": str(lengths.dtype),
        "texts": get_keys_from_message_log(logs[0], ["content"]),
        "shapes": [
            {key: list(size) for key, size in message.items()}
            for message in message_log_shape(logs[0])
        ],
    }


def collated(tokenizer):
    logs = [
        conversation(tokenizer, "a bb ccc"),
        conversation(tokenizer, "dddd e"),
    ]
    data: list[DatumSpec] = [
        {
            "message_log": log,
            "length": sum(len(m["token_ids"]) for m in log),
            "extra_env_info": {"ground_truth": str(index)},
            "loss_multiplier": 1.0 - index,
            "idx": index,
            "task_name": "math",
            "stop_strings": ["\n"],
        }
        for index, log in enumerate(logs)
    ]
    batch = rl_collate_fn(data)
    repeated = batch.repeat_interleave(2)
    repeated["message_log"][0].append({"role": "assistant", "content": "new"})
    pairs = preference_collate_fn(
        [
            {
                "message_log_chosen": conversation(tokenizer, "a bb", "c"),
                "message_log_rejected": conversation(tokenizer, "a bb", "ddd eeee f"),
                "length_chosen": 3,
                "length_rejected": 5,
                "loss_multiplier": 1.0,
                "idx": 0,
            },
            {
                "message_log_chosen": conversation(tokenizer, "gg", "hh", "i", "j jj"),
                "message_log_rejected": conversation(tokenizer, "gg", "k"),
                "length_chosen": 5,
                "length_rejected": 2,
                "loss_multiplier": 0.0,
                "idx": 1,
            },
        ],
        tokenizer,
        make_sequence_length_divisible_by=2,
        add_loss_mask=True,
    )
    return {
        "keys": sorted(batch),
        "length": batch["length"].tolist(),
        "longest": batch["batch_max_length"].tolist(),
        "multiplier": batch["loss_multiplier"].tolist(),
        "info": batch["extra_env_info"],
        "idx": repeated["idx"],
        "messages": [len(log) for log in repeated["message_log"]],
        "pairs": {key: value.tolist() for key, value in pairs.items()},
    }


def rows():
    lengths = torch.tensor(LENGTHS)
    ids = (torch.arange(100) < lengths[:, None]).long()
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "idx": torch.arange(len(LENGTHS))}
    )


def packed():
    args: SequencePackingArgs = {
        "max_tokens_per_microbatch": 100,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 4,
    }
    shards, unsorted = rows().shard_by_batch_size(2, sequence_packing_args=args)
    bins = []
    for shard in shards:
        count, longest = shard.get_microbatch_iterator_for_packable_sequences_len()
        found = [
            batch["idx"].tolist()
            for batch in shard.make_microbatch_iterator_for_packable_sequences()
        ]
        bins.append({"count": count, "longest": longest, "idx": found})
    whole = BatchedDataDict.from_batches(shards)
    whole.reorder_data(unsorted)
    return {"shards": bins, "restored": whole["idx"].tolist()}


def dynamic():
    args: DynamicBatchingArgs = {
        "max_tokens_per_microbatch": 200,
        "sequence_length_round": 8,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, unsorted = rows().shard_by_batch_size(2, dynamic_batching_args=args)
    found = [
        [
            {"idx": b["idx"].tolist(), "width": b["input_ids"].shape[1]}
            for b in shard.make_microbatch_iterator_with_dynamic_shapes()
        ]
        for shard in shards
    ]
    whole = BatchedDataDict.from_batches(shards)
    whole.reorder_data(unsorted)
    return {"shards": found, "restored": whole["idx"].tolist()}


def main(folder):
    tokenizer = Tokenizer()
    ragged = BatchedDataDict.from_batches(
        [{"x": torch.ones(1, 2), "t": ["a"]}, {"x": torch.ones(2, 3), "t": ["b", "c"]}],
        pad_value_dict={"x": -1},
    )
    packers = {
        algorithm.name: get_packer(algorithm, bin_capacity=100).pack(LENGTHS)
        for algorithm in PackingAlgorithm
    }
    found = {
        "message_logs": message_logs(tokenizer),
        "collated": collated(tokenizer),
        "packed": packed(),
        "dynamic": dynamic(),
        "packers": packers,
        "multiple": get_packer(
            "first_fit_decreasing", 100, min_bin_count=8, bin_count_multiple=3
        ).pack(LENGTHS),
        "ragged": ragged["x"].tolist(),
        "texts": ragged["t"],
        "uneven": [
            shard["idx"].tolist()
            for shard in rows()
            .slice(0, 5)
            .shard_by_batch_size(4, allow_uneven_shards=True)
        ],
        "chunk": rows().chunk(rank=1, chunks=3)["idx"].tolist(),
        "second_batch": rows().get_batch(1, batch_size=4)["idx"].tolist(),
        "selected": rows().select_indices([3, 1])["idx"].tolist(),
        "size": rows().size,
        "is_dict": isinstance(rows(), dict),
    }
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
