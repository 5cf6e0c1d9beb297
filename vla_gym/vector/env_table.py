"""What the trainer knows of each environment: the shared table, and what it remembers itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.vector.env_row import EnvRowState, Extras
from vla_gym.vector.shared_memory import OF_RESETS, RESET, STEP, TEXT_INFO

# Remembered of the last whole observation, for the infos of a step that a dead worker took away.
_REMEMBERED = (
    "info_set",
    "info/elapsed_steps",
    "info/task_id",
    "info/init_state_id",
    "info/progress",
    "info/variation",
)


class EnvTable:
    """N environments: one row each. The workers know only the columns.

    Attributes:
        columns: The shared arrays, see ``shared_memory.table_layout``.
        first: Number of environment 0 in the vector environment that this one is a part of.
        half: (N,) which half of the double buffer holds the current observation.
        busy: (N,) a command is under way.
        ended: (N,) a reset is due.
        killed: (N,) the last command was a step that died with its worker.
        restarted: (N,) the worker was restarted during the last command.
        lost: (N,) the episode died with its worker between two commands.
        options: Options of a reset under way, by environment.
        texts, final_texts: Instruction of the current, and of the just ended episode.
        extras: Infos that are not in the columns, by environment, of the last command.
        obs_columns: Names of those columns that hold observations.
        known: Infos of the last whole observation, by column.
        finished: Environments whose command is done and not collected yet, in order.
    """

    def __init__(self, n: int, first: int = 0) -> None:
        """Describe environments that are not built yet; their numbers begin at ``first``."""
        self.first = first
        self.columns: dict[str, np.ndarray] = {}
        self.half = np.zeros(n, np.int8)
        self.busy, self.ended = np.zeros(n, bool), np.ones(n, bool)
        self.killed, self.restarted = np.zeros(n, bool), np.zeros(n, bool)
        self.lost = np.zeros(n, bool)
        self.options: dict[int, dict[str, Any]] = {}
        self.texts: list[str | None] = [None] * n
        self.final_texts: list[str | None] = [None] * n
        self.extras: dict[int, Extras] = {}
        self.known: dict[str, np.ndarray] = {}
        self.obs_columns: list[str] = []
        self.finished: list[int] = []

    def attach(self, columns: dict[str, np.ndarray]) -> None:
        """Take over the shared arrays, which must be there before the first command."""
        self.columns = columns
        self.known = {key: np.zeros_like(columns[key]) for key in _REMEMBERED}
        self.obs_columns = [name for name in columns if name.startswith("obs")]

    def seed(self, ids: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode count of environments again, from new seeds."""
        columns = self.columns
        columns["seed"][ids], columns["episode"][ids] = seeds, 0
        columns["reseed"][ids], columns["plays_as"][ids] = True, self.first + ids

    def take(self, ids: np.ndarray, ops: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Take over from another table what environments are to do, and which episode follows.

        Args:
            ids: (n,) environments.
            ops: (n,) what they do next.
            rows: (n, ...) each: ``action``; with a reset also the columns ``OF_RESETS``.
        """
        self.columns["action"][ids] = rows["action"]
        reset = ops == RESET
        again = ids[reset]
        if len(again):
            own = self.columns["reseed"][again]  # of a worker that was restarted here
            for name in OF_RESETS:
                self.columns[name][again] = rows[name][reset]
            self.columns["reseed"][again] |= own
            self.lost[again] = False

    def state(self, i: int, played: EnvRowState) -> EnvRowState:
        """Return the state of environment i, of which the worker knows what it has played."""
        infos = {key: values[i].tolist() for key, values in self.known.items()}
        return dataclasses.replace(
            played,
            seed=int(self.columns["seed"][i]),
            next_episode=int(self.columns["episode"][i]),
            plays_as=int(self.columns["plays_as"][i]),
            ended=bool(self.ended[i]),
            infos=infos | {TEXT_INFO: self.texts[i]},
        )

    def restore(self, i: int, state: EnvRowState) -> None:
        """Put the episode count of environment i, and its known infos, where a state had them."""
        columns = self.columns
        columns["seed"][i], columns["episode"][i] = state.seed, state.next_episode
        columns["plays_as"][i], columns["reseed"][i] = state.plays_as, False
        self.ended[i], self.lost[i] = state.ended, False
        for key, values in self.known.items():
            values[i] = state.infos.get(key, 0)
        self.texts[i] = state.infos.get(TEXT_INFO)

    def begin(self, ids: np.ndarray, ops: np.ndarray) -> None:
        """Write down what environments are to do."""
        self.killed[ids] = self.restarted[ids] = False
        self.busy[ids] = True
        self.columns["op"][ids], self.columns["half"][ids] = ops, 1 - self.half[ids]
        for of_the_last in (self.extras, self.options):
            if of_the_last:
                for i in ids.tolist():
                    of_the_last.pop(i, None)

    def give_up(self, ids: np.ndarray) -> None:
        """Forget commands whose outcome is unknown; a reset is due."""
        self.busy[ids], self.ended[ids] = False, True

    def finish(self, ids: np.ndarray, extras: Mapping[int, Extras]) -> np.ndarray:
        """Take note of what a worker has done; return which of these environments ended."""
        columns, rows = self.columns, _as_slice(ids)
        self.busy[rows] = False
        self.half[rows] = columns["half"][rows]
        reset = columns["did_reset"][rows]
        over = columns["terminated"][rows] | columns["truncated"][rows]
        self.ended[rows] = over & ~reset
        for key, values in self.known.items():
            values[rows] = columns[key][rows]
        if reset.any():
            fresh = ids[reset]
            columns["episode"][fresh] += 1
            columns["reseed"][fresh] = False
            for i in fresh.tolist():
                self.options.pop(i, None)
                self.final_texts[i] = self.texts[i]
        for i, extra in extras.items():
            self.extras[i] = extra
            if extra.text is not None:
                self.texts[i] = extra.text
        if self.killed[rows].any():  # with autoreset in the same step
            columns["truncated"][ids[self.killed[rows]]] = True
        self.finished.extend(ids.tolist())
        return ids[columns["episode_ended"][rows]]

    def settle_lost_step(self, i: int, mode: AutoresetMode) -> None:
        """Settle a step that died with its worker: truncated, at the last observation.

        In SAME_STEP the reset that belongs to it is still to be done: the environment stays busy.
        """
        columns, last, target = self.columns, self.half[i], 1 - self.half[i]
        self.killed[i] = self.restarted[i] = True
        same_step = mode == AutoresetMode.SAME_STEP
        prefix = "final_info" if same_step else "info"
        for key, values in self.known.items():
            columns[key.replace("info", prefix, 1)][i] = values[i]
        columns[f"{prefix}/success"][i] = columns[f"{prefix}/is_success"][i] = False
        columns[f"{prefix}/executed_steps"][i], columns[f"{prefix}/discount"][i] = 0, 1.0
        if same_step:
            for name in self.obs_columns:
                columns[f"final_{name}"][i] = columns[name][last, i]
            columns["op"][i] = RESET
            return
        for name in self.obs_columns:
            columns[name][target, i] = columns[name][last, i]
        columns["reward"][i], columns["terminated"][i], columns["truncated"][i] = 0.0, False, True
        columns["did_reset"][i] = columns["episode_ended"][i] = False
        self.finish(np.array([i]), {})

    def lose(self, block: np.ndarray, mode: AutoresetMode) -> np.ndarray:
        """Settle what environments lose with their worker; return those to be reset again."""
        if self.columns:
            self.columns["reseed"][block] = True
        busy, idle = block[self.busy[block]], block[~self.busy[block]]
        self.lost[idle[~self.ended[idle]]] = True
        self.restarted[busy] = True
        for i in busy.tolist():
            if self.columns["op"][i] == STEP:
                self.settle_lost_step(i, mode)
        return block[self.busy[block]]


def _as_slice(ids: np.ndarray) -> np.ndarray | slice:
    """Return ascending ids without a gap as a slice, which NumPy indexes several times as fast."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids
