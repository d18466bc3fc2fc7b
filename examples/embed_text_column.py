"""Embed a text column with several workers; nothing here is about learning.

    python examples/embed_text_column.py [NUM_TEXTS]

Each text becomes the normalised sum of random vectors, one per run of three characters
(hashed n-grams through a random projection), so that texts that share words lie close
to each other. The column is sharded over the workers; every worker makes the same
random vectors from the same seed, and results come back in the order of the texts.
"""

from __future__ import annotations

import os
import sys
import time
import zlib

import torch

from rl_distributed import (
    BatchedDataDict,
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    init_ray,
)

NUM_WORKERS = 2
NUM_BUCKETS, DIM, NGRAM = 1 << 14, 128, 3
WHO = [
    "the cat",
    "a small dog",
    "my neighbour",
    "an old sailor",
    "the baker",
    "our teacher",
]
DOES = [
    "sleeps",
    "sings loudly",
    "reads a book",
    "eats bread",
    "waits",
    "counts the stars",
]
WHERE = [
    "in the garden",
    "on the roof",
    "by the sea",
    "at home",
    "in the city",
    "under a tree",
]


class Embedder:
    """A plain class: it runs in a worker, and without Ray as well."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = torch.randn(NUM_BUCKETS, DIM, generator=generator)

    def embed(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the column `embedding` `[rows, DIM]`, and who made each row."""
        runs = [self.buckets_of(text) for text in batch["text"]]
        sizes = torch.tensor([0, *map(len, runs)])
        buckets = torch.tensor([bucket for run in runs for bucket in run])
        sums = torch.nn.functional.embedding_bag(
            buckets, self.vectors, sizes.cumsum(0)[:-1], mode="sum"
        )
        embedding = torch.nn.functional.normalize(sums, dim=1)
        worker = torch.full((batch.size,), int(os.environ.get("RANK", 0)))
        return BatchedDataDict(embedding=embedding, worker=worker)

    @staticmethod
    def buckets_of(text: str) -> list[int]:
        """Return the bucket of each run of characters in a text."""
        data = f" {text} ".encode()
        return [
            zlib.crc32(data[place : place + NGRAM]) % NUM_BUCKETS
            for place in range(len(data) - NGRAM + 1)
        ]


def make_texts(count: int) -> list[str]:
    """Sentences, each with a number, so that no two are the same."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, 6, (count, 3), generator=generator).tolist()
    return [
        f"{WHO[who]} {DOES[does]} {WHERE[where]} ({number})"
        for number, (who, does, where) in enumerate(picks)
    ]


def main() -> None:
    """Start the workers, embed the column, look up neighbours."""
    texts = make_texts(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    init_ray(num_cpus=NUM_WORKERS)
    with (
        RayVirtualCluster([NUM_WORKERS], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Embedder, seed=0),
            sharding_annotations=NamedSharding([0, 1], ["data"]),
        ) as group,
    ):
        begun = time.perf_counter()
        batch = BatchedDataDict(text=texts)
        shards = batch.shard_by_batch_size(NUM_WORKERS, allow_uneven_shards=True)
        call = group.run_all_workers_sharded_data(
            "embed", batch=shards, in_sharded_axes=["data"]
        )
        result = BatchedDataDict.from_batches(group.get_all_worker_results(call))
        took = time.perf_counter() - begun

    rows, dim = result["embedding"].shape
    by_worker = torch.bincount(result["worker"]).tolist()
    print(f"embedded {rows} texts in {dim} dimensions ({took:.1f} s)")
    print("rows by worker: " + ", ".join(map(str, by_worker)))
    for query in (
        "a small dog sings loudly on a roof",
        "an old sailor counts the stars",
    ):
        own = Embedder(seed=0).embed(BatchedDataDict(text=[query]))["embedding"]
        likeness, places = (result["embedding"] @ own[0]).topk(3)
        print(f"\nclosest to {query!r}:")
        for value, place in zip(likeness.tolist(), places.tolist(), strict=True):
            print(f"  {value:.2f}  {texts[place]}")


if __name__ == "__main__":
    main()
