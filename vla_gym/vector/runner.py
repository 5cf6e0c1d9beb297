"""Who does what, and what became of it: the state of every environment of a vector environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.errors import WorkerError
from vla_gym.vector.pool import Event, Pool
from vla_gym.vector.restarts import Restarts
from vla_gym.vector.shared_memory import RESET, STEP, TEXT_INFO
from vla_gym.vector.worker import EnvSpaces, Extras

# Remembered of the last whole observation, for the infos of a step that a dead worker took away.
_REMEMBERED = (
    "info_set",
    "info/elapsed_steps",
    "info/task_id",
    "info/init_state_id",
    "info/variation",
)


class Runner(Restarts):
    """Drives a pool of workers over the rows of the shared table.

    Attributes:
        table: The shared arrays, see ``shared_memory.table_layout``.
        half: (N,) which half of the double buffer holds the current observation.
        busy: (N,) a command is under way.
        ended: (N,) a reset is due.
        killed: (N,) the last command was a step that died with its worker.
        restarted: (N,) the worker was restarted during the last command.
        texts, final_texts: Instruction of the current, and of the just ended episode.
        extras: Infos that are not in the table, by environment, of the last command.
        finished: Environments whose command is done and not collected yet, in order.
        seeds, next_episode: (N,) which episode an environment plays next.
        broken: Why nothing works any more, or None.
        restart, max_restarts: As given.
        failures: (workers,) failures since an episode of the worker's environments ended.
        lost: (N,) the episode died with its worker between two commands.
        known: Infos of the last whole observation, by column of the table.
        obs_columns: Columns of the table that hold observations.
        ready: Spaces by worker, of those whose environments are built.
        values: Results of a call by worker.
    """

    def __init__(
        self,
        pool: Pool,
        blocks: Sequence[np.ndarray],
        mode: AutoresetMode,
        *,
        restart: bool,
        max_restarts: int,
    ) -> None:
        """Take over a pool.

        Args:
            pool: The workers.
            blocks: Environment ids of each worker.
            mode: Autoreset mode.
            restart: Whether failed workers are restarted.
            max_restarts: Failures of a worker in which none of its episodes ends, before giving up.
        """
        self.pool, self.blocks, self.mode = pool, list(blocks), mode
        self.table: dict[str, np.ndarray] = {}
        self.restart, self.max_restarts = restart, max_restarts
        n = sum(len(block) for block in blocks)
        self.everyone = np.arange(n)
        self.worker_of = np.concatenate([np.full(len(b), w) for w, b in enumerate(blocks)])
        self.half = np.zeros(n, np.int8)
        self.busy, self.ended = np.zeros(n, bool), np.ones(n, bool)
        self.killed, self.restarted = np.zeros(n, bool), np.zeros(n, bool)
        self.lost = np.zeros(n, bool)
        self.seeds, self.next_episode = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.texts: list[str | None] = [None] * n
        self.final_texts: list[str | None] = [None] * n
        self.extras: dict[int, Extras] = {}
        self.finished: list[int] = []
        self.broken: str | None = None
        self._each = np.zeros(n, bool)
        self._options: dict[int, dict[str, Any]] = {}
        self.failures = np.zeros(len(blocks), np.int64)
        self.known: dict[str, np.ndarray] = {}
        self.values: dict[int, Any] = {}
        self.ready: dict[int, EnvSpaces] = {}
        self.obs_columns: list[str] = []

    def attach(self, table: dict[str, np.ndarray]) -> None:
        """Take over the shared table, which must be there before the first command."""
        self.table = table
        self.known = {key: np.zeros_like(table[key]) for key in _REMEMBERED}
        self.obs_columns = [name for name in table if name.startswith("obs")]

    def seed(self, ids: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode count of environments again, from new seeds."""
        self.seeds[ids], self.next_episode[ids] = seeds, 0
        self.table["seed"][ids], self.table["episode"][ids] = seeds, 0
        self.table["reseed"][ids], self.table["plays_as"][ids] = True, ids

    def restore(
        self,
        i: int,
        seed: int,
        next_episode: int,
        plays_as: int,
        *,
        ended: bool,
        infos: Mapping[str, Any],
    ) -> None:
        """Put an environment's episode count, and the infos known of it, where a state had them."""
        self.table["plays_as"][i] = plays_as
        self.seeds[i] = self.table["seed"][i] = seed
        self.next_episode[i] = self.table["episode"][i] = next_episode
        self.table["reseed"][i] = False
        self.ended[i], self.lost[i] = ended, False
        for key, values in self.known.items():
            values[i] = infos.get(key, 0)
        self.texts[i] = infos.get(TEXT_INFO)

    def known_infos(self, i: int) -> dict[str, Any]:
        """Return what is remembered of the infos of an environment, for :meth:`restore`."""
        return {key: values[i].tolist() for key, values in self.known.items()} | {
            TEXT_INFO: self.texts[i]
        }

    def reset(
        self, ids: np.ndarray, options: Mapping[int, dict[str, Any]], *, each: bool = False
    ) -> None:
        """Have environments reset."""
        self._options |= options
        self.lost[ids] = False
        self._launch(ids, np.full(len(ids), RESET, np.int8), each)

    def step(self, ids: np.ndarray, *, each: bool = False) -> None:
        """Have environments execute their action, or reset where the last episode is over."""
        self._launch(ids, np.where(self.ended[ids], RESET, STEP).astype(np.int8), each)

    def _launch(self, ids: np.ndarray, ops: np.ndarray, each: bool) -> None:
        table = self.table
        self.killed[ids] = self.restarted[ids] = False
        self.busy[ids], self._each[ids] = True, each
        table["op"][ids], table["half"][ids] = ops, 1 - self.half[ids]
        if self.extras:
            for i in ids.tolist():
                self.extras.pop(i, None)
        if self.lost.any():
            for i in ids[self.lost[ids]].tolist():
                self.lost[i], self.restarted[i] = False, True
                self._settle_lost_step(i)
            ids = ids[self.busy[ids]]
        self.dispatch(ids)

    def dispatch(self, ids: np.ndarray) -> None:
        """Tell workers to do what the rows of environments say."""
        if len(ids) == len(self.busy):
            blocks = list(enumerate(self.blocks))
        else:
            workers = self.worker_of[ids]
            blocks = [(w, ids[workers == w]) for w in np.unique(workers).tolist()]
        options = {i: self._options[i] for i in ids.tolist() if i in self._options}
        try:
            for worker, block in blocks:
                self.pool.run(worker, block, each=bool(self._each[block[0]]), options=options)
        except BaseException:
            self.give_up(ids)
            raise

    def give_up(self, ids: np.ndarray) -> None:
        """Forget commands whose outcome is unknown; a reset is due."""
        self.busy[ids], self.ended[ids] = False, True

    def wait(self, enough: Callable[[], bool], timeout: float | None = None) -> None:
        """Handle events until there are enough.

        Raises:
            TimeoutError: After ``timeout`` seconds; what is under way goes on.
            WorkerError: A worker failed for good.
            VlaGymError: One that an environment raised.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not enough():
            left = None if end is None else max(0.0, end - time.monotonic())
            events = self.pool.poll(left)
            if not events and timeout is None:
                self.broken = "A worker's answer was lost."
                raise WorkerError(self.broken)
            if not events:
                raise TimeoutError(f"Not done after {timeout} s; call again to wait on.")
            error: Exception | None = None
            for event in events:
                error = self._handle(event) or error
            if error is not None:
                raise error

    def wait_ready(self) -> list[EnvSpaces]:
        """Wait until every worker has built its environments; return the spaces of each.

        Raises:
            WorkerError: If environments can't be built.
        """
        self.wait(lambda: len(self.ready) == len(self.blocks))
        return [self.ready[worker] for worker in range(len(self.blocks))]

    def idle(self) -> bool:
        """Tell whether no command is under way."""
        return not self.busy.any()

    def call(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> list[Any]:
        """Call a method of the rows of idle environments.

        Args:
            calls: Arguments by environment.
            method: Name of the method of ``EnvRow``.

        Raises:
            WorkerError: If a worker died over it.
            Exception: What the method raised.
        """
        ids = np.array(list(calls), np.int64)
        workers = np.unique(self.worker_of[ids]).tolist()
        asked: dict[int, list[int]] = {}
        self.values.clear()
        for worker in workers:
            asked[worker] = ids[self.worker_of[ids] == worker].tolist()
            self.pool.call(worker, asked[worker], method, [calls[i] for i in asked[worker]])
        self.wait(lambda: all(worker in self.values for worker in workers))
        results: dict[int, Any] = {}
        for worker in workers:
            value = self.values.pop(worker)
            if isinstance(value, Exception):
                raise value
            results.update(zip(asked[worker], value, strict=True))
        return [results[i] for i in ids.tolist()]

    def _handle(self, event: Event) -> Exception | None:
        if event.kind == "done":
            self.finish(event.ids, event.value)
        elif event.kind == "ready":
            self.ready[event.worker] = event.value
        elif event.kind == "value":
            self.values[event.worker] = event.value
        elif event.kind == "raised":
            if not self.busy[event.ids].any():  # a call, not a step or reset
                self.values[event.worker] = event.value
                return None
            self.give_up(event.ids)
            error: Exception = event.value
            return error
        elif event.kind == "failed":
            return self._recover(event.worker, event.value)
        return None

    def finish(self, ids: np.ndarray, extras: Mapping[int, Extras]) -> None:
        """Take note of what a worker has done."""
        table, rows = self.table, _as_slice(ids)
        self.busy[rows] = False
        self.half[rows] = table["half"][rows]
        reset = table["did_reset"][rows]
        over = table["terminated"][rows] | table["truncated"][rows]
        self.ended[rows] = over & ~reset
        for key, values in self.known.items():
            values[rows] = table[key][rows]
        if reset.any():
            fresh = ids[reset]
            self.next_episode[fresh] += 1
            table["episode"][fresh] = self.next_episode[fresh]
            table["reseed"][fresh] = False
            for i in fresh.tolist():
                self._options.pop(i, None)
                self.final_texts[i] = self.texts[i]
        if table["episode_ended"][rows].any():
            self.failures[self.worker_of[ids[table["episode_ended"][rows]]]] = 0
        for i, extra in extras.items():
            self.extras[i] = extra
            if extra.text is not None:
                self.texts[i] = extra.text
        if self.killed[rows].any():  # with autoreset in the same step
            table["truncated"][ids[self.killed[rows]]] = True
        self.finished.extend(ids.tolist())


def _as_slice(ids: np.ndarray) -> np.ndarray | slice:
    """Return ascending ids without a gap as a slice, which NumPy indexes several times as fast."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids
