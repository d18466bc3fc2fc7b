from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rl_distributed_sample_transfer as sample
import torch
from hypothesis import given, strategies as st

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    DeadlineExceededError,
    ResourceInsufficientError,
    TransferError,
)
from rl_distributed.testing import TransferContractError, check_transfer
from rl_distributed.transfer import (
    CollectiveLink,
    CudaIpcLink,
    FileLink,
    Header,
    Manifest,
    ObjectStoreLink,
    SharedMemoryLink,
    TensorEntry,
    digest_of,
    receive_tensors,
    send_tensors,
)
from rl_distributed.transfer.manifest import piece_bytes
from rl_distributed.transfer.messages import tensor_messages
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup

LINKS = ["shared memory", "file", "collective", "object store"]
SPAWN = multiprocessing.get_context("spawn")


def maker(kind: str, folder: Path) -> Callable[[int], Any]:
    """Return a factory for links of a kind."""
    if kind == "file":
        names = iter(range(100))
        return lambda count: FileLink(str(folder / str(next(names))), count)
    return {
        "shared memory": SharedMemoryLink.create,
        "collective": CollectiveLink.local,
        "object store": ObjectStoreLink.create,
    }[kind]


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Any]:
    """A process that is killed at the end."""
    child = SPAWN.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join(30)


def peer_actor() -> Any:
    """An actor that can import the sample module."""
    path = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    env = {"env_vars": {"PYTHONPATH": path}}
    return ray.remote(sample.Peer).options(num_cpus=0, runtime_env=env).remote()


