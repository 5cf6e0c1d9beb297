"""Wrappers of many environments at once; FrozenVLAObservation: one batched forward pass a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from vla_gym.wrappers.vector_base import (
    Obs,
    Step,
    VectorEpisodeWrapper,
    if_env_has,
    instructions_of,
)
from vla_gym.wrappers.vector_history import History
from vla_gym.wrappers.vector_plain_spaces import PlainSpaces
from vla_gym.wrappers.vla_features import VLAFeatures
from vla_gym.wrappers.vla_state import LastFrames

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla.base import FrozenVLA

__all__ = ["FrozenVLAObservation", "History", "PlainSpaces"]


class FrozenVLAObservation(VectorEpisodeWrapper):
    """Replace the camera images of N environments by what a frozen VLA makes of them.

    The observation of one environment is that of :class:`vla_gym.wrappers.FrozenVLAObservation`;
    here every entry has N rows. The VLA sees all of them in one forward pass, whatever their
    instructions, so a row differs from a single environment's by the rounding of batched matrix
    products only.

    Any autoreset mode: in SAME_STEP the final observations join the batch of their step, and
    ``infos["final_obs"]`` holds them converted. A reset of some environments
    (``options["reset_mask"]``) runs the VLA on those alone. What is returned is the caller's own,
    also when the environment hands out views of shared memory (``copy=False``). A step that died
    with its worker ends at the last observation, which the VLA does not look at again.

    The state of a :class:`~vla_gym.vla.StatefulVLA` is carried by environment: it begins anew with
    each episode, goes on with the rows that are returned, and is part of :meth:`get_state`. A final
    observation is seen with the state of the episode that has ended.

    ``step_wait``, ``recv`` and ``set_state`` convert what they return; every other attribute of
    the wrapped environment (``groups``, ``call``, ``get_attr``, ``set_attr``, ...) is reached
    through the wrapper. While one group of environments simulates,
    the VLA can work for another::

        here, there = envs.groups(2)
        obs, _ = envs.reset(seed=0)
        envs.send(obs["vla_action"][there], there)
        envs.send(obs["vla_action"][here], here)
        for _ in range(steps):
            obs, *_, infos = envs.recv(len(here))  # infers; the other group goes on simulating
            envs.send(obs["vla_action"], infos["env_id"])
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        vla: str | Path | FrozenVLA = "mini",
        rl_token: str | RLTokenEncoder | None = "auto",
        keep_images: bool = False,
        chunk_len: int | None = None,
        keep_inputs: bool = False,
    ) -> None:
        """Wrap a vector of chunked LIBERO environments that observe both cameras.

        Args:
            env: Its infos hold ``instruction``; its observations and actions are those that the
                single wrapper expects.
            vla: Name or directory of a VLA, or the model itself.
            rl_token: ``"auto"`` for the encoder that ships with the VLA (the mean hidden state if
                none does), a name or a directory, the encoder itself, or None for the mean.
            keep_images: Whether the camera images stay in the observation.
            chunk_len: Rows of ``vla_action``, if more than the environment executes a step.
            keep_inputs: Whether the observation also holds what the VLA saw, so that it can be
                shown it again: ``vla_input`` (L,) uint8, which ``features.inputs`` unpacks, and
                ``vla_version`` (1,) float32, ``features.version`` at that moment.

        Raises:
            ConfigError: If the environment does not fit the VLA, or the encoder does not.
        """
        super().__init__(env)
        self.features = VLAFeatures(
            vla,
            rl_token,
            env.single_observation_space,
            env.single_action_space,
            keep_images,
            chunk_len,
            keep_inputs,
        )
        self.vla, self.rl_token = self.features.vla, self.features.rl_token
        self.single_observation_space = self.features.space
        self.observation_space = batch_space(self.features.space, env.num_envs)
        self._kept = self._last = LastFrames(self.features, env.num_envs)

    @property
    def vla_seconds(self) -> float:
        """Seconds that the VLA and the RL-token encoder have taken so far."""
        return self.features.seconds

    @if_env_has
    def get_state(self, env_ids: Sequence[int] | None = None) -> list[Any]:
        """Return the wrapped environment's states, all by default; they can be pickled.

        With a stateful VLA each is a :class:`~vla_gym.envs.state.WrapperState`.
        """
        stateful = self.features.memory.is_stateful
        return super().get_state(env_ids) if stateful else self.env.get_state(env_ids)

    @if_env_has
    def set_state(self, states: Sequence[Any], env_ids: Sequence[int] | None = None) -> Obs:
        """Bring environments to states that ``get_state`` returned.

        Returns:
            The observations of all environments; those of ``env_ids`` are new. A stateful VLA's
            are exactly those that were there.

        Raises:
            ConfigError: If the VLA is stateful, and a state was saved without its memory.
        """
        inner = self._last.unwrapped(states, type(self).__name__)
        if self.features.memory.is_stateful:
            return super().set_state(states, env_ids)
        obs = self.env.set_state(inner, env_ids)
        fresh = self._everyone if env_ids is None else np.atleast_1d(env_ids)
        # A state may be of another task, and no info comes with it.
        infos = instructions_of(self.env, obs, fresh)
        return self._convert(obs, infos, self._everyone, fresh)[0]

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        self._ended[env_ids] = False
        return self._convert(obs, infos, self._everyone, env_ids, begun=True)

    def _convert_step(self, result: Step) -> Step:
        obs, rewards, terminations, truncations, infos = result
        env_ids, begun, _ = self._steps(infos, terminations | truncations)
        # What died with its worker shows its last frame again.
        dead = truncations & infos.get("worker_restarted", False)
        obs, infos = self._convert(obs, infos, env_ids, np.arange(len(env_ids)), begun, dead)
        return obs, rewards.copy(), terminations.copy(), truncations.copy(), infos

    def _convert(
        self,
        obs: Obs,
        infos: dict[str, Any],
        env_ids: np.ndarray,
        fresh: np.ndarray,
        begun: np.ndarray | bool = False,
        dead: np.ndarray | bool = False,
    ) -> tuple[Obs, dict[str, Any]]:
        """Convert observations and final observations with one forward pass.

        Args:
            obs: n rows.
            infos: Of these rows, as the wrapped environment gave them.
            env_ids: (n,) environment of each row.
            fresh: Positions of the rows that are new; the others keep what the VLA made of them.
            begun: (n,) bool: the row begins an episode.
            dead: (n,) bool: the episode ended at a frame that the VLA has seen.

        Returns:
            Observations and infos that share no array with the arguments.
        """
        infos, kept, last = _own(infos), self.features.kept, self._last
        begun = np.broadcast_to(begun, len(env_ids))
        dead = np.broadcast_to(dead, len(env_ids))
        has_final = infos.get("_final_obs", np.zeros(len(env_ids), bool))
        fresh = fresh[has_final[fresh] | ~dead[fresh]]
        finals = np.flatnonzero(has_final & ~dead)
        for i in np.flatnonzero(has_final & dead).tolist():
            seen = {key: rows[env_ids[i]] for key, rows in last.made.items()}
            infos["final_obs"][i] = _final(infos, i, kept, seen)
        instructions = last.instruct(infos, env_ids, fresh, finals)
        if instructions:
            ids = env_ids[fresh]
            made = self.features(
                {view: _rows(obs, infos, view, fresh, finals) for view in self.features.views},
                instructions,
                _rows(obs, infos, "proprio", fresh, finals),
                ids,
                begun[fresh],
                env_ids[finals],
            )
            for key, mine in last.made.items():
                mine[ids] = made[key][: len(fresh)]
        for row, i in enumerate(finals.tolist(), start=len(fresh)):
            new = {key: rows[row] for key, rows in made.items()}
            infos["final_obs"][i] = _final(infos, i, kept, new)
        current = {key: rows[env_ids] for key, rows in last.made.items()}
        return {**current, **{key: np.copy(obs[key]) for key in kept}}, infos

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:
        return self._convert(obs, {}, env_ids, env_ids[:0])[0]


def _final(
    infos: dict[str, Any], row: int, kept: Sequence[str], made: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Return a final observation of what is kept and made, as copies: views hold whole batches."""
    final = {key: np.copy(infos["final_obs"][row][key])[()] for key in kept}
    return final | {key: value.copy() for key, value in made.items()}


def _rows(
    obs: Obs, infos: dict[str, Any], key: str, fresh: np.ndarray, finals: np.ndarray
) -> np.ndarray:
    """Return the fresh rows of an observation, followed by the final ones."""
    everything = np.array_equal(fresh, np.arange(len(obs[key])))
    rows = obs[key] if everything else obs[key][fresh]
    if len(finals):
        rows = np.concatenate([rows, np.stack([infos["final_obs"][i][key] for i in finals])])
    return rows


def _own(infos: dict[str, Any]) -> dict[str, Any]:
    """Return infos with arrays of their own, nested dicts included."""
    own: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            own[key] = _own(value)
        else:
            own[key] = value.copy() if isinstance(value, np.ndarray) else value
    return own
