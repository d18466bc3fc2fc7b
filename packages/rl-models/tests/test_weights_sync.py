"""Trainer and replicas as workers: every weight transport, and its failures."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.timing.timer import Timer
from rl_distributed.transfer import SharedMemoryLink
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.replicas.uses import Uses
from rl_models.testing import TokenCrossEntropy
from rl_models.types import SamplingParams
from rl_models.weight_request import Pending
from rl_models.weights.config import ProbeConfig, WeightSyncConfig
from rl_models.weights.links import WeightLinks
from rl_models.weights.loading import load_tensors
from rl_models.weights.receiving import WeightReceiver
from rl_models.weights.sending import WeightSender, whole_buckets
from rl_models.weights.sync import PublishedWeights, WeightSynchronizer

TRANSPORTS = ["object_store", "shared_memory", "collective", "file"]
SMALL = {"bucket_bytes": 8192, "deadline_s": 60.0}


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(cluster, tiny_folder):
    made = HuggingFacePolicy(
        tiny_folder,
        cluster,
        max_total_sequence_length=64,
        optimizer={"kwargs": {"lr": 1e-2}},
    )
    yield made
    made.shutdown()  # the last test has killed one of its processes


def replicas(cluster, folder, updates_in_flight=False, **settings):
    config = GenerationConfig(
        max_new_tokens=8,
        start_deadline_s=120,
        call_deadline_s=60,
        stop_token_ids=[],
        max_restarts=10,
        **settings,
    )
    return GenerationPolicy(
        cluster,
        config,
        model_name=folder,
        load_weights=False,
        updates_in_flight=updates_in_flight,
    )


@pytest.fixture(scope="module")
def generation(cluster, tiny_folder):
    made = replicas(cluster, tiny_folder)
    yield made
    assert made.shutdown()


def prompts(num_rows=6):
    generator = torch.Generator().manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 16, (num_rows, 9), generator=generator),
            "input_lengths": torch.full((num_rows,), 9),
        }
    )


def learn(trainer, seed):
    """Take one optimizer step that moves every weight."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 16, (4, 12), generator=generator)
    mask = torch.ones(4, 12)
    mask[:, 0] = 0
    rows = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((4,), 12),
            "token_mask": mask,
            "sample_mask": torch.ones(4),
        }
    )
    trainer.train(rows, TokenCrossEntropy())


def disagreement(trainer, generation):
    """Return the largest log-prob difference on rows sampled by the replicas."""
    output = generation.generate(prompts())
    rows = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
        }
    )
    # By length: the log-prob of a sampled token may be 0.
    totals = output["unpadded_sequence_lengths"][:, None]
    position = torch.arange(output["output_ids"].shape[1])
    first = totals - output["generation_lengths"][:, None]
    sampled = (position >= first) & (position < totals)
    assert sampled.any()
    logprobs = trainer.get_logprobs(rows)["logprobs"]
    return (logprobs - output["logprobs"])[sampled].abs().max().item()


def make_sync(trainer, generation, **settings):
    return WeightSynchronizer(
        trainer, generation, WeightSyncConfig(**{**SMALL, **settings})
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way_brings_every_version(trainer, generation, transport):
    sync = make_sync(trainer, generation, transport=transport, probe={"period": 2})
    assert sync.is_stale
    timer = Timer()
    for number in range(3):
        learn(trainer, number)
        sync.mark_stale()
        assert sync.is_stale
        assert sync.sync_weights(timer) == generation.weight_version
        assert not sync.is_stale
        assert disagreement(trainer, generation) < 1e-5
    confirmed = sync.take_confirmed()
    last = generation.weight_version
    assert [one.version for one in confirmed] == [last - 2, last - 1, last]
    assert {one.num_processes for one in confirmed} == {2}
    assert len({one.digest for one in confirmed}) == 3
    assert sync.take_confirmed() == []
    spans = timer.get_timing_metrics("count")
    assert spans["weight_sync"] == 3
    assert spans["weight_sync/probe"] == 2
    learn(trainer, 9)
    assert disagreement(trainer, generation) > 1e-2
    sync.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_side_that_loads_another_model_joins_again(
    cluster, trainer, tiny_folder, transport
):
    generation = replicas(cluster, tiny_folder)
    sync = make_sync(trainer, generation, transport=transport)
    try:
        sync.sync_weights()
        trainer.reload(trainer.config)
        sync.sync_weights()
        assert disagreement(trainer, generation) < 1e-5
        learn(trainer, 5)
        generation.reload(generation.config, model_name=tiny_folder, load_weights=False)
        assert sync.sync_weights() == 1
        assert disagreement(trainer, generation) < 1e-5
    finally:
        sync.close()
        generation.shutdown()


def test_published_weights_are_a_copy(trainer, generation):
    sync = make_sync(trainer, generation, transport="object_store")
    learn(trainer, 3)
    first = sync.sync_weights()
    rows = BatchedDataDict({**prompts(), "seeds": torch.arange(6)})
    before = generation.generate(rows)["output_ids"]
    learn(trainer, 4)
    published = sync.publish(first + 1)
    learn(trainer, 5)  # in the same queue, so after the copy
    assert generation.weight_version == first
    assert torch.equal(generation.generate(rows)["output_ids"], before)
    sync.load(published)
    assert generation.weight_version == first + 1
    copy = generation.generate(rows)
    assert not torch.equal(copy["output_ids"], before)
    assert disagreement(trainer, generation) > 1e-2
    # Lost replicas get the same version again, although the trainer has moved on.
    sync.restore_weights()
    _, loaded, again = sync.take_confirmed()
    assert loaded == again
    assert loaded.version == first + 1
    assert torch.equal(generation.generate(rows)["output_ids"], copy["output_ids"])
    sync.sync_weights()
    assert disagreement(trainer, generation) < 1e-5
    with pytest.raises(WeightSyncError, match="not synchronised"):
        sync.load(PublishedWeights(published.request, Pending(lambda left_s: None)))
    sync.sync_weights()


def test_replicas_load_weights_while_they_sample(cluster, trainer, tiny_folder):
    generation = replicas(
        cluster, tiny_folder, updates_in_flight=True, max_batch_size=4
    )
    sync = make_sync(trainer, generation, transport="object_store")
    try:
        assert generation.updates_in_flight
        versions = [sync.sync_weights()]
        rows = BatchedDataDict({**prompts(96), "seeds": torch.arange(96)})
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(
                generation.generate, rows, sampling=SamplingParams(max_new_tokens=100)
            )
            while len(versions) < 3 or not call.done():
                learn(trainer, 10 + len(versions))
                sync.load(sync.publish(versions[-1] + 1))
                versions.append(versions[-1] + 1)
                assert generation.weight_version == versions[-1]
            output = call.result()
        assert (output["generation_lengths"] == 100).all()
        told = output["token_versions"][:, 9:]
        assert (told.diff(dim=1) >= 0).all()
        assert set(told.unique().tolist()) <= set(versions)
        assert torch.equal(output["weight_version"], told[:, 0])
        assert (told[:, 0] < told[:, -1]).any()
        confirmed = sync.take_confirmed()
        assert [weights.version for weights in confirmed] == versions
        assert {weights.num_processes for weights in confirmed} == {2}
        assert len({weights.digest for weights in confirmed}) == len(versions)
        assert disagreement(trainer, generation) < 1e-5
    finally:
        sync.close()
        generation.shutdown()


def test_the_number_of_replicas_follows_the_run(cluster, trainer, tiny_folder):
    generation = replicas(cluster, tiny_folder)
    sync = make_sync(trainer, generation, transport="shared_memory")
    rows = BatchedDataDict({**prompts(), "seeds": torch.arange(6)})
    try:
        learn(trainer, 1)
        sync.sync_weights()
        sampled = generation.generate(rows)["output_ids"]
        generation.resize(1)
        assert generation.num_replicas == 1
        assert torch.equal(generation.generate(rows)["output_ids"], sampled)

        # The returning one serves only once it has the served version.
        generation.resize(2)
        assert generation.num_replicas == 2
        assert len(generation.replicas.serving) == 1
        assert torch.equal(generation.generate(rows)["output_ids"], sampled)
        sync.restore_weights()
        assert len(generation.replicas.serving) == 2
        assert generation.weight_version == 1
        assert torch.equal(generation.generate(rows)["output_ids"], sampled)
        with pytest.raises(ConfigError, match="num_replicas must not exceed"):
            generation.resize(3)
        assert generation.num_replicas == 2
    finally:
        sync.close()
        generation.shutdown()


def test_more_replicas_than_there_were_wait_for_weights(cluster, trainer, tiny_folder):
    generation = replicas(cluster, tiny_folder, num_replicas=1)
    sync = make_sync(trainer, generation, transport="object_store")
    rows = BatchedDataDict({**prompts(), "seeds": torch.arange(6)})
    try:
        learn(trainer, 2)
        sync.sync_weights()
        sampled = generation.generate(rows)["output_ids"]
        generation.resize(None)
        assert generation.num_replicas == 2
        with pytest.raises(GenerationError, match="restarted and have no weights"):
            generation.generate(rows)
        sync.restore_weights()
        assert torch.equal(generation.generate(rows)["output_ids"], sampled)
    finally:
        sync.close()
        generation.shutdown()


def test_a_removed_replica_finishes_its_rows():
    uses, order = Uses(), []
    began, may_end = threading.Event(), threading.Event()

    def call():
        with uses.one():
            began.set()
            assert may_end.wait(60.0)
            order.append("call")

    def change():
        with uses.alone(60.0):
            order.append("change")

    threads = [threading.Thread(target=call), threading.Thread(target=change)]
    for thread in threads:
        thread.start()
        assert began.wait(60.0)
    with pytest.raises(DeadlineExceededError, match="1 calls of generate"):
        uses.alone(0.0).__enter__()
    may_end.set()
    for thread in threads:
        thread.join(60.0)
    assert order == ["call", "change"]


def test_versions_only_rise(trainer, generation):
    sync = make_sync(trainer, generation)
    before = generation.weight_version
    assert sync.sync_weights(version=before + 5) == before + 5
    with pytest.raises(ConfigError, match=f"got {before + 5} with version"):
        sync.sync_weights(version=before + 5)
    sync.go_back()
    assert sync.is_stale
    # A trainer that has lost a worker repeats its last steps.
    assert sync.sync_weights(version=before + 3) == before + 3
    assert generation.weight_version == before + 3
    with pytest.raises(ConfigError, match=f"got {before + 3} with version"):
        sync.sync_weights(version=before + 3)


class Spoiling:
    """A trainer whose messages lack part of a bucket."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.config = trainer.config

    def start_weight_export(self, request, link=None):
        export = self.trainer.start_weight_export(request, link)
        return type(export)(export.wait, export.messages[:1] + export.messages[2:])


def test_a_truncated_transfer_is_refused_until_a_sync_succeeds(trainer, generation):
    sync = make_sync(Spoiling(trainer), generation, probe={"period": 0})
    before = generation.weight_version
    with pytest.raises(WeightSyncError, match=r"replica 0.*came where.*replica 1"):
        sync.sync_weights()
    assert sync.is_stale
    assert generation.weight_version == before
    with pytest.raises(GenerationError, match="last weight update failed"):
        generation.generate(prompts())
    # The replica itself also refuses, whoever asks.
    alone = generation.group.run_single_worker_single_data(
        "generate", 1, data=prompts()
    )
    with pytest.raises(Exception, match="replica 1 does not serve"):
        generation.group.get_all_worker_results([alone])
    assert make_sync(trainer, generation).sync_weights() == before + 1
    assert disagreement(trainer, generation) < 1e-5


class Elsewhere:
    """A trainer whose log-probs are those of other weights."""

    def __init__(self, trainer, offset):
        self.trainer = trainer
        self.config = trainer.config
        self.offset = offset
        self.start_weight_export = trainer.start_weight_export

    def get_logprobs(self, rows):
        logprobs = self.trainer.get_logprobs(rows)["logprobs"]
        return BatchedDataDict({"logprobs": logprobs + self.offset})


@pytest.mark.parametrize("offset", [2e-4, float("nan")])
def test_a_probe_that_disagrees_stops_generation(trainer, generation, offset):
    sync = make_sync(Elsewhere(trainer, offset), generation)
    with pytest.raises(
        WeightSyncError, match=r"replica 0 does not compute.*those that were sent"
    ):
        sync.sync_weights()
    with pytest.raises(GenerationError, match="replica 1 does not compute"):
        generation.generate(prompts())
    loose = ProbeConfig(max_difference=1e-3, mean_difference=1e-3)
    if offset == offset:
        sync = make_sync(Elsewhere(trainer, offset), generation, probe=loose.to_dict())
        sync.sync_weights()
    make_sync(trainer, generation).sync_weights()
    assert disagreement(trainer, generation) < 1e-5


@contextmanager
def port_in_use():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_followed_by_another(trainer, generation, monkeypatch):
    found = trainer.weight_link_address
    with port_in_use() as taken:
        ports = [taken]
        monkeypatch.setattr(
            trainer,
            "weight_link_address",
            lambda: (found()[0], ports.pop() if ports else found()[1]),
        )
        sync = make_sync(
            trainer, generation, transport="collective", link_deadline_s=10.0
        )
        assert sync.sync_weights() == generation.weight_version
        assert not ports
        sync.close()
    assert disagreement(trainer, generation) < 1e-5


class Deadly:
    """A trainer during whose syncs a process is killed."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.config = trainer.config
        self.victim = None

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def start_weight_export(self, request, link=None):
        if self.victim is not None:
            with suppress(ProcessLookupError):  # on the second attempt
                os.kill(self.victim, signal.SIGKILL)
        return self.trainer.start_weight_export(request, link)


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
def test_a_replica_that_dies_during_a_sync_does_not_stop_it(
    trainer, generation, transport
):
    killing = Deadly(trainer)
    sync = make_sync(killing, generation, transport=transport, probe={"period": 1})
    before = sync.sync_weights()
    learn(trainer, 1)
    killing.victim = generation.group.worker_pids[0]
    assert sync.sync_weights() == before + 1
    assert generation.weight_version == before + 1
    assert disagreement(trainer, generation) < 1e-5
    killing.victim = None
    learn(trainer, 2)
    assert generation.replicas.settle() == [0, 1]
    assert sync.sync_weights() == before + 2
    assert generation.replicas.serving == [0, 1]
    assert disagreement(trainer, generation) < 1e-5
    sync.close()


def test_replicas_that_were_all_lost_get_the_same_weights_again(trainer, generation):
    sync = make_sync(trainer, generation)
    version = sync.sync_weights()
    for process in generation.group.worker_pids:
        os.kill(process, signal.SIGKILL)
    assert disagreement(trainer, generation) < 1e-5
    assert generation.weight_version == version
    sync.mark_stale()
    with pytest.raises(WeightSyncError, match="had changed"):
        sync.restore_weights()
    # The other one may still be updating; what follows ends the group.
    assert generation.replicas.settle() == [0, 1]


class Apart:
    """A side of a sync whose workers are on these nodes."""

    uses_gpus = False

    def __init__(self, *nodes):
        self.node_ids = set(nodes)

    def live_processes(self):
        return [(0, 0)]

    def weight_link_address(self):
        return "10.0.0.1", 25000

    def open_weight_link(self, link, deadline_s):
        raise AssertionError("the nodes are looked at first")


class Plain:
    """All that a sync needs of both sides; it inherits nothing."""

    weight_version = 0

    def __init__(self):
        self.served = []

    def start_weight_export(self, request, link=None):
        assert link is None
        return Pending(lambda left_s: [None], ("messages",))

    def start_weight_update(self, source, request):
        assert source == ("messages",)
        self.weight_version = request.version
        return Pending(lambda left_s: None)


def test_a_restore_waits_for_weights_that_are_on_their_way():
    class Slow(Plain):
        def start_weight_update(self, source, request):
            def wait(left_s):
                entered.append(request.version)
                begun.set()
                assert release.wait(60.0)
                self.weight_version = request.version

            return Pending(wait)

    begun, release, entered = threading.Event(), threading.Event(), []
    sync = WeightSynchronizer(Plain(), Slow())
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(sync.load, sync.publish(5))]
        assert begun.wait(60.0)
        loads.append(pool.submit(sync.restore_weights))
        release.set()
        for load in loads:
            load.result(60.0)
    # The restore brings what has been loaded by then, not what was served before.
    assert entered == [5, 5]


def test_two_sides_that_offer_the_least(caplog):
    sink = Plain()
    synchronizer = WeightSynchronizer(Plain(), sink)
    with caplog.at_level("WARNING"):
        assert synchronizer.sync_weights() == 1
        assert synchronizer.sync_weights() == 2
    assert sink.weight_version == 2
    assert synchronizer.take_confirmed() == [], "it does not say"
    told = [r.getMessage() for r in caplog.records if "cannot be checked" in r.msg]
    assert len(told) == 1, "said once"
    assert told[0].startswith("Plain has no config, get_logprobs, so whether")
    linked = WeightSynchronizer(
        Plain(), Plain(), WeightSyncConfig(transport="shared_memory")
    )
    with pytest.raises(ConfigError, match=r"Plain has no live_processes, .*'object_st"):
        linked.sync_weights()


def test_what_needs_one_machine_says_so(ray_cluster):
    for transport in ("shared_memory", "cuda_ipc", "file"):
        config = WeightSyncConfig(transport=transport)
        links = WeightLinks(config, Apart("a", "b"), Apart("b", "c"))
        with pytest.raises(ConfigError, match=f"'{transport}' needs.*on 3 nodes"):
            links.joined(1)
    links = WeightLinks(
        WeightSyncConfig(transport="file", folder="/nfs/w"), Apart("a"), Apart("b")
    )
    folder = Path(links._make("file", 3, 1).folder)
    assert (folder.parents[1], folder.name) == (Path("/nfs/w"), "version-3")
    config = WeightSyncConfig(transport="collective")
    link = WeightLinks(config, Apart("a"), Apart("b"))._make("collective", 3, 2)
    assert (link.address, link.num_receivers, link.backend) == ("10.0.0.1", 2, "gloo")
    assert WeightLinks(WeightSyncConfig(), Apart("a"), Apart("b")).joined(1) is None


class Here:
    """Both ends of a sync in this process: one tensor, and two replicas."""

    uses_gpus = False
    weight_version = 0

    def __init__(self, value):
        self.model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.model.weight, value)
        self.sender = WeightSender(
            lambda request: whole_buckets(self.model.state_dict().items(), request, 0),
            0,
        )
        self.node_ids = set()

    def live_processes(self):
        return [(0, 0, 1)]

    def weight_link_address(self):
        raise AssertionError("files need no address")

    def open_weight_link(self, link, deadline_s):
        self.sender.open(link, deadline_s)
        return Pending(lambda left_s: None)

    def start_weight_export(self, request, link=None):
        digest = self.sender.send(link, request)
        return Pending(lambda left_s: digest)


class ReplicasHere(Here):
    """Replicas that load in this process; some are lost as they join their link."""

    def __init__(self, num_replicas=1, num_lost=0):
        super().__init__(0.0)
        self.live, self.num_lost = list(range(num_replicas)), num_lost
        self.receivers = []
        self.links = []

    def live_processes(self):
        return [(replica, 0, 1) for replica in self.live]

    def open_weight_link(self, link, deadline_s):
        self.links.append((link.num_receivers, len(self.live)))
        self.receivers = [WeightReceiver(f"replica {r}") for r in self.live]
        for index, receiver in enumerate(self.receivers):
            receiver.open(link, index, deadline_s)
        lost, self.num_lost = self.num_lost, 0

        def finish(left_s):
            if lost:
                del self.live[-lost:]
                raise WeightSyncError("A replica was lost before it joined the link.")

        return Pending(finish)

    def start_weight_update(self, source, request):
        def finish(left_s):
            for receiver in self.receivers:
                weights = receiver.weights(source, request)
                load_tensors(self.model, iter(weights), "a replica")
                receiver.accept(weights.manifest(), request.kind)
            self.weight_version = request.version

        return Pending(finish)


def in_files(value, folder, sink):
    config = WeightSyncConfig(
        transport="file", folder=str(folder), deadline_s=10.0, probe={"period": 0}
    )
    return WeightSynchronizer(Here(value), sink, config)


@pytest.mark.parametrize("is_partial", [False, True])
def test_files_of_a_killed_run_are_not_read(tmp_path, is_partial):
    # Its files stay where nobody closes it.
    in_files(1.0, tmp_path, ReplicasHere()).sync_weights(version=3)
    (killed,) = tmp_path.iterdir()
    written = sorted(killed.rglob("message-*"))
    assert written
    if is_partial:
        written[-1].unlink()
    sync = in_files(2.0, tmp_path, sink := ReplicasHere())
    assert sync.sync_weights(version=3) == 3
    assert sink.model.weight[0, 0] == 2.0
    sync.close()
    assert list(tmp_path.iterdir()) == [killed], "its own files are removed"


def test_a_second_link_is_for_the_replicas_that_are_left(tmp_path):
    sink = ReplicasHere(num_replicas=2, num_lost=1)
    sync = in_files(1.0, tmp_path, sink)
    assert sync.sync_weights() == 1
    assert sink.links == [(2, 2), (1, 1)]
    sync.close()


def test_auto_shares_memory_where_it_can(trainer, generation, monkeypatch):
    link_of = WeightLinks(WeightSyncConfig(), trainer, generation).joined
    link = link_of(1)
    assert isinstance(link, SharedMemoryLink)
    assert link_of(2) is link
    monkeypatch.setattr(SharedMemoryLink, "room", lambda: 64 << 20)
    assert link_of(3) is link  # the existing link needs no more room
    assert WeightLinks(WeightSyncConfig(), trainer, generation).joined(1) is None
    monkeypatch.setattr(type(generation), "node_ids", {"another"})
    assert link_of(4) is None
    assert not Path(link.folder).exists()
    assert WeightLinks(WeightSyncConfig(), object(), generation).joined(1) is None


def test_a_trainer_that_dies_during_a_sync_is_named(trainer, generation):
    sync = make_sync(trainer := Deadly(trainer), generation)
    sync.sync_weights()
    trainer.victim = trainer.group.worker_pids[0]
    with pytest.raises(WeightSyncError, match=r"worker 0 of group 'policy'.*SIGKILL"):
        sync.sync_weights()
    with pytest.raises(WeightSyncError, match="worker 0 of group 'policy'"):
        sync.sync_weights()
    assert sync.is_stale
    with pytest.raises(GenerationError, match="last weight update failed"):
        generation.generate(prompts())
