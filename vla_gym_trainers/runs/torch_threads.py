"""Torch's number of threads, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads in here, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
