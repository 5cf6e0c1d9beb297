"""The last frames and actions as part of the observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.state import WrapperState, check_wrapper
from vla_gym.wrappers.history_buffer import HistoryBuffer

#: The one environment of a single wrapper's buffer.
_ROW = np.zeros(1, np.int64)


class History(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Add the last T frames and actions of the episode to the observation.

    A step is one ``env.step``: with ``chunk_len`` an action is a whole chunk, and the frame is the
    one at its end. Observation: that of the environment, the current frames included, and
        ``<camera>_history``: (T, H, W, 3) uint8 for each camera of ``frames``;
        ``action_history``: (T, *action shape) float32, clipped to the action space's bounds;
        rows of a chunk that were not executed (``info["executed_steps"]``) are 0;
        ``history_mask``: (T,) int8, 1 where an entry is real.

    Frame i was seen *before* action i, and the frame after the last action is the current one. At
    step t of an episode with ``length=3``::

        stride=1   <camera>_history   o[t-3]  o[t-2]  o[t-1]      current frame: o[t]
                   action_history     a[t-3]  a[t-2]  a[t-1]      a[k] was taken at o[k]
        stride=2   <camera>_history   o[t-6]  o[t-4]  o[t-2]
                   action_history     a[t-6]  a[t-4]  a[t-2]      not those in between

    Entries before the episode's first frame hold that frame, zeros as action and 0 in the mask;
    nothing comes from an earlier episode. It may be one of ``LiberoVectorEnv``'s ``env_wrappers``;
    :class:`vla_gym.wrappers.vector.History` does the same in the trainer's process.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, Any], np.ndarray],
        length: int = 4,
        stride: int = 1,
        frames: Sequence[str] = ("wrist",),
    ) -> None:
        """Wrap an environment with a Dict observation and a Box action.

        Args:
            env: For example ``Libero-*``.
            length: Entries T of the history, at least 1.
            stride: Steps from one entry to the next, at least 1.
            frames: Cameras of the observation whose frames are kept; empty for the actions alone.

        Raises:
            ConfigError: If a number is out of range, the observation is no Dict, has no such camera
                or has a history already, a camera is named twice, or the action is no Box.
        """
        super().__init__(env)
        self._buffer = HistoryBuffer(
            1, length, stride, frames, env.observation_space, env.action_space
        )
        self.observation_space = self._buffer.space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment; the history is that of a first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._buffer.begin(_ROW)
        return self._observe(obs), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action, or a chunk; it becomes the last entry of the history."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        executed = info.get("executed_steps", np.size(action))
        self._buffer.act(_ROW, np.asarray(action)[None], np.array([executed]))
        return self._observe(obs), float(reward), terminated, truncated, info

    def get_state(self) -> WrapperState:
        """Return the environment's state with the history; it can be pickled."""
        state = self.env.get_wrapper_attr("get_state")()
        return WrapperState(state, type(self).__name__, self._buffer.save(0))

    def set_state(self, state: WrapperState) -> dict[str, Any]:
        """Go on from what :meth:`get_state` of a like environment returned.

        Returns:
            The observation of that moment, with its history.

        Raises:
            ConfigError: If the state does not fit; nothing has changed then.
        """
        self._buffer.check(check_wrapper(state, type(self).__name__).kept)
        obs = self.env.get_wrapper_attr("set_state")(state.env)
        self._buffer.restore(0, state.kept)
        return self._observe(obs)

    def _observe(self, obs: dict[str, Any]) -> dict[str, Any]:
        self._buffer.see(_ROW, {key: np.asarray(obs[key])[None] for key in self._buffer.cameras})
        return {**obs, **{key: rows[0] for key, rows in self._buffer.read(_ROW).items()}}
