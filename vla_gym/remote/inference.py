"""One VLA for many simulators: requests wait in a queue and share forward passes.

::

    RemoteVLA.infer (a simulator)  --+
    RemoteVLA.infer (another one)  --+--> InferenceServer: one forward pass --> rows back to each
    publish (the learner)          --+    of up to max_rows rows, or what came within max_wait_s
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vla_gym.envs.checks import MAX_TIMEOUT_S, as_integer, as_number
from vla_gym.errors import ConfigError, WorkerError
from vla_gym.vla.stateful import is_stateful

if TYPE_CHECKING:
    from vla_gym.vla.base import FrozenVLA

_CLOSE_S = 10.0  # for the forward pass under way


class Inferred(NamedTuple):
    """What a request gets back: arrays of its own rows.

    Attributes:
        hidden: (B, M, H) float32.
        actions: (B, C, action size) float32.
        version: Of the weights, 0 for those that were loaded.
    """

    hidden: np.ndarray
    actions: np.ndarray
    version: int


@dataclass
class InferenceStats:
    """What a server has done so far.

    Attributes:
        requests, rows, forwards: How many.
        seconds: Time in forward passes.
        waited: Sum over requests of seconds from arrival to the begin of their forward pass.
        version: Of the weights now.
    """

    requests: int = 0
    rows: int = 0
    forwards: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    version: int = 0


class _Request(NamedTuple):
    images: dict[str, np.ndarray]
    instructions: list[str]
    proprio: np.ndarray
    came: float
    future: Future[Inferred]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {**self.images, "proprio": self.proprio}

    def kinds(self) -> dict[str, Any]:
        """Return shape and type of a row by camera, and of proprioception."""
        return {name: (array.shape[1:], array.dtype) for name, array in self.arrays.items()}

    def check(self) -> None:
        """Raise ConfigError if there are not as many rows of everything."""
        rows = {name: array.shape[:1] for name, array in self.arrays.items()}
        if set(rows.values()) != {(len(self.instructions),)}:
            raise ConfigError(
                f"Expected as many rows of images and proprio as instructions, "
                f"{len(self.instructions)}, got {rows}."
            )


_Item = _Request | Callable[[], None] | None


class InferenceServer:
    """A VLA and the thread that alone touches it."""

    def __init__(self, vla: FrozenVLA, *, max_rows: int = 64, max_wait_s: float = 0.005) -> None:
        """Start the thread.

        Args:
            vla: The model. Row i of a batch must not depend on the other rows, so that a request
                gets what it would get alone, but for the rounding of batched matrix products.
            max_rows: Rows of one forward pass; a request with more has one of its own.
            max_wait_s: So many seconds after a request came, its forward pass begins, however
                few rows there are.

        Raises:
            ConfigError: If a number is out of range, or the VLA has a state.
        """
        if is_stateful(vla):
            raise ConfigError(
                f"The VLA {vla.name!r} has a state, which an inference server does not carry: "
                "load it where the environments are."
            )
        self._vla = vla
        self._max_rows = as_integer(max_rows, "max_rows", 1)
        self._max_wait = as_number(max_wait_s, "max_wait_s", 0, MAX_TIMEOUT_S)
        self._stats = InferenceStats()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="vla-gym-inference", daemon=True)
        self._thread.start()

    def infer(
        self, images: Mapping[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> Future[Inferred]:
        """Ask for a forward pass; see ``FrozenVLA.infer``.

        Returns:
            A future that raises what ``FrozenVLA.infer`` raises, WorkerError of a closed server.
        """
        future: Future[Inferred] = Future()
        views = {view: np.asarray(rows) for view, rows in images.items()}
        request = _Request(views, list(instructions), np.asarray(proprio), time.monotonic(), future)
        try:
            request.check()
        except ConfigError as error:
            future.set_exception(error)
            return future
        self._put(request, future)
        return future

    def publish(self, version: int, weights: bytes) -> Future[int]:
        """Replace weights before the next forward pass, if they are newer than those in use.

        Args:
            version: Of these weights, from 1.
            weights: A safetensors file of parameters of the network, by their names: all of them,
                or those that are trained, such as LoRA adapters.

        Returns:
            A future of the version that is in use then; it raises WorkerError of a closed server.
        """
        future: Future[int] = Future()

        def change() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if version > self._stats.version:
                    _load(self._vla, weights)
                    self._stats.version = version
                future.set_result(self._stats.version)
            except Exception as error:
                future.set_exception(error)

        self._put(change, future)
        return future

    def _put(self, item: _Item, future: Future[Any]) -> None:
        with self._lock:  # nothing may come after what ends the thread: nobody would answer
            if not self._closed:
                self._queue.put(item)
                return
        future.set_exception(
            WorkerError(f"The inference server of the VLA {self._vla.name!r} is closed.")
        )

    def stats(self) -> dict[str, Any]:
        """Return :class:`InferenceStats` as a dict."""
        return asdict(self._stats)

    def close(self) -> None:
        """End the thread when it has answered what came before."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        following: list[_Item] = []
        while (item := following.pop() if following else self._queue.get()) is not None:
            if not isinstance(item, _Request):
                item()
                continue
            batch, following = self._gather(item)
            batch = [request for request in batch if request.future.set_running_or_notify_cancel()]
            if batch:
                self._answer(batch)

    def _gather(self, first: _Request) -> tuple[list[_Request], list[_Item]]:
        """Return a batch, and what came next and does not belong to it, if anything did."""
        batch, rows, end = [first], len(first.instructions), first.came + self._max_wait
        while rows < self._max_rows:
            pause = end - time.monotonic()
            try:
                item = self._queue.get(timeout=pause) if pause > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, _Request) or item.kinds() != first.kinds():
                return batch, [item]
            rows += len(item.instructions)
            if rows > self._max_rows:
                return batch, [item]
            batch.append(item)
        return batch, []

    def _answer(self, batch: list[_Request]) -> None:
        began, stats = time.monotonic(), self._stats
        try:
            output = self._vla.infer(
                {k: np.concatenate([r.images[k] for r in batch]) for k in batch[0].images},
                [text for request in batch for text in request.instructions],
                np.concatenate([request.proprio for request in batch]),
            )
            hidden = output.hidden.detach().float().cpu().numpy()
            actions = output.actions.detach().float().cpu().numpy()
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:  # whose fault it is, is not known
                for request in batch:
                    self._answer([request])
            return
        stats.forwards += 1
        stats.seconds += time.monotonic() - began
        row = 0
        for request in batch:
            rows = slice(row, row + len(request.instructions))
            row = rows.stop
            stats.requests, stats.rows = stats.requests + 1, stats.rows + rows.stop - rows.start
            stats.waited += began - request.came
            request.future.set_result(
                Inferred(hidden[rows].copy(), actions[rows].copy(), stats.version)
            )


def pack_weights(parameters: Mapping[str, Any]) -> bytes:
    """Return parameters, by their names in the network, as ``InferenceServer.publish`` wants."""
    from safetensors.torch import save

    return save({name: p.detach().cpu().contiguous() for name, p in parameters.items()})


def _load(vla: Any, weights: bytes) -> None:
    from safetensors.torch import load

    found = load(weights)
    model: Any = getattr(vla, "model", None)
    own = {} if model is None else model.state_dict()
    unknown = sorted(set(found) - set(own))
    if unknown:
        raise ConfigError(
            f"The VLA {vla.name!r} has no parameters called {', '.join(unknown[:3])}: publish "
            "those of the same network, with adapters added alike."
        )
    wrong = [
        f"{name} has shape {tuple(own[name].shape)}, got {tuple(value.shape)}"
        for name, value in found.items()
        if value.shape != own[name].shape
    ]
    if wrong:
        raise ConfigError(
            f"Parameters for the VLA {vla.name!r} have other shapes: {'; '.join(wrong[:3])}. "
            "Publish those of the same network, with adapters added alike."
        )
    model.load_state_dict(found, strict=False)
