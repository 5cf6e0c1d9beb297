"""History for many environments at once, over any vector environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vla_gym.wrappers.history_buffer import HistoryBuffer, HistoryState
from vla_gym.wrappers.vector_base import Obs, Step, VectorObservationWrapper, if_env_has


class History(VectorObservationWrapper):
    """Add the last T frames and actions of the episode to the observations of N environments.

    The observation of one environment is that of :class:`vla_gym.wrappers.History`, bit for bit;
    here every entry has N rows. Any autoreset mode: in SAME_STEP ``infos["final_obs"]`` has the
    history of the episode that ended. Where a worker died (``worker_restarted``), the observation
    and its history are the last ones before the step that was lost.

    Each frame is copied once and each history is the caller's own, also over an environment that
    hands out views of shared memory (``copy=False``); the other keys are passed on as they are.
    ``step_async``, ``send``, ``reset_send``, ``get_state`` and ``set_state`` work where the wrapped
    environment has them, every other attribute of it is reached through the wrapper.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        length: int = 4,
        stride: int = 1,
        frames: Sequence[str] = ("wrist",),
    ) -> None:
        """Wrap a vector of environments with Dict observations and Box actions.

        Args:
            env: For example a :class:`~vla_gym.vector.LiberoVectorEnv`.
            length: Entries T of the history, at least 1.
            stride: Steps from one entry to the next, at least 1.
            frames: Cameras of the observation whose frames are kept; empty for the actions alone.

        Raises:
            ConfigError: If a number is out of range, the observation is no Dict, has no such camera
                or has a history already, or the action is no Box.
        """
        super().__init__(env)
        n, action_space = env.num_envs, env.single_action_space
        self._buffer = HistoryBuffer(
            n, length, stride, frames, env.single_observation_space, action_space
        )
        self.single_observation_space = self._buffer.space
        self.observation_space = batch_space(self._buffer.space, n)
        self._everyone = np.arange(n)
        self._resets_next = env.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
        # What each environment is doing, and whether its next step is a reset.
        self._actions = np.zeros((n, *(action_space.shape or ())), np.float32)
        self._resetting, self._ended = np.zeros(n, bool), np.zeros(n, bool)

    def step(self, actions: np.ndarray) -> Step:
        """Step all environments; the actions become the last entries of their histories."""
        result = self.env.step(actions)
        self._note(self._everyone, actions)
        return self._convert_step(result)

    @if_env_has
    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step; see the wrapped environment."""
        env: Any = self.env
        env.step_async(actions)
        self._note(self._everyone, actions)

    @if_env_has
    def send(self, actions: np.ndarray, env_ids: Sequence[int] | np.ndarray) -> None:
        """Begin a step in some environments; see the wrapped environment."""
        env: Any = self.env
        env.send(actions, env_ids)
        self._note(np.atleast_1d(env_ids), actions)

    @if_env_has
    def reset_send(self, env_ids: Sequence[int] | np.ndarray | None = None, **kwargs: Any) -> None:
        """Begin a reset of some environments, all by default; see the wrapped environment."""
        env: Any = self.env
        env.reset_send(env_ids, **kwargs)
        self._resetting[self._everyone if env_ids is None else np.atleast_1d(env_ids)] = True

    @if_env_has
    def get_state(self, env_ids: Sequence[int] | None = None) -> list[HistoryState]:
        """Return the states of environments with their histories; they can be pickled."""
        env: Any = self.env
        states = env.get_state(env_ids)
        ids = self._everyone if env_ids is None else np.atleast_1d(env_ids)
        return [
            self._buffer.save(i, state, ended=bool(self._ended[i]))
            for i, state in zip(ids.tolist(), states, strict=True)
        ]

    @if_env_has
    def set_state(
        self, states: Sequence[HistoryState], env_ids: Sequence[int] | None = None
    ) -> Obs:
        """Bring environments to states that :meth:`get_state` returned.

        Returns:
            The observations of all environments.

        Raises:
            ConfigError: If a state does not fit; nothing has changed then.
        """
        env: Any = self.env
        states = [self._buffer.check(state) for state in states]
        obs = env.set_state([state.env for state in states], env_ids)
        ids = self._everyone if env_ids is None else np.atleast_1d(env_ids)
        for i, state in zip(ids.tolist(), states, strict=True):
            self._buffer.restore(i, state)
            self._ended[i] = state.ended
        return self._observe(obs, self._everyone)

    def _note(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        """Remember which actions are under way, and which of them begin an episode instead."""
        self._actions[env_ids] = actions
        self._resetting[env_ids] = self._ended[env_ids]

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        self._ended[env_ids] = False
        self._buffer.begin(env_ids)
        return self._observe(obs, self._everyone), infos

    def _convert_step(self, result: Step) -> Step:
        obs, rewards, terminations, truncations, infos = result
        env_ids, ended = self._env_ids(infos), terminations | truncations
        begun = self._resetting[env_ids]
        # A step that died with its worker took no action; its observation is the one before it.
        lost = ended & np.asarray(infos.get("worker_restarted", False))
        acted = ~begun & ~lost
        who, executed = env_ids[acted], _executed_steps(infos, len(env_ids))
        self._buffer.act(who, self._actions[who], None if executed is None else executed[acted])
        if "final_obs" in infos:
            final = infos["_final_obs"]
            infos = {**infos, "final_obs": self._observe_final(infos, env_ids)}
            begun = begun | final
        self._buffer.begin(env_ids[begun])
        if self._resets_next:
            self._ended[env_ids] = ended
        return self._observe(obs, env_ids), rewards, terminations, truncations, infos

    def _observe_final(self, infos: dict[str, Any], env_ids: np.ndarray) -> np.ndarray:
        """Return the final observations with the histories of the episodes that ended."""
        final_obs: np.ndarray = infos["final_obs"].copy()
        finals = np.flatnonzero(infos["_final_obs"])
        history = self._buffer.read(env_ids[finals])
        for k, row in enumerate(finals.tolist()):
            # Copies: a view would keep the whole batch alive.
            own = {key: rows[k].copy() for key, rows in history.items()}
            final_obs[row] = {**final_obs[row], **own}
        return final_obs

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:
        self._buffer.see(env_ids, obs)
        return {**obs, **self._buffer.read(env_ids)}


def _executed_steps(infos: dict[str, Any], num_rows: int) -> np.ndarray | None:
    """Return how many control steps each row executed, or None if no environment says so."""
    executed: np.ndarray | None = None
    # In SAME_STEP the infos of an ended row are those of its reset.
    for told in (infos, infos.get("final_info", {})):
        if "executed_steps" in told:
            mask = told["_executed_steps"]
            if executed is None:
                executed = np.full(num_rows, np.iinfo(np.int64).max)
            executed[mask] = told["executed_steps"][mask]
    return executed