class Loopback:
    """Both ends in one process, with a way to corrupt messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.spoil: Callable[[list[Any]], list[Any]] = lambda messages: messages

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, header: Any, block: Any, *, deadline_s: float) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        self.messages.append((header, empty if block is None else block))

    def receive(self, *, deadline_s: float) -> Any:
        self.messages = self.spoil(self.messages)
        self.spoil = lambda messages: messages
        return self.messages.pop(0)

    def close(self) -> None:
        pass


# ------------------------------------------------------------------ every link the same


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", LINKS)
def test_links_keep_the_contract(kind: str, tmp_path: Path) -> None:
    check_transfer(maker(kind, tmp_path), deadline_s=60)


def test_the_contract_finds_a_link_that_loses_bits(tmp_path: Path) -> None:
    class Forgetful(FileLink):
        def receiver(self, index: int = 0, *, deadline_s: float = 60.0) -> Any:
            end = super().receiver(index, deadline_s=deadline_s)
            receive = end.receive

            def spoiled(*, deadline_s: float) -> Any:
                header, block = receive(deadline_s=deadline_s)
                return (
                    (header, block) if header.kind != "abort" else receive(deadline_s=1)
                )

            end.receive = spoiled  # type: ignore[method-assign]
            return end

    names = iter(range(100))
    with pytest.raises(TransferContractError, match="a sender that gives up must be"):
        check_transfer(lambda count: Forgetful(str(tmp_path / str(next(names))), count))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", LINKS)
def test_the_death_of_the_sender_names_the_last_tensor(
    kind: str, tmp_path: Path
) -> None:
    with maker(kind, tmp_path)(1) as link:
        if kind == "object store":
            peer = peer_actor()
            pid = ray.get(peer.pid.remote(), timeout=60)
            peer.send_and_hang.remote(link)
            check_death(link, pid)
            return
        with process(sample.send_and_hang, link) as child:
            check_death(link, child.pid)


def check_death(link: Any, pid: int) -> None:
    tensors = iter(receive_tensors(link.receiver(deadline_s=60), deadline_s=60))
    name, tensor = next(tensors)
    assert (name, tensor.sum()) == ("first", 1000)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TransferError, match="nothing came after tensor 'first'"):
        next(tensors)


@pytest.mark.usefixtures("ray_cluster")
def test_a_group_sends_to_another(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3000), "b": torch.ones(7).bfloat16()}
    builder = RayWorkerBuilder("rl_distributed_sample_transfer.Peer")
    with (
        RayVirtualCluster(
            [2], use_gpus=False, max_colocated_worker_groups=2
        ) as cluster,
        RayWorkerGroup(cluster, builder, workers_per_node=1) as senders,
        RayWorkerGroup(cluster, builder, workers_per_node=2) as receivers,
    ):
        for kind in LINKS:
            with maker(kind, tmp_path)(2) as link:
                pulls = receivers.run_all_workers_multiple_data(
                    "receive", link=[link] * 2, index=[0, 1]
                )
                push = senders.run_single_worker_single_data(
                    "send", 0, link=link, tensors=tensors, label=kind
                )
                (sent,) = senders.get_all_worker_results([push], deadline_s=60)
                results = receivers.get_all_worker_results(pulls, deadline_s=60)
            assert sent.label == kind
            assert len({pid for *_, pid in results}) == 2
            for sums, manifest, _ in results:
                assert sums == {"a": 3000, "b": 7}
                assert manifest.digest == sent.digest


@pytest.mark.usefixtures("ray_cluster")
def test_links_over_the_object_store_share_an_actor() -> None:
    with ObjectStoreLink.create(2) as first, ObjectStoreLink.create() as second:
        actors = {queue._host._actor_id for queue in (*first.queues, *second.queues)}
        send_tensors(second.sender(), {"a": torch.ones(3)})
    with ObjectStoreLink.create() as third:
        actors.add(third.queues[0]._host._actor_id)
        send_tensors(third.sender(), {"a": torch.zeros(3)})
        assert receive_tensors(third.receiver()).read()["a"].sum() == 0
    assert len(actors) == 1


@pytest.mark.usefixtures("ray_cluster")
def test_links_get_another_actor_when_theirs_died() -> None:
    with ObjectStoreLink.create() as first:
        ray.kill(first.queues[0]._host)
        with ObjectStoreLink.create() as second:
            send_tensors(second.sender(), {"a": torch.ones(3)})
            assert receive_tensors(second.receiver()).read()["a"].sum() == 3


# ---------------------------------------------------------------------- what goes wrong


def sent(tensors: Any, bucket_bytes: int = 1) -> Loopback:
    link = Loopback()
    send_tensors(link, tensors, bucket_bytes=bucket_bytes)
    return link


def damage(messages: list[Any]) -> list[Any]:
    messages[0][1][5] += 1
    return messages


def lose_a_tensor(messages: list[Any]) -> list[Any]:
    header, block = messages[0]
    kept = type(header)(header.kind, header.number, header.label, header.entries[1:])
    return [(kept, block), *messages[1:]]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (damage, r"tensor 'a' \(float32\[3\]\) arrived damaged: its digest is"),
        (lambda messages: messages[1:], "message 1 came where message 0 was due"),
        (lambda messages: [messages[0], *messages], "message 0 came where message 1"),
        (lambda m: [m[1], m[0], *m[2:]], "came where message 0 was due"),
        (lambda m: [(m[0][0], m[0][1][:4]), *m[1:]], "'a'.* block ends after 4"),
    ],
)
def test_spoiled_messages_are_found(spoil: Any, expected: str) -> None:
    link = sent({"a": torch.rand(3), "b": torch.rand(3)})
    link.spoil = spoil
    with pytest.raises(TransferError, match=expected):
        receive_tensors(link).read()


def test_a_tensor_that_is_left_out_is_named() -> None:
    link = sent({"a": torch.rand(3), "b": torch.rand(3)}, bucket_bytes=1000)
    link.spoil = lose_a_tensor
    with pytest.raises(TransferError, match="is not what was sent: a is missing"):
        receive_tensors(link).read()


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": torch.empty(3)}, "'b' is not among the 1 expected ones"),
        ({"a": torch.empty(4)}, r"'a' must be float32\[4\]: got float32\[3\]"),
        ({"a": torch.empty(3).half()}, r"'a' must be float16\[3\]: got float32"),
        (dict.fromkeys("abc", torch.empty(3, device="meta")), "c is missing: it was"),
    ],
)
def test_unexpected_tensors_are_named(expected: Any, message: str) -> None:
    link = sent({"a": torch.rand(3), "b": torch.rand(3)})
    with pytest.raises(TransferError, match=message):
        receive_tensors(link, expected=expected).read()


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' occurs twice"),
        ([("a", torch.ones(1, device="meta"))], "'a' must be dense and have values"),
        ([("a", torch.ones(2, 2).to_sparse())], "'a' must be dense"),
    ],
)
def test_what_cannot_be_sent_is_named(tensors: Any, expected: str) -> None:
    link = Loopback()
    with pytest.raises(TransferError, match=expected):
        send_tensors(link, tensors)
    with pytest.raises(TransferError, match=f"the sender gave up.*{expected}"):
        receive_tensors(link).read()
    with pytest.raises(TransferError, match="bucket_bytes must be positive"):
        send_tensors(link, {}, bucket_bytes=0)


def test_manifests_say_how_they_differ() -> None:
    entry = TensorEntry("a", "float32", (3,), "0")
    other = TensorEntry("b", "float32", (3,), "0")
    first = Manifest((entry,), "one")
    for received, expected in (
        (Manifest((), "one"), ["a is missing"]),
        (Manifest((TensorEntry("a", "int8", (3,), "0"),), "one"), ["a has dtype int8"]),
        (Manifest((TensorEntry("a", "float32", (2,), "0"),), "one"), ["a has shape"]),
        (Manifest((TensorEntry("a", "float32", (3,), "1"),), "one"), ["a has other"]),
        (Manifest((entry,), "two"), ["the label is 'two'"]),
        (Manifest((entry, other), "one"), ["b was not sent"]),
    ):
        found = first.differences(received)
        assert len(found) == 1
        assert found[0].startswith(expected[0])
        assert first.digest != received.digest
    moved = TensorEntry("a", "float32", (3,), "0", start=64)
    assert Manifest((moved,), "one").digest == first.digest
    assert first.num_bytes == 12


# --------------------------------------------------------------- buckets and the digest


@given(
    st.lists(st.integers(0, 300), max_size=30), st.integers(1, 1000), st.integers(0, 9)
)
def test_buckets_hold_every_tensor_once_up_to_their_size(
    sizes: list[int], bucket_bytes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        str(n): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for n, size in enumerate(sizes)
    }
    link = sent(tensors, bucket_bytes)
    names = []
    for header, block in link.messages[:-1]:
        assert block.numel() <= bucket_bytes or len(header.entries) == 1
        assert all(entry.start % 64 == 0 for entry in header.entries)
        names += [entry.name for entry in header.entries]
    assert names == list(tensors)
    received = receive_tensors(link).read()
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)


@given(st.integers(1, 20_000), st.data())
def test_the_digest_finds_any_changed_byte(size: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 99))
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    original = torch.from_numpy(values)
    digest = digest_of(original)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), original])
    assert digest_of(shifted[3:]) == digest
    place = data.draw(st.integers(0, size - 1))
    other = original.clone()
    other[place] += data.draw(st.integers(1, 255))
    assert digest_of(other) != digest
    assert digest_of(original[:-1]) != digest


@pytest.mark.parametrize("num_bytes", [0, 7, 8192, 40 * 8192 + 77, 1_000_000])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_digest_of_bytes_that_are_written_meanwhile(
    num_bytes: int, begin: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    digest = digest_of(original)
    place = torch.zeros(begin + num_bytes, dtype=torch.uint8)[begin:]
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    def fill() -> Iterator[None]:
        for start in range(0, num_bytes, piece_bytes()):
            part = slice(start, start + piece_bytes())
            place[part] = original[part]
            yield

    assert digest_of(place, fill()) == digest
    assert torch.equal(place, original)


def test_the_digest_finds_parts_that_changed_places() -> None:
    table = torch.arange(200 * 1024).view(200, 1024)
    digest = digest_of(table.view(-1).view(torch.uint8))
    for other in (
        table.flip(0),
        table.flip(1),
        table.roll(70, 0),
        table.T.contiguous(),
    ):
        assert digest_of(other.contiguous().view(-1).view(torch.uint8)) != digest


# ------------------------------------------------------------------------ shared memory


def test_a_message_is_removed_once_it_is_taken() -> None:
    with SharedMemoryLink.create(max_blocks=1) as link:
        sender, receiver = link.sender(), link.receiver()
        messages = Path(link.folder)
        for _ in range(2):
            with pytest.raises(DeadlineExceededError, match="the receivers of message"):
                send_tensors(sender, {"a": torch.ones(9)}, deadline_s=2)
            header, block = receiver.receive(deadline_s=60)
            assert header.entries[0].name == "a"
            assert block[:36].view(torch.float32).sum() == 9
            sender.wait_until_taken(deadline_s=60)
            assert not list(messages.glob("message-*"))


def blocks_in(link: SharedMemoryLink) -> set[str]:
    return {path.name for path in Path(link.folder).glob("block-*")}


@pytest.mark.parametrize("is_private", [True, False])
def test_memory_is_used_again_when_no_tensor_of_it_is_left(is_private: bool) -> None:
    with SharedMemoryLink.create(max_blocks=1, is_private=is_private) as link:
        sender, receiver = link.sender(), link.receiver()
        kept: list[torch.Tensor] = []

        def send(value: float, size: int = 2000) -> torch.Tensor:
            tensors = {"a": torch.full((size,), value)}
            # The end of a transfer waits until its block is received.
            thread = threading.Thread(
                target=send_tensors, args=(sender, tensors), daemon=True
            )
            thread.start()
            (tensor,) = receive_tensors(receiver, deadline_s=60).read().values()
            thread.join(60)
            return tensor

        for value in range(6):
            assert send(value).eq(value).all()
        assert len(blocks_in(link)) <= 2
        for value in range(6):
            kept.append(send(value))
        assert all(tensor.eq(value).all() for value, tensor in enumerate(kept))
        many = blocks_in(link)
        assert len(many) >= 6
        part = kept[0][5:9]
        kept.clear()
        send(6.0)
        for value in range(6):
            send(value, 3000)  # it does not fit into the others
        assert part.eq(0).all()
        assert len(blocks_in(link)) <= 6
        receiver = link.receiver()
        for value in range(20):
            send(value)
        assert part.eq(0).all()


def test_memory_that_runs_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, room = os.posix_fallocate, 10_000

    def posix_fallocate(file: int, begin: int, size: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{file}")).parent
        used = sum(path.stat().st_size for path in folder.glob("block-*"))
        if used + size > room:
            raise OSError(28, "No space left on device")
        allocate(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    with SharedMemoryLink.create() as link:
        sender = link.sender()
        for size in (6_000, 7_000):  # the first is given up for the second
            assert sender.buffer(size).numel() == size
        assert len(blocks_in(link)) == 1
        with pytest.raises(ResourceInsufficientError, match="room for a block of 11"):
            sender.buffer(11_000)
        assert not blocks_in(link)
    assert SharedMemoryLink.room() > 0
    assert SharedMemoryLink.room(Path("/nowhere")) == 0


def test_a_write_in_place_is_seen_by_nobody_else() -> None:
    with SharedMemoryLink.create(2) as link:
        ends = [link.receiver(index) for index in range(2)]
        send_tensors(link.sender(), {"a": torch.ones(5000)})
        first, second = [receive_tensors(end).read()["a"] for end in ends]
    first.zero_()
    assert second.sum() == 5000


def test_memory_that_is_mapped_once_is_that_of_all() -> None:
    def make(count: int) -> SharedMemoryLink:
        return SharedMemoryLink.create(count, is_private=False)

    check_transfer(make)
    with make(2) as link:
        ends = [link.receiver(index) for index in range(2)]
        send_tensors(link.sender(), {"a": torch.ones(5000)})
        first, second = [receive_tensors(end).read()["a"] for end in ends]
    first.zero_()
    assert second.sum() == 0


def test_the_death_of_a_receiver_names_the_tensor() -> None:
    with (
        SharedMemoryLink.create(max_blocks=1) as link,
        process(sample.receive_and_hang, link) as child,
    ):
        sender = link.sender()
        send_tensors(sender, {"a": torch.ones(9)}, deadline_s=60)
        child.kill()
        with pytest.raises(TransferError, match=r"tensor 'b' could.*receiver 0.*died"):
            send_tensors(sender, {"b": torch.ones(9)}, deadline_s=60)


def test_what_a_killed_process_left_is_removed() -> None:
    ours, theirs = SPAWN.Pipe()
    with process(sample.make_link_and_hang, theirs):
        assert ours.poll(60)
        folder = Path(ours.recv())
        SharedMemoryLink.create().close()
        assert list(folder.glob("message-*"))
    SharedMemoryLink.create().close()
    assert not folder.exists()


def test_a_process_outlives_a_change_of_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SharedMemoryLink.create() as link:
        link.sender()
        # The kernel counts it back from the time of day, which somebody may set.
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() + 3600)
        # Making a link removes those of processes that have ended.
        SharedMemoryLink.create().close()
        with pytest.raises(DeadlineExceededError, match="did not come within"):
            link.receiver(0).receive(deadline_s=0.5)


def test_a_link_that_nobody_closes_goes_with_its_process() -> None:
    code = """
