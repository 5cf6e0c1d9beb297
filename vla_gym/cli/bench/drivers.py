"""The systems under measurement behind one interface; they run inside ``bench.host``."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from vla_gym.cli.bench.spec import CALL_DEADLINE_S, Contender, EnvSpec

#: Control steps: no episode reaches it, so every system plays the same steps.
NO_LIMIT = 10**9


class Driver(ABC):
    """One system, built and reset once by its constructor.

    Attributes:
        contender: What it is.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    @abstractmethod
    def reset(self, init_state_id: int, states: np.ndarray | None) -> dict[str, float]:
        """Reset every environment to an official state.

        Args:
            init_state_id: Index of the state, the same for every environment.
            states: (N, 1 + nq + nv) the states themselves, for upstream.

        Returns:
            ``settled_s``: seconds until observations of the settled state are there, and for
            upstream ``plain_s``: those without the ten no-ops of its evaluations.
        """

    @abstractmethod
    def reset_one(self, init_state_id: int, states: np.ndarray | None) -> float:
        """Reset environment 0 alone; seconds to the observation of its settled state."""

    @abstractmethod
    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """Play actions (N, T, 7), T a multiple of the chunk length.

        Returns:
            ``seconds``, ``steps``: control steps executed in all environments, ``calls``: calls
            of step, and ``ended``: episodes that ended, which should be none.
        """

    @abstractmethod
    def worker_pids(self) -> list[int]:
        """Return the processes that hold environments."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


def env_arguments(spec: EnvSpec) -> dict[str, Any]:
    """Return ``LiberoEnv``'s arguments, without the tasks."""
    arguments: dict[str, Any] = {
        "assets": spec.assets,
        "chunk_len": spec.chunk_len,
        "max_control_steps": NO_LIMIT,
    }
    if spec.image_size == 0:
        return {**arguments, "cameras": ()}
    return {
        **arguments,
        "image_size": spec.image_size,
        "visual_profile": spec.visual_profile,
    }


def make_single(spec: EnvSpec, index: int) -> Any:
    """Return our single environment, as environment ``index`` of a batch."""
    from vla_gym.envs.libero import LiberoEnv

    return LiberoEnv(spec.suite, task_ids=spec.task_of(index), **env_arguments(spec))


def in_chunks(actions: np.ndarray, chunk_len: int) -> np.ndarray:
    """Return (N, T, 7) actions as contiguous (T / chunk_len, N, chunk_len, 7) float32."""
    count, steps, dim = actions.shape
    chunks = actions.reshape(count, steps // chunk_len, chunk_len, dim).swapaxes(0, 1)
    return np.ascontiguousarray(chunks, np.float32)


class VectorDriver(Driver):
    """A ``gymnasium.vector.VectorEnv`` of chunked environments."""

    envs: Any

    def reset(self, init_state_id: int, states: np.ndarray | None) -> dict[str, float]:  # noqa: ARG002
        """See :class:`Driver`; every reset of ours is settled."""
        begin = time.perf_counter()
        self.envs.reset(options={"init_state_id": init_state_id})
        return {"settled_s": time.perf_counter() - begin}

    def reset_one(self, init_state_id: int, states: np.ndarray | None) -> float:  # noqa: ARG002
        """See :class:`Driver`."""
        mask = np.zeros(self.contender.num_envs, bool)
        mask[0] = True
        begin = time.perf_counter()
        self.envs.reset(options={"init_state_id": init_state_id, "reset_mask": mask})
        return time.perf_counter() - begin

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`."""
        chunks = in_chunks(actions, self.contender.env.chunk_len)
        steps = ended = 0
        begin = time.perf_counter()
        for chunk in chunks:
            _, _, terminations, truncations, infos = self.envs.step(chunk)
            steps += int(infos["executed_steps"].sum())
            ended += int((terminations | truncations).sum())
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "steps": steps, "calls": len(chunks), "ended": ended}

    def close(self) -> None:
        """See :class:`Driver`."""
        self.envs.close()


class OursDriver(VectorDriver):
    """:class:`vla_gym.vector.LiberoVectorEnv`."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from vla_gym.vector import LiberoVectorEnv

        spec = contender.env
        self.envs = LiberoVectorEnv(
            contender.num_envs,
            spec.suite,
            workers=contender.workers,
            task_ids=[[spec.task_of(i)] for i in range(contender.num_envs)],
            **env_arguments(spec),
        )
        self.envs.reset(seed=contender.seed)

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return list(self.envs.worker_pids)


class OursSendDriver(OursDriver):
    """:class:`vla_gym.vector.LiberoVectorEnv` by ``send`` and ``recv``: nobody waits for others."""

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`; ``seconds`` is what their steps take at the sum of their rates."""
        chunks = in_chunks(actions, self.contender.env.chunk_len)
        count = self.contender.num_envs
        steps, ended_at = np.zeros(count, np.int64), np.zeros(count)
        played, ended = np.zeros(count, np.int64), 0
        begin = time.perf_counter()
        self.envs.send(chunks[0], np.arange(count))
        while (played < len(chunks)).any():
            _, _, terminations, truncations, infos = self.envs.recv(1, timeout=CALL_DEADLINE_S)
            index = int(infos["env_id"][0])
            steps[index] += int(infos["executed_steps"][0])
            ended += int(terminations[0] or truncations[0])
            played[index] += 1
            if played[index] < len(chunks):
                self.envs.send(chunks[played[index], [index]], [index])
            else:
                ended_at[index] = time.perf_counter() - begin
        seconds = float(steps.sum() / (steps / ended_at).sum())
        return {
            "seconds": seconds,
            "steps": int(steps.sum()),
            "calls": int(played.sum()),
            "ended": ended,
        }


class AsyncDriver(VectorDriver):
    """:class:`gymnasium.vector.AsyncVectorEnv` over our single environment."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from gymnasium.vector import AsyncVectorEnv

        # Not fork, the default: it is fatal in a process that has rendered or run torch.
        self.envs = AsyncVectorEnv(
            [partial(make_single, contender.env, i) for i in range(contender.num_envs)],
            context="forkserver",
        )
        self.envs.reset(seed=contender.seed)

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return [process.pid for process in self.envs.processes]


_DRIVERS = {
    "ours": ("drivers", "OursDriver"),
    "ours-send": ("drivers", "OursSendDriver"),
    "libero": ("upstream", "LiberoDriver"),
    "async": ("drivers", "AsyncDriver"),
    "single": ("independent", "IndependentDriver"),
    "profiled": ("profiled", "ProfiledDriver"),
    "stub-ours": ("stub", "StubOursDriver"),
    "stub-async": ("stub", "StubAsyncDriver"),
}


def make_driver(contender: Contender) -> Driver:
    """Build a contender's system and reset it once; imports only what this system needs."""
    module, name = _DRIVERS[contender.system]
    driver: type[Driver] = getattr(importlib.import_module(f"vla_gym.cli.bench.{module}"), name)
    return driver(contender)
