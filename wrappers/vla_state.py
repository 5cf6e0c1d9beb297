"""What is known of environments between two looks of a VLA, and saved if it is stateful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.envs.state import WrapperState
from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from vla_gym.wrappers.vla_features import VLAFeatures


#: The class, in :class:`WrapperState`, of both wrappers that look.
_WRAPPER = "FrozenVLAObservation"


class LastFrames:
    """What a VLA has made of the last frame of every environment.

    Attributes:
        made: By key of the observation, (N, ...).
        instructions: (N,) texts; None before the first reset.
        begins: (N,) bool: the next frame will be the first of an episode.
    """

    def __init__(self, features: VLAFeatures, num_envs: int) -> None:
        """Know nothing yet; ``features`` compute the observations."""
        self._features = features
        self.made = {
            key: np.zeros((num_envs, *(features.space[key].shape or ())), features.space[key].dtype)
            for key in features.made
        }
        self.instructions = np.full(num_envs, None, dtype=object)
        self.begins = np.ones(num_envs, bool)

    def instruct(
        self, infos: dict[str, Any], env_ids: np.ndarray, fresh: np.ndarray, finals: np.ndarray
    ) -> list[str]:
        """Take note of new instructions; return those of the rows that the VLA is to look at.

        Args:
            infos: Of n rows.
            env_ids: (n,) environment of each row.
            fresh: Positions of new observations.
            finals: Positions of final observations; those belong to the episodes that have ended.

        Raises:
            ConfigError: If an environment has not told its instruction.
        """
        before = self.instructions[env_ids]
        ended = heard(before, infos.get("final_info", {}))
        texts = self.instructions[env_ids] = heard(before, infos)
        return check_told([*texts[fresh], *ended[finals]])

    def save(self, env_ids: Sequence[int], states: Sequence[Any]) -> list[Any]:
        """Return what ``get_state`` does: the wrapped environments' states, or these with more.

        A stateful VLA's memory is kept with what it has made of the present frame: looked at in
        another batch, the frame would lead to a state that differs in its last bits.
        """
        memory = self._features.memory
        if not memory.is_stateful:
            return list(states)
        return [
            WrapperState(
                state,
                _WRAPPER,
                {
                    "instruction": self.instructions[i],
                    "made": {key: rows[i].copy() for key, rows in self.made.items()},
                    "memory": memory.save(i),
                },
                bool(self.begins[i]),
            )
            for i, state in zip(env_ids, states, strict=True)
        ]

    def check(self, states: Sequence[Any]) -> list[Any]:
        """Return the wrapped environments' states, after a check that the rest fits.

        With a VLA that has no state all states are accepted.

        Raises:
            ConfigError: If the VLA is stateful, and a state was saved without its memory, or with
                that of another one.
        """
        if self._features.memory.is_stateful:
            for state in states:
                self._check(state)
        return [state.env if _is_own(state) else state for state in states]

    def _check(self, state: Any) -> None:
        memory = self._features.memory
        if not _is_own(state):
            raise ConfigError(
                f"The VLA {memory.vla.name!r} has a state, and this {type(state).__name__} was "
                "saved without one: give a state that get_state returned with this VLA, or reset "
                "the environments."
            )
        memory.check(state.kept["memory"])
        mine = {key: rows.shape[1:] for key, rows in self.made.items()}
        theirs = {key: value.shape for key, value in state.kept["made"].items()}
        if mine != theirs:
            raise ConfigError(
                f"The state was saved with other observations: expected {mine}, got {theirs}. Make "
                "the environments with the RL token and the chunk length that they had."
            )

    def load(self, env_ids: Sequence[int], states: Sequence[WrapperState]) -> None:
        """Take over states that :meth:`check` has seen, of as many environments."""
        for i, state in zip(env_ids, states, strict=True):
            self._features.memory.load(i, state.kept["memory"])
            self.instructions[i], self.begins[i] = state.kept["instruction"], state.ended
            for key, rows in self.made.items():
                rows[i] = state.kept["made"][key]


def _is_own(state: Any) -> bool:
    return isinstance(state, WrapperState) and state.wrapper == _WRAPPER


def heard(texts: np.ndarray, infos: Mapping[str, Any]) -> np.ndarray:
    """Return texts (n,), where infos tell an instruction that one in its place."""
    if "instruction" not in infos:
        return texts
    return np.where(infos["_instruction"], infos["instruction"], texts)


def check_told(instructions: list[Any]) -> list[str]:
    """Return the instructions that environments told.

    Raises:
        ConfigError: If one did not.
    """
    if not all(isinstance(instruction, str) for instruction in instructions):
        raise ConfigError(
            "Expected infos with the 'instruction' of every environment: reset it first, and let "
            "the environment put its instruction into info."
        )
    return instructions
