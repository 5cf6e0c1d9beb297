"""Sums over the processes of a data-parallel run; one process needs none of it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

TIMEOUT_MINUTES = 30.0  # a process waits for the slowest rollout of all


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that learn together, and which of them this is.

    Attributes:
        rank: From 0.
        size: Number of processes.
        device: Where tensors are summed: the CPU for gloo, a GPU for nccl.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def sum(self, values: Tensor | Sequence[float]) -> Tensor:
        """Return the sum over all processes, float64 on the CPU."""
        total = torch.as_tensor(values, dtype=torch.float64).detach().clone().to(self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total.cpu()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes, in one message.

        Losses are divided by counts of all processes, so that the sum is the gradient of the whole
        minibatch. A process without data takes part with zeros; what has no gradient in any
        process stays without one.
        """
        if self.size == 1:
            return
        some = self.sum([float(p.grad is not None) for p in parameters]) > 0.0
        moved = [p for p, has in zip(parameters, some.tolist(), strict=True) if has]
        if not moved:
            return
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in moved]
        )
        dist.all_reduce(flat)
        for p, part in zip(moved, flat.split([p.numel() for p in moved]), strict=True):
            p.grad = part.view_as(p).to(p.dtype)

    def broadcast(self, parameters: Sequence[Tensor]) -> None:
        """Give all processes the values of process 0."""
        if self.size > 1:
            for p in parameters:
                dist.broadcast(p.detach(), src=0)


def local_rank() -> int | None:
    """Return which process of this machine this one is; None if it is alone."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return None if alone else int(os.environ.get("LOCAL_RANK", "0"))


def local_device(device: str) -> str:
    """Return the torch device of this process: each process of a machine has a GPU of its own."""
    rank = local_rank()
    return device if rank is None or not device.startswith("cuda") else f"cuda:{rank}"


def local_rendering(device: str) -> dict[str, list[int]]:
    """Return arguments of environments that draw on the GPU of this process, if it has one."""
    rank = local_rank()
    return {} if rank is None or not device.startswith("cuda") else {"render_devices": [rank]}


@contextmanager
def process_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """Join the processes that ``torchrun`` started, nccl on CUDA, else gloo; alone without it."""
    if local_rank() is None:
        yield ProcessGroup()
        return
    on_gpu = device.startswith("cuda")
    local = local_device(device) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(local)
    timeout = datetime.timedelta(minutes=TIMEOUT_MINUTES)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), local)
    finally:
        dist.destroy_process_group()
