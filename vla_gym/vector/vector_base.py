"""What all use of environments in workers shares: who is where, calls, states, what may be done."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vla_gym.envs.checks import as_integer
from vla_gym.errors import ConfigError, VlaGymError, WorkerError
from vla_gym.vector.batch import Batch
from vla_gym.vector.env_row import EnvRowState, raise_of_wrapper
from vla_gym.vector.plan import EnvPlan
from vla_gym.vector.pool import Pool
from vla_gym.vector.processes.interrupts import Interrupts, undivided
from vla_gym.vector.runner import Runner


class VectorEnvBase(VectorEnv[Any, Any, np.ndarray]):
    """A vector environment over workers, without the ways to step it.

    :class:`~vla_gym.vector.LiberoVectorEnv` makes the attributes below and adds them.
    """

    closed = True  # until there is something to close
    autoreset_mode: AutoresetMode
    _plan: EnvPlan
    _interrupts: Interrupts

    def _take_over(self, pool: Pool, max_restarts: int, copy: bool) -> None:
        """Wait for the workers of a pool, and become the vector environment over them."""
        try:
            self._runner = Runner(
                pool, self.autoreset_mode, max_restarts=max_restarts, first=self._plan.first
            )
        except BaseException:
            pool.close()
            raise
        self._finalizer = weakref.finalize(self, pool.close)
        self.closed, self.num_envs = False, self._plan.num_envs
        self._table, found = self._runner.table, self._runner.spaces
        self.metadata = {**found.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = found.render_mode
        self.single_observation_space = found.observation_space
        self.single_action_space = found.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._batch = Batch(
            self._table, self.autoreset_mode, self.single_observation_space, copy=copy
        )
        self._everyone = np.arange(self.num_envs)
        # Whether it has been reset.
        self.seeded = False
        # What is under way, for error messages; after Ctrl-C its outcome is thrown away.
        self._waiting: str | None = None
        self._interrupted = False

    # What is where

    @property
    def worker_of(self) -> np.ndarray:
        """(num_envs,) worker of each environment."""
        return self._runner.worker_of.copy()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers; empty with ``workers=0``."""
        return self._runner.pool.pids

    def groups(self, k: int) -> list[np.ndarray]:
        """Split the environments into ``k`` groups, each spread evenly over the workers.

        While one group simulates, another one can be in the VLA: see :meth:`send`.

        Raises:
            ConfigError: If k is not within 1..num_envs.
        """
        k = as_integer(k, "The number of groups", 1, self.num_envs)
        return [np.arange(first, self.num_envs, k) for first in range(k)]

    # States, calls

    @undivided
    def get_state(self, env_ids: Sequence[int] | None = None) -> list[EnvRowState]:
        """Return the states of environments, all by default; they can be pickled.

        Where a worker has died meanwhile, that of the episode which comes next.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        ids = self._idle("get_state", env_ids).tolist()
        self._assert_seeded()
        played = self._call_again({i: () for i in ids}, "get_state")
        return [self._table.state(i, state) for i, state in zip(ids, played, strict=True)]

    @undivided
    def set_state(self, states: Sequence[EnvRowState], env_ids: Sequence[int] | None = None) -> Any:
        """Have environments go on from states, with the episodes that followed there.

        Args:
            states: From :meth:`get_state` of this or a like vector environment.
            env_ids: As many environments, all by default.

        Returns:
            The observations of all environments.

        Raises:
            ConfigError: If there are not as many, or one was saved with a wrapper.
        """
        ids = self._idle("set_state", env_ids).tolist()
        if len(ids) != len(states):
            raise ConfigError(f"Got {len(states)} states for {len(ids)} environments.")
        for state in states:
            if not isinstance(state, EnvRowState):
                raise_of_wrapper(state)
        self._batch.align()
        self._table.columns["half"][ids] = self._table.half[ids]
        known = {i: (s,) for i, s in zip(ids, states, strict=True) if s.env is not None}
        self._call_again(known, "set_state")
        self._seed(self._everyone, None)
        for i, state in zip(ids, states, strict=True):
            self._table.restore(i, state)
        if fresh := [i for i in ids if i not in known and not self._table.ended[i]]:
            self._table.columns["reseed"][fresh] = True
            self._runner.reset(np.array(fresh), {})
            self._wait_all()
            self._batch.align()
        return self._batch.observations(None)

    def _call_again(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> list[Any]:
        """Call what may be done twice until no worker dies over it."""
        while True:
            restarts = self._runner.restarts
            try:
                return self._runner.call(calls, method)
            except WorkerError:
                if self._runner.restarts == restarts:  # too many have died, or none
                    raise

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; one result for each."""
        return self.call_some(self._everyone, name, *args, **kwargs)

    @undivided
    def call_some(
        self, env_ids: Sequence[int] | np.ndarray, name: str, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Do what :meth:`call` does, in these environments only; one result for each of them."""
        ids = self._idle("call", env_ids).tolist()
        return tuple(self._runner.call({i: (name, args, kwargs) for i in ids}, "call"))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self.call(name)

    @undivided
    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment, to one value or to a list or tuple of them."""
        ids = self._idle("set_attr").tolist()
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ConfigError(f"Expected {self.num_envs} values of {name!r}, got {len(values)}.")
        self._runner.call({i: (name, values[i]) for i in ids}, "set_attr")

    def render(self) -> tuple[Any, ...]:
        """Return a frame of every environment, or None for each without a ``render_mode``."""
        if self.render_mode is None:
            gym.logger.warn("render() returns None: give render_mode='rgb_array'.")
            return (None,) * self.num_envs
        return self.call("render")

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: workers and shared memory are of this process."""
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled or copied: its workers belong to this "
            "process. Make it anew there, and take along get_state(), which can be pickled."
        )

    def close_extras(self, **_: Any) -> None:
        """End the workers; whatever is under way is lost."""
        self._finalizer()

    # Inside

    def going(self) -> np.ndarray:
        """Return the environments that were begun and not received."""
        return np.union1d(np.flatnonzero(self._table.busy), self._table.finished).astype(np.int64)

    def end(self) -> None:
        """Wait for all that is under way and throw it away, errors too."""
        while self._runner.broken is None and not self._runner.idle():
            with contextlib.suppress(VlaGymError, Warning):
                self._runner.wait(self._runner.idle)
        self._collected()

    def _assert_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("This vector environment is closed.")
        if self._runner.broken is not None:
            raise WorkerError(f"This vector environment has failed: {self._runner.broken}")

    def _idle(
        self,
        name: str,
        env_ids: Sequence[int] | np.ndarray | None = None,
        *,
        others_too: bool = True,
    ) -> np.ndarray:
        """Return environments, all by default, after a check that they have nothing to do."""
        self._assert_open()
        ids = self._everyone if env_ids is None else self._check_ids(env_ids)
        if self._waiting is not None:
            mend = "reset()" if self._interrupted else "step_wait()"
            raise AlreadyPendingCallError(
                f"{name}() while a step is under way: call {mend} first.", self._waiting
            )
        table = self._table
        if table.busy.any() or table.finished:
            going = self.going() if others_too else np.intersect1d(self.going(), ids)
            if len(going):
                raise AlreadyPendingCallError(
                    f"{name}() while environments {going.tolist()} were sent and not received: "
                    "call recv() first.",
                    "send",
                )
        return ids

    def _assert_seeded(self) -> None:
        if not self.seeded:
            raise gym.error.ResetNeeded("Call reset() first.")

    def _check_ids(self, env_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.atleast_1d(np.asarray(env_ids))
        bad = ids.ndim != 1 or ids.dtype.kind not in "iu" or len(np.unique(ids)) != len(ids)
        if bad or len(ids) == 0 or ids.min() < 0 or ids.max() >= self.num_envs:
            raise ConfigError(
                f"env_ids must be different integers in 0..{self.num_envs - 1}, got {env_ids}."
            )
        return ids.astype(np.int64)

    def _seed(self, ids: np.ndarray, seed: int | Sequence[int | None] | None) -> None:
        if seed is None:
            if self.seeded:
                return
            seed = int(self.np_random.integers(2**31))
        # The first reset seeds all environments, of whichever it is.
        if isinstance(seed, int | np.integer):
            seeds = self._plan.seeds(ids if self.seeded else self._everyone, seed)
            super().reset(seed=int(seed))
        else:
            seeds = self._plan.seeds(ids, seed)
            if not self.seeded:
                drawn = int(self.np_random.integers(2**31))
                self._table.seed(*self._plan.seeds(self._everyone, drawn))
        self._table.seed(*seeds)
        self.seeded = True

    def _wait(self, enough: Callable[[], bool], timeout: float | None) -> None:
        """Wait for events; an error that ends the wait also ends the step."""
        try:
            self._runner.wait(enough, timeout)
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        except Exception as error:
            # An environment of this process may raise a TimeoutError too: then all are idle.
            over_time = isinstance(error, TimeoutError) and not self._runner.idle()
            if self._waiting is not None and not over_time:
                self.end()
            raise
        self._interrupted = False

    def _wait_all(self, timeout: float | None = None) -> None:
        self._waiting = self._waiting or "reset"
        self._wait(self._runner.idle, timeout)
        self._collected()

    def _collected(self) -> None:
        self._waiting, self._interrupted = None, False
        self._table.finished.clear()