import os, sys
from pathlib import Path
from rl_distributed.transfer import SharedMemoryLink
links = [SharedMemoryLink.create() for _ in range(2)]
links[0].close()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(links[1].folder, Path(links[1].folder).exists())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    folder, existed = done.stdout.split()
    assert existed == "True"
    assert not Path(folder).exists()


def test_a_closed_link_and_a_closed_sender_are_named() -> None:
    with SharedMemoryLink.create() as link:
        sender, receiver = link.sender(), link.receiver()
        sender.close()
        with pytest.raises(TransferError, match=r"the sender \(.*has closed"):
            receive_tensors(receiver, deadline_s=60).read()
        with pytest.raises(TransferError, match=r"receiver must be in 0\.\.0: got 1"):
            link.receiver(1)
    with pytest.raises(TransferError, match="its link is closed"):
        link.sender()
    with pytest.raises(TransferError, match="removed"):
        receiver.receive(deadline_s=30)
    with pytest.raises(TransferError, match="must be positive: got 0"):
        SharedMemoryLink.create(0)


# -------------------------------------------------------------------------------- files


def test_files_can_be_read_later_and_by_others(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.rand(3),
        "b": torch.rand(5).bfloat16(),
        "c": torch.arange(3, dtype=torch.int8),
        "d": torch.rand(2, dtype=torch.complex128),
    }
    link = FileLink(str(tmp_path / "folder"))
    with link:
        sender = link.sender()
        send_tensors(sender, tensors)
        sender.close()
    for _ in range(2):
        received = receive_tensors(link.receiver(), deadline_s=60).read()
        assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    (path,) = (tmp_path / "folder").glob("*.safetensors")
    found = safetensors.load_file(path)
    assert all(torch.equal(found[name], tensors[name]) for name in "abc")
    assert torch.equal(found["d"].view(torch.complex128).view(2), tensors["d"])


