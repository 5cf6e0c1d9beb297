"""Where the time of a vector step goes: physics, rendering, Python, and all between processes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vla_gym.cli.bench.drivers import VectorDriver, env_arguments, in_chunks
from vla_gym.cli.bench.spec import Contender
from vla_gym.envs.libero import LiberoEnv

# Seconds that this process has spent in the instrumented methods.
_spent = {"physics": 0.0, "render": 0.0}


def _count(name: str, owner: type, method: str) -> None:
    """Add a method's time to ``_spent[name]`` from now on; a second call changes nothing."""
    original: Callable[..., Any] = getattr(owner, method)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            _spent[name] += time.perf_counter() - begin

    setattr(owner, method, timed)


class TimedEnv(LiberoEnv):
    """A :class:`LiberoEnv` that keeps where each step's time went."""

    _rows: list[tuple[float, float, float]]

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """See :class:`LiberoEnv`."""
        physics, render = _spent["physics"], _spent["render"]
        begin = time.perf_counter()
        result = super().step(action)
        seconds = time.perf_counter() - begin
        self._rows.append((seconds, _spent["physics"] - physics, _spent["render"] - render))
        return result

    def take_rows(self) -> list[tuple[float, float, float]]:
        """Return (whole, physics, render) seconds of every step since the last call."""
        rows, self._rows = getattr(self, "_rows", []), []
        return rows


def make_timed(contender: Contender, index: int) -> TimedEnv:
    """Return environment ``index``; runs in the worker and instruments it."""
    from vla_gym.sim import LiberoSim, SceneRenderer

    _count("physics", LiberoSim, "run_chunk")
    _count("render", SceneRenderer, "render")
    spec = contender.env
    env = TimedEnv(spec.suite, task_ids=spec.task_of(index), **env_arguments(spec))
    env.take_rows()
    return env


class ProfiledDriver(VectorDriver):
    """:class:`vla_gym.vector.LiberoVectorEnv` over instrumented environments."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from vla_gym.vector import LiberoVectorEnv

        self.envs = LiberoVectorEnv(
            contender.num_envs,
            None,
            workers=contender.workers,
            env_factory=partial(make_timed, contender),
        )
        self.envs.reset(seed=contender.seed)

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return list(self.envs.worker_pids)

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`; adds ``split_s``, seconds of all calls in all.

        ``physics``, ``render`` and ``python`` (the rest of the environment's step) are those of
        the worker that was slowest in the call; ``between`` is what the call took beyond that
        worker: commands, waking up, and the trainer's copies and infos.
        """
        chunks = in_chunks(actions, self.contender.env.chunk_len)
        self.envs.call("take_rows")
        walls, steps, ended = np.empty(len(chunks)), 0, 0
        for index, chunk in enumerate(chunks):
            called = time.perf_counter()
            _, _, terminations, truncations, infos = self.envs.step(chunk)
            walls[index] = time.perf_counter() - called
            steps += int(infos["executed_steps"].sum())
            ended += int((terminations | truncations).sum())
        rows = np.asarray(self.envs.call("take_rows"))  # (N, calls, 3)
        split = split_of(walls, rows, np.asarray(self.envs.worker_of))
        return {
            "seconds": float(walls.sum()),
            "steps": steps,
            "calls": len(chunks),
            "ended": ended,
            "split_s": split,
        }


def split_of(walls: np.ndarray, rows: np.ndarray, worker_of: np.ndarray) -> dict[str, float]:
    """Divide the time of calls among physics, rendering, Python and what lies between processes.

    Args:
        walls: (K,) seconds of each call.
        rows: (N, K, 3) seconds of each environment's step, and of physics and rendering in it.
        worker_of: (N,) worker of each environment.

    Returns:
        Seconds by part; they add up to ``walls.sum()``.
    """
    by_worker = np.stack([rows[worker_of == w].sum(0) for w in np.unique(worker_of)])
    slowest = by_worker[..., 0].argmax(0)  # (K,)
    whole, physics, render = by_worker[slowest, np.arange(len(walls))].T
    return {
        "physics": float(physics.sum()),
        "render": float(render.sum()),
        "python": float((whole - physics - render).sum()),
        "between": float((walls - whole).sum()),
    }
