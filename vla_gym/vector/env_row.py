"""One environment of a vector environment, and its rows of the shared table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.vector.shared_memory import INFO_BITS, RESET, TEXT_INFO, fits_row, leaves, write_value


@dataclass(frozen=True)
class EnvRowState:
    """State of one environment of a vector environment.

    Attributes:
        env: State of the environment, see ``LiberoEnv.get_state``; None where the episode died
            with its worker: the next one begins.
        episode_return, episode_length: Statistics of the running episode.
        seed, next_episode, plays_as: Which episodes follow: those of that environment.
        ended: Whether a reset is due.
        infos: Of the last observation: what a step reports that dies with its worker.
    """

    env: Any
    episode_return: float
    episode_length: int
    seed: int = 0
    next_episode: int = 0
    plays_as: int = 0
    ended: bool = False
    infos: Mapping[str, Any] = field(default_factory=dict)


def row_in(state: Any) -> EnvRowState | None:
    """Return the state of the row that wrappers have put theirs around; None if there is none."""
    while state is not None and not isinstance(state, EnvRowState):
        state = getattr(state, "env", None)
    return state


def raise_of_wrapper(state: Any) -> NoReturn:
    """Refuse what a wrapper has saved around the state of a row, or no state at all."""
    raise ConfigError(
        f"Expected an EnvRowState of get_state(), got {type(state).__name__}: a state that was "
        "saved with a wrapper around the vector environment needs the same one here."
    )


class Extras(NamedTuple):
    """What of a reset or step does not fit into the table's columns.

    Attributes:
        infos, final_infos: Infos that are no plain numbers.
        text: The new instruction, or None if it did not change.
    """

    infos: dict[str, Any]
    final_infos: dict[str, Any]
    text: str | None

    def __bool__(self) -> bool:
        """Tell whether there is anything to send."""
        return bool(self.infos or self.final_infos or self.text is not None)


class EnvRow:
    """Runs one environment and writes what it returns into row ``index`` of the table.

    The same code runs in a worker process and, with ``workers=0``, in the trainer's.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        index: int,
        table: Mapping[str, np.ndarray],
        same_step: bool,
        first: int = 0,
    ) -> None:
        """Take over an environment that is not reset yet.

        The table is that of ``shared_memory.table_layout``; ``first``: see :class:`EnvTable`.
        """
        self.env, self.index, self._number, self._same_step = env, index, first + index, same_step
        self._table = table
        names = list(leaves(env.observation_space))
        # Rows of one environment as arrays; with the dots a scalar's is a view, too.
        self._halves = [{n: table[n][half, index, ...] for n in names} for half in (0, 1)]
        self._final = {n: table[f"final_{n}"][index, ...] for n in names} if same_step else {}
        self._unwrapped: Any = env.unwrapped
        self._seeks = hasattr(self._unwrapped, "seek")
        # A wrapper may keep or change images, so only a bare environment draws into our rows.
        self._draws = env is self._unwrapped and hasattr(env, "image_out")
        self._text: str | None = None
        self._begun = False
        self._return, self._length = 0.0, 0
        self._new_text: str | None = None

    def run(self, options: dict[str, Any] | None = None) -> Extras:
        """Do what the row asks for: a reset, or a step (with a reset if the mode wants one)."""
        table, i = self._table, self.index
        rows = self._halves[table["half"][i]]
        if self._draws:
            self._unwrapped.image_out = {
                name: rows[f"obs/{name}"] for name in self._unwrapped.cameras
            }
        self._new_text = None
        table["did_reset"][i] = table["episode_ended"][i] = False
        if table["op"][i] == RESET:
            table["reward"][i] = 0.0
            table["terminated"][i] = table["truncated"][i] = False
            return Extras(self._reset(rows, options), {}, self._new_text)
        return Extras(*self._step(rows), self._new_text)

    def _step(self, rows: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
        table, i = self._table, self.index
        obs, reward, terminated, truncated, info = self.env.step(table["action"][i].copy())
        table["reward"][i] = reward
        table["terminated"][i], table["truncated"][i] = terminated, truncated
        self._return += float(reward)
        self._length += int(info.get("executed_steps", 1))
        ended = bool(terminated or truncated)
        if ended:
            success = info.get("success", info.get("is_success", terminated))
            table["episode_ended"][i] = True
            table["episode_return"][i] = self._return
            table["episode_length"][i] = self._length
            table["episode_success"][i] = bool(success)
        if ended and self._same_step:
            write_value(self._final, obs)
            final_infos = self._write_info("final_info", info)
            return self._reset(rows, None), final_infos
        write_value(rows, obs)
        return self._write_info("info", info), {}

    def _reset(self, rows: dict[str, np.ndarray], options: dict[str, Any] | None) -> dict[str, Any]:
        table, i = self._table, self.index
        seed, episode = int(table["seed"][i]), int(table["episode"][i])
        self._return, self._length, self._begun = 0.0, 0, True
        reset_seed: int | None = None
        if table["reseed"][i] and episode == 0:
            reset_seed = seed
        elif self._seeks:
            other = int(table["plays_as"][i])
            self._unwrapped.seek(seed, episode, *((other,) if other != self._number else ()))
        elif table["reseed"][i]:
            # A restarted environment that cannot be put to its next episode: as reproducible.
            reset_seed = int(np.random.SeedSequence([seed, episode]).generate_state(1)[0])
        obs, info = self.env.reset(seed=reset_seed, options=options)
        write_value(rows, obs)
        table["did_reset"][i] = True
        return self._write_info("info", info)

    def _write_info(self, prefix: str, info: Mapping[str, Any]) -> dict[str, Any]:
        """Write the numeric infos into the row; return the others."""
        table, i, present = self._table, self.index, 0
        extras: dict[str, Any] = {}
        for key, value in info.items():
            if fits_row(key, value):
                table[f"{prefix}/{key}"][i] = value
                present |= INFO_BITS[key]
            elif (
                key == TEXT_INFO
                and type(value) is str
                # The trainer has the text of a final info since the episode began, unless
                # set_state or a wrapper has changed it.
                and (prefix == "info" or value == self._text)
            ):
                present |= INFO_BITS[key]
                if value != self._text:
                    self._text = self._new_text = value
            else:
                extras[key] = value
        table[f"{prefix}_set"][i] = present
        return extras

    def get_state(self) -> EnvRowState:
        """Return the environment's state; of a new worker, before the first reset, without one.

        Raises:
            ConfigError: If the environment has no ``get_state``.
        """
        method = self._method("get_state")
        return EnvRowState(method() if self._begun else None, self._return, self._length)

    def set_state(self, state: EnvRowState) -> None:
        """Continue from a state; the observation goes into the row.

        Raises:
            ConfigError: If it was saved in a part of a vector environment, with its wrappers.
        """
        if row_in(state.env) is not None:
            raise_of_wrapper(state.env)
        rows = self._halves[self._table["half"][self.index]]
        if self._draws:
            self._unwrapped.image_out = None
        write_value(rows, self._method("set_state")(state.env))
        self._return, self._length = state.episode_return, state.episode_length
        self._begun = True
        self._text = None  # the trainer's text is now the state's: say the next one anyway

    def _method(self, name: str) -> Any:
        layer, is_known = self.env, self.env is self._unwrapped
        while isinstance(layer, gym.Wrapper):
            layer, is_known = layer.env, is_known or name in vars(type(layer))
        if not is_known:
            raise ConfigError(
                f"{name} knows nothing of what the wrappers {self.env} hold or change. Give one of "
                f"them a {name} method, or use an environment without env_wrappers."
            )
        try:
            return self.env.get_wrapper_attr(name)
        except AttributeError as error:
            raise ConfigError(f"{self.env} has no {name}.") from error

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the environment or its wrappers, or return an attribute."""
        if name in ("reset", "step", "close", "seek", "get_state", "set_state"):
            raise ConfigError(
                f"call({name!r}) would go past the vector environment: use its methods."
            )
        if self._draws:
            self._unwrapped.image_out = None
        attribute = self.env.get_wrapper_attr(name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the environment or of the wrapper that has it."""
        self.env.set_wrapper_attr(name, value)
