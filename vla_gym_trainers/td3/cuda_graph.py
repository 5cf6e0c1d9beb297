"""A gradient step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

#: From tensors, or named tuples and dicts of them, to named ones.
Step = Callable[..., dict[str, Tensor]]
#: Calls before the recording: what libraries do and allocate at first must not be part of it.
WARM_UP = 3


class GraphedStep:
    """A function of tensors on a GPU, recorded once and then launched as a whole.

    It may change tensors in place, but what it does, and every shape, must not depend on their
    content; what else it reads (numbers, which tensors an optimiser has) stays as it was recorded.
    Other threads may use the GPU meanwhile, as collecting does, but for the moment of recording not
    wait for all of it or record graphs themselves.
    """

    def __init__(self, step: Step, rng: torch.Generator) -> None:
        """Begin with :data:`WARM_UP` calls that are not recorded.

        Args:
            step: What to do.
            rng: The generator that it draws from, on the GPU.
        """
        self._step, self._rng, self._calls = step, rng, 0
        self._stream = torch.cuda.Stream(rng.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Any) -> dict[str, Tensor]:
        """Do the step; what it returns is the caller's.

        Raises:
            ValueError: If names or shapes are not what they were at the recording.
        """
        self._calls += 1
        if self._calls <= WARM_UP:
            now = torch.cuda.current_stream(self._rng.device)
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                out = self._step(*inputs)
            now.wait_stream(self._stream)
            return out
        tensors, layout = tree_flatten(inputs)
        found = layout, [tuple(tensor.shape) for tensor in tensors]
        if self._graph is None:
            with torch.cuda.device(self._rng.device):
                self._graph = self._record(tensors, layout)
            self._recorded = found
        if found != self._recorded:
            raise ValueError(
                f"Expected tensors as at the recording, of shapes {self._recorded[1]}, got "
                f"{found[1]}."
            )
        for mine, new in zip(self._inputs, tensors, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return {name: value.clone() for name, value in self._outputs.items()}

    def _record(self, tensors: list[Tensor], layout: Any) -> torch.cuda.CUDAGraph:
        self._inputs = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._rng)
        # By default whatever another thread does on the GPU in the meantime would be an error.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = self._step(*tree_unflatten(self._inputs, layout))
        return graph