def test_only_the_links_own_files_are_removed(tmp_path: Path) -> None:
    for kept in ([], ["notes.txt"]):
        folder = tmp_path / str(len(kept))
        folder.mkdir()
        for name in kept:
            (folder / name).write_text("mine")
        with FileLink(str(folder), keep_files=False) as link:
            send_tensors(link.sender(), {"a": torch.ones(3)})
            assert len(list(folder.iterdir())) == 3 + len(kept)
        assert folder.exists() == bool(kept)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    link = FileLink(str(tmp_path))
    send_tensors(link.sender(), {"a": torch.ones(3)})
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(TransferError, match=r"'a'.*block ends after 11"):
        receive_tensors(link.receiver()).read()
    path.write_bytes(b"\x05" + whole[1:])
    with pytest.raises(TransferError, match=f"{path.name} is damaged"):
        receive_tensors(link.receiver()).read()


# -------------------------------------------------------------------- collectives, CUDA


def test_a_link_that_is_not_complete_ends_in_time() -> None:
    link = CollectiveLink.local()
    with pytest.raises(DeadlineExceededError, match="rank 1 of 2 could not join"):
        link.receiver(deadline_s=0.5)
    with pytest.raises(TransferError, match="receiver must be in"):
        link.receiver(1)


def test_handles_of_gpu_memory_keep_the_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything but CUDA itself: handles, acknowledgements, one reused block."""
    blocks: dict[bytes, torch.Tensor] = {}

    class Gpu:
        uuid = "GPU-1"

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        handle = str(tensor.data_ptr()).encode()
        blocks[handle] = tensor
        size = tensor.numel()
        counter = (b"counter", 0, b"event", True)
        fixed = (type(tensor), tensor.shape, (1,), 0, object, tensor.dtype, 0)
        return None, (*fixed, handle, size, 0, False, *counter)

    def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
        assert arguments[1:4] == (torch.Size([arguments[8]]), (1,), 0)
        assert arguments[5:7] == (torch.uint8, 0)
        assert arguments[9:] == (0, False, b"counter", 0, b"event", True)
        return blocks[arguments[7]]

    module = "rl_distributed.transfer.cuda_ipc"
    monkeypatch.setattr(f"{module}._GPU", torch.device("cpu"))
    monkeypatch.setattr(f"{module}.reduce_tensor", reduce_tensor)
    monkeypatch.setattr(f"{module}.rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Gpu)
    check_transfer(CudaIpcLink.create)
    with CudaIpcLink.create() as link:
        receiver = link.receiver()
        control = link.control.sender()
        handle = {"gpu": "GPU-2", "size": 4}
        text = json.dumps([Header("block").to_json(), handle])
        control.send(Header("block", text=text), None, deadline_s=60)
        with pytest.raises(ResourceInsufficientError, match="GPU-2 is not visible"):
            receiver.receive(deadline_s=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about having no GPU")
def test_links_of_gpus_say_that_there_is_none() -> None:
    with CudaIpcLink.create() as link:
        for end in (link.sender, link.receiver):
            with pytest.raises(ResourceInsufficientError, match="SharedMemoryLink"):
                end()
    with pytest.raises(ResourceInsufficientError, match="use backend='gloo'"):
        CollectiveLink("127.0.0.1", 1, backend="nccl").sender()


def test_floating_tensors_are_cast_on_the_way() -> None:
    tensors = {
        "a": torch.tensor([1.0, 1.0 + 2**-20]),
        "b": torch.arange(300),
        "c": torch.full((2, 2), 0.1, dtype=torch.float64),
        "of many pieces": torch.randn(700_001),
    }
    with SharedMemoryLink.create() as link:
        receiver = link.receiver()
        send_tensors(link.sender(), tensors, dtype=torch.bfloat16)
        received = receive_tensors(receiver).read()
    for name in ("a", "c", "of many pieces"):
        assert torch.equal(received[name], tensors[name].bfloat16())
        assert received[name].dtype == torch.bfloat16
    assert torch.equal(received["b"], tensors["b"])
    assert received["b"].dtype == torch.int64


def test_messages_are_made_when_they_are_asked_for() -> None:
    asked = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            asked.append(number)
            yield str(number), torch.full((8,), float(number))

    def buffer(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    messages = tensor_messages(tensors(), buffer, label="v", bucket_bytes=100)
    header, block = next(messages)
    # Only one of two 64-byte tensors fits with padding.
    assert [entry.name for entry in header.entries] == ["0"]
    assert asked == [0, 1]
    assert block is not None
    rest = list(messages)
    assert [header.kind for header, _ in rest] == ["block"] * 3 + ["end"]
    assert len(rest[-1][0].entries) == 4
    assert rest[-1][0].label == "v"
