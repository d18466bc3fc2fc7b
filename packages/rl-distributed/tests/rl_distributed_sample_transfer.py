"""Senders and receivers that live in processes of their own."""

from __future__ import annotations

import os
import threading

import torch

from rl_distributed.transfer import receive_tensors, send_tensors

FOREVER_S = 300


def send_and_hang(link):
    """Send one bucket, then never another."""

    def tensors():
        yield "first", torch.ones(1000)
        yield "second", torch.ones(1000)
        threading.Event().wait(FOREVER_S)

    send_tensors(link.sender(), tensors(), bucket_bytes=1, deadline_s=FOREVER_S)


def receive_and_hang(link):
    """Receive one tensor, then never another."""
    for _ in receive_tensors(link.receiver(), deadline_s=FOREVER_S):
        threading.Event().wait(FOREVER_S)


def make_link_and_hang(connection):
    """Own a shared-memory link that holds a block."""
    from rl_distributed.transfer import SharedMemoryLink  # noqa: PLC0415

    link = SharedMemoryLink.create()
    send_tensors(link.sender(), {"a": torch.ones(1000)})
    connection.send(link.folder)
    threading.Event().wait(FOREVER_S)


class Peer:
    """A sender or a receiver in an actor."""

    def pid(self):
        return os.getpid()

    def send_and_hang(self, link):
        send_and_hang(link)

    def send(self, link, tensors, label=""):
        return send_tensors(link.sender(), tensors, label=label, bucket_bytes=4096)

    def receive(self, link, index):
        stream = receive_tensors(link.receiver(index))
        tensors = stream.read()
        sums = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
        return sums, stream.manifest, os.getpid()
