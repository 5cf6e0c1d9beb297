"""A gradient step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

#: From tensors, or named tuples and dicts of them, to named ones.
Step = Callable[..., dict[str, Tensor]]
#: Calls before the recording: what libraries do and allocate at first must not be part of it.
WARM_UP = 3


class GraphedStep:
    """A function of tensors on a GPU, recorded once and then launched as a whole.

    It may change tensors in place, but what it does, and every shape, must not depend on their
    content. Other threads may use the GPU meanwhile, as collecting does.
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
            ValueError: If a shape is not what it was at the recording.
        """
        self._calls += 1
        if self._calls <= WARM_UP:
            now = torch.cuda.current_stream()
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                out = self._step(*inputs)
            now.wait_stream(self._stream)
            return out
        if self._graph is None:
            self._record(inputs)
        assert self._graph is not None
        for mine, new in zip(self._inputs, tree_leaves(inputs), strict=True):
            if mine.shape != new.shape:
                raise ValueError(f"Recorded with {tuple(mine.shape)}, got {tuple(new.shape)}.")
            mine.copy_(new)
        self._graph.replay()
        return {name: value.clone() for name, value in self._outputs.items()}

    def _record(self, inputs: tuple[Any, ...]) -> None:
        leaves, spec = tree_flatten(inputs)
        self._inputs = [leaf.clone() for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._rng)
        # By default whatever another thread does on the GPU in the meantime would be an error.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = self._step(*tree_unflatten(self._inputs, spec))
        self._graph = graph
