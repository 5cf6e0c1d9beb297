"""The last frames and actions of some environments: shared by both History wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.envs.checks import MAX_HISTORY, as_integer
from vla_gym.errors import ConfigError


class HistoryBuffer:
    """One ring of frames and actions for each of N environments.

    A step is :meth:`act`, then :meth:`see`; an episode begins with :meth:`begin`, then
    :meth:`see`. A frame is copied once, to where it stays until it is too old.

    Attributes:
        cameras: Whose frames are kept.
        space: Observation space of one environment, with the history in it.
    """

    def __init__(
        self,
        num_envs: int,
        length: int,
        stride: int,
        frames: Sequence[str],
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
    ) -> None:
        """Check the arguments, see ``History``, and make room; spaces are of one environment.

        Raises:
            ConfigError: If an argument is out of range, or a space does not fit.
        """
        length = as_integer(length, "length", 1, MAX_HISTORY)
        stride = as_integer(stride, "stride", 1, MAX_HISTORY)
        if not isinstance(frames, Iterable):
            raise ConfigError(f"frames must be names of cameras, got {frames!r:.80}.")
        self.cameras = (frames,) if isinstance(frames, str) else tuple(frames)
        found = _check_spaces(self.cameras, observation_space, action_space)
        low, high = found.low, found.high
        self._bounds, self._chunked = (low, high), len(found.shape) > 1
        fields = dict(observation_space.items())  # type: ignore[attr-defined]
        shapes = {camera: fields[camera].shape for camera in self.cameras}
        for camera, shape in shapes.items():
            fields[f"{camera}_history"] = spaces.Box(0, 255, (length, *shape), np.uint8)
        fields["action_history"] = spaces.Box(
            np.repeat(np.minimum(low, 0)[None], length, axis=0).astype(np.float32),
            np.repeat(np.maximum(high, 0)[None], length, axis=0).astype(np.float32),
            dtype=np.float32,
        )
        fields["history_mask"] = spaces.MultiBinary(length)
        self.space = spaces.Dict(fields)
        # How many steps ago each entry was. The ring holds all frames up to the oldest of them,
        # and the current one: those between the entries are entries of later steps.
        self._ages = stride * np.arange(length, 0, -1)
        self._size = length * stride + 1
        self._frames = {
            camera: np.zeros((num_envs, self._size, *shape), np.uint8)
            for camera, shape in shapes.items()
        }
        self._actions = np.zeros((num_envs, self._size, *found.shape), np.float32)
        self._steps = np.zeros(num_envs, np.int64)

    def begin(self, rows: np.ndarray) -> None:
        """Forget what some environments did: their next frame is the first of an episode."""
        self._steps[rows] = 0

    def act(self, rows: np.ndarray, actions: np.ndarray, executed: np.ndarray) -> None:
        """Note the actions that some environments took at their current frames.

        Args:
            rows: (n,) environments.
            actions: (n, *action shape); clipped to the action space, as the simulator does.
            executed: (n,) how many rows of each chunk were executed, the others become 0. Of no
                meaning where an action is a single vector.
        """
        taken = np.clip(actions, *self._bounds).astype(np.float32)
        if self._chunked:
            taken[np.arange(taken.shape[1]) >= executed[:, None]] = 0.0
        self._actions[rows, self._steps[rows] % self._size] = taken
        self._steps[rows] += 1

    def see(self, rows: np.ndarray, obs: Mapping[str, np.ndarray]) -> None:
        """Copy the current frames of some environments.

        Args:
            rows: (n,) environments.
            obs: With n rows in this order; a frame that was seen before may be seen again.
        """
        for camera, ring in self._frames.items():
            ring[rows, self._steps[rows] % self._size] = obs[camera]

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the histories (n, T, ...) of some environments as new arrays."""
        past = self._steps[rows, None] - self._ages
        real = past >= 0
        # Before an episode's first frame there is that frame, and no action.
        where = rows[:, None], np.maximum(past, 0) % self._size
        history = {f"{camera}_history": ring[where] for camera, ring in self._frames.items()}
        actions = self._actions[where]
        actions[~real] = 0.0
        return history | {"action_history": actions, "history_mask": real.astype(np.int8)}

    def save(self, row: int) -> dict[str, Any]:
        """Return the history of one environment.

        Returns:
            ``steps`` of the episode so far; ``frames``, by camera (K, H, W, 3) uint8: the last
            frames before the current one, the oldest first, K = min(steps, length * stride);
            ``actions`` (K, *action shape) float32, the action that followed each of them.
        """
        steps = int(self._steps[row])
        slots = self._slots(steps)
        frames = {camera: ring[row, slots] for camera, ring in self._frames.items()}
        return {"steps": steps, "frames": frames, "actions": self._actions[row, slots]}

    def check(self, kept: Mapping[str, Any]) -> None:
        """Check that this history can go on from what :meth:`save` returned.

        Raises:
            ConfigError: If it is of a wrapper with other arguments.
        """
        count = len(self._slots(kept["steps"]))
        expected = {camera: (count, *ring.shape[2:]) for camera, ring in self._frames.items()}
        got = {camera: frames.shape for camera, frames in kept["frames"].items()}
        shape, found = (count, *self._actions.shape[2:]), kept["actions"].shape
        if got != expected or found != shape:
            raise ConfigError(
                f"Expected a history of frames {expected} and actions {shape}, got {got} and "
                f"{found}: both environments need the same History."
            )

    def restore(self, row: int, kept: Mapping[str, Any]) -> None:
        """Go on from what :meth:`check` has seen; the current frame is seen next."""
        slots = self._slots(kept["steps"])
        for camera, ring in self._frames.items():
            ring[row, slots] = kept["frames"][camera]
        self._actions[row, slots] = kept["actions"]
        self._steps[row] = kept["steps"]

    def _slots(self, steps: int) -> np.ndarray:
        """Return where the frames before the current one are, the oldest first."""
        return np.arange(max(0, steps - self._size + 1), steps) % self._size


def _check_spaces(
    cameras: tuple[str, ...], observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> spaces.Box:
    """Return the action space if a history can be kept in these spaces."""
    if not isinstance(observation_space, spaces.Dict):
        raise ConfigError(
            f"History expects a Dict observation with cameras, got {observation_space}: wrap a "
            "Libero-* environment."
        )
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(f"History expects a Box action space, got {action_space}.")
    images = [
        key
        for key, space in observation_space.items()
        if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
    ]
    for camera in cameras:
        if camera not in images:
            raise ConfigError(
                f"frames must name cameras of the observation ({', '.join(images) or 'none'}), got "
                f"{camera!r}: make the environment with that camera."
            )
    if len(set(cameras)) != len(cameras):
        raise ConfigError(f"frames must be different cameras, got {list(cameras)}.")
    if {"action_history", "history_mask"} & observation_space.keys():
        raise ConfigError("The observation has a history already: wrap in History once.")
    return action_space
