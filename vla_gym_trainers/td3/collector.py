"""Collects in a thread of its own: weights come in, transitions go out, neither without bound."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vla_gym.errors import ConfigError, WorkerError
from vla_gym_trainers.td3.acting import Weights

if TYPE_CHECKING:
    from vla_gym_trainers.td3.algorithm import TD3BC

#: Seconds for one step of all environments, after which the collector counts as hung. The vector
#: environment's own deadlines, with restarts of its workers, are shorter.
STEP_SECONDS = 600.0


class Record(NamedTuple):
    """One step of all N environments.

    Attributes:
        obs: Observations that were acted on.
        action: (N, C, 7) chunks.
        new_obs: What the environments returned: of the next episode where one has ended.
        rewards: (N,).
        dones: (N,) bool.
        infos: N infos, as SB3's.
        version: Of the weights that acted.
    """

    obs: dict[str, np.ndarray]
    action: np.ndarray
    new_obs: dict[str, np.ndarray]
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]
    version: int


class Collector:
    """A thread that steps the environments of a model with the newest weights handed over.

    It never is more than ``max_ahead`` chunks ahead of what the learner has learned from, and stops
    by itself at ``limit`` chunks. While it runs, the model's environments, ``_last_obs``, acting
    copy and exploration noise are its own.

    Attributes:
        collected: Chunks so far, those before it included.
        finished: Chunks that the learner is done with.
    """

    def __init__(self, model: TD3BC, limit: int, max_ahead: int) -> None:
        """Prepare; ``with collector:`` starts it and stops it.

        Args:
            model: The algorithm, whose environments have been reset.
            limit: Chunks at which it stops.
            max_ahead: See above; at least the number of environments.

        Raises:
            ConfigError: If ``max_ahead`` is less.
        """
        assert model.env is not None
        self.model, self.env, self.limit = model, model.env, limit
        if max_ahead < self.env.num_envs:
            raise ConfigError(
                f"max_ahead must be at least the number of environments ({self.env.num_envs}), "
                f"got {max_ahead}."
            )
        self.max_ahead = max_ahead
        self.collected = self.finished = model.num_timesteps
        self._records: deque[Record] = deque()
        self._weights: Weights | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stop, self._is_stepping, self._holds = False, False, 0
        self._thread = threading.Thread(target=self._run, name="td3bc-collector", daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(STEP_SECONDS)
        if self._thread.is_alive():
            raise WorkerError(f"The collector did not end its step within {STEP_SECONDS:.0f} s.")

    # ------------------------------------------------------------------- learner's side

    def take(self, at_most: int) -> list[Record]:
        """Wait for at least one record and return the oldest ones.

        Raises:
            WorkerError: If none comes in time.
            Exception: Whatever ended the collector.
        """
        with self._changed:
            self._wait(lambda: bool(self._records) or self._error is not None)
            self._raise()
            return [self._records.popleft() for _ in range(min(at_most, len(self._records)))]

    def take_all(self) -> list[Record]:
        """Return all records that are there, without waiting."""
        with self._changed:
            records = list(self._records)
            self._records.clear()
        return records

    def publish(self, weights: Weights) -> None:
        """Hand weights over; they act from the next step on."""
        weights = weights.clone()
        with self._changed:
            self._weights = weights

    def learned(self, num_chunks: int) -> None:
        """Say that the learner is done with the first ``num_chunks`` chunks."""
        with self._changed:
            self.finished = num_chunks
            self._changed.notify_all()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Keep the environments still between two steps.

        Raises:
            WorkerError: If the step under way does not end in time.
            Exception: Whatever ended the collector.
        """
        with self._changed:
            self._holds += 1
        try:
            with self._changed:
                self._wait(lambda: not self._is_stepping)
                self._raise()
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, STEP_SECONDS):
            raise WorkerError(f"The collector made no step within {STEP_SECONDS:.0f} s.")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------------- its thread

    def _run(self) -> None:
        try:
            while self._begin():
                self._step()
        except BaseException as error:  # raised again in the learner's thread
            with self._changed:
                self._error, self._is_stepping = error, False
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait for leave to step, and take the newest weights over; False at the end."""
        with self._changed:
            # However long the learner takes: ``__exit__`` ends this wait in any case.
            self._changed.wait_for(lambda: self._stop or self._may_step())
            if self._stop:
                return False
            self._is_stepping = True
            weights, self._weights = self._weights, None
        if weights is not None:
            self.model.acting.take_over(weights)
        return True

    def _may_step(self) -> bool:
        ahead = self.collected + self.env.num_envs - self.finished
        return not self._holds and self.collected < self.limit and ahead <= self.max_ahead

    def _step(self) -> None:
        model = self.model
        obs: Any = model._last_obs
        action = model.noisy_action(obs, self.collected < model.learning_starts)
        new_obs: Any
        new_obs, rewards, dones, infos = self.env.step(action)
        model.end_episodes(dones)
        version = model.acting.version
        record = Record(obs, action, new_obs, rewards, dones, infos, version)
        with self._changed:
            model._last_obs = new_obs
            self._records.append(record)
            self.collected += self.env.num_envs
            self._is_stepping = False
            self._changed.notify_all()
