"""One measurement of a vector environment; imported by peers too, so without vla_gym."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from .procfs import cpu_seconds, session_pids

#: Control steps: no episode reaches it, so every system plays the same steps.
NO_LIMIT = 10**9
#: LIBERO's evaluations run so many of these no-ops after set_init_state; our resets hold them.
NOOP, SETTLE_STEPS = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), 10


class Measured(ABC):
    """Vector environments of one kind, built and reset once by the constructor.

    Attributes:
        envs: The vector environment.
        chunk_len: Control steps of a chunk, by which ``chunks_per_s`` counts.
    """

    envs: Any
    chunk_len: int

    @abstractmethod
    def reset(self, init_state_id: int, states: list[np.ndarray] | None) -> None:
        """Reset every environment to an official state and settle it.

        Args:
            init_state_id: Index of the state, the same for every environment.
            states: N of (1 + nq + nv), the states themselves, for LIBERO's.
        """

    @abstractmethod
    def play(self, actions: np.ndarray) -> int:
        """Play actions (N, T, 7), T a multiple of the chunk length; return the episodes ended."""

    def worker_pids(self) -> list[int]:
        """Return the processes that hold environments, or all but this one."""
        return [pid for pid in session_pids() if pid != os.getpid()]

    def measure(
        self,
        init_state_id: int,
        states: list[np.ndarray] | None,
        actions: np.ndarray,
        window_s: float,
    ) -> dict[str, float]:
        """Reset and play, again and again until ``window_s`` seconds of playing are measured.

        Returns:
            ``steps_per_s``: control steps a second of all environments; ``chunks_per_s``;
            ``cpu_ms``: CPU time of all processes of the system a control step; ``reset_s``: of the
            first reset; ``ended``: episodes that ended, which should be none.
        """
        seconds = cpu_s = reset_s = 0.0
        plays = ended = 0
        while seconds < window_s:
            begin = time.perf_counter()
            self.reset(init_state_id, states)
            reset_s = reset_s or time.perf_counter() - begin
            pids = session_pids()
            cpu_before, begin = cpu_seconds(pids), time.perf_counter()
            ended += self.play(actions)
            seconds += time.perf_counter() - begin
            cpu_s += cpu_seconds(pids) - cpu_before
            plays += 1
        steps = plays * actions.shape[0] * actions.shape[1]
        return {
            "steps_per_s": steps / seconds,
            "chunks_per_s": steps / seconds / self.chunk_len,
            "cpu_ms": 1e3 * cpu_s / steps,
            "reset_s": reset_s,
            "ended": float(ended),
        }

    def close(self) -> None:
        """Free everything."""
        self.envs.close()
