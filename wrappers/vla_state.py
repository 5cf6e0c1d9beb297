"""What is known of environments between two looks of a VLA, and saved if it is stateful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.envs.state import WrapperState
from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from vla_gym.wrappers.vla_features import VLAFeatures


class LastFrames:
    """What a VLA has made of the last frame of every environment.

    Attributes:
        made: By key of the observation, (N, ...).
        instructions: (N,) texts; None before the first reset.
    """

    def __init__(self, features: VLAFeatures, num_envs: int) -> None:
        """Know nothing yet; ``features`` compute the observations."""
        self._features = features
        made = {key: s for key, s in features.space.items() if key not in features.kept}
        self.made = {k: np.zeros((num_envs, *(s.shape or ())), s.dtype) for k, s in made.items()}
        self.instructions = np.full(num_envs, None, dtype=object)

    def instruct(
        self, infos: dict[str, Any], env_ids: np.ndarray, fresh: np.ndarray, finals: np.ndarray
    ) -> list[str]:
        """Take note of new instructions; return those of the rows that the VLA is to look at.

        Fresh and final ones, by their positions among the n rows; the latter belong to the
        episodes that have ended. ConfigError if one was never told.
        """
        before = self.instructions[env_ids]
        ended = heard(before, infos.get("final_info", {}))
        texts = self.instructions[env_ids] = heard(before, infos)
        return check_told([*texts[fresh], *ended[finals]])

    def save(self, env_id: int) -> dict[str, Any]:
        """Return what ``get_state`` keeps of a stateful VLA's episode.

        Its memory, and what it has made of the present frame: looked at in another batch, the
        frame would lead to a state that differs in its last bits.
        """
        return {
            "instruction": self.instructions[env_id],
            "made": {key: rows[env_id].copy() for key, rows in self.made.items()},
            "memory": self._features.memory.save(env_id),
        }

    def unwrapped(self, states: Sequence[Any], wrapper: str) -> list[Any]:
        """Return the environments' states out of those of a class of wrappers.

        A VLA that has no state goes on from the states of environments alone, too.

        Raises:
            ConfigError: If the VLA is stateful, and a state was saved without its memory.
        """
        own = [isinstance(state, WrapperState) and state.wrapper == wrapper for state in states]
        memory = self._features.memory
        if memory.is_stateful and not all(own):
            state = states[own.index(False)]
            raise ConfigError(
                f"The VLA {memory.vla.name!r} has a state, and this {type(state).__name__} was "
                "saved without one: give a state that get_state returned with this VLA, or reset "
                "the environments."
            )
        return [state.env if mine else state for state, mine in zip(states, own, strict=True)]

    def check(self, kept: Mapping[str, Any]) -> None:
        """Check that a VLA can go on from what :meth:`save` returned.

        Raises:
            ConfigError: If it was saved with another VLA, or other observations.
        """
        self._features.memory.check(kept["memory"])
        mine = {key: rows.shape[1:] for key, rows in self.made.items()}
        theirs = {key: value.shape for key, value in kept["made"].items()}
        if mine != theirs:
            raise ConfigError(
                f"The state was saved with other observations: expected {mine}, got {theirs}. Make "
                "the environments with the RL token and the chunk length that they had."
            )

    def restore(self, env_id: int, kept: Mapping[str, Any]) -> None:
        """Take over what :meth:`check` has seen."""
        self._features.memory.load(env_id, kept["memory"])
        self.instructions[env_id] = kept["instruction"]
        for key, rows in self.made.items():
            rows[env_id] = kept["made"][key]


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
