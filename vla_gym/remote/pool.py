"""The parts of a vector environment as its workers: messages out, events in."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

import vla_gym
from vla_gym.errors import VlaGymError, WorkerError
from vla_gym.remote.links import Link, Wanted
from vla_gym.remote.messages import Answer
from vla_gym.remote.part import asset_digest
from vla_gym.remote.shards import Hosts
from vla_gym.vector.processes.interrupts import Interrupts
from vla_gym.vector.shared_memory import OF_RESETS, RESET, Layout, map_arrays
from vla_gym.vector.worker import Event, Failure, packed

_CLOSE_S = 5.0  # for a part to close its environments


class RemotePool:
    """Parts that run ``vla_gym.remote.part.Part``, as workers of one vector environment.

    A part that is lost, that does not answer in time or cannot be built is reported as a worker
    that failed, and placed again by :meth:`start`. One that is lost before it has answered once
    is placed again here, until ``start_timeout``, if its machine has died, since another may come,
    or if it was ended from outside, as often as the hosts say.

    Attributes:
        blocks: Environment ids of each part.
        wanted: What the next :meth:`poll` is for.
    """

    pids: tuple[int, ...] = ()

    def __init__(
        self,
        blocks: list[np.ndarray],
        builders: Sequence[Callable[[], Any]],
        hosts: Hosts,
        interrupts: Interrupts,
        *,
        assets: str | None,
        step_timeout: float,
        start_timeout: float,
    ) -> None:
        """Begin to place the parts; ``"ready"`` events tell when they are built.

        Args:
            blocks: Environment ids of each part.
            builders: A call of ``vla_gym.remote.part_env.build`` for each part.
            hosts: Where they are placed; closed with the pool.
            interrupts: Tells when a wait may be interrupted.
            assets: Name of the asset pack that every node must have as this machine has it.
            step_timeout: See :class:`LiberoVectorEnv`. A part watches its own workers; one that is
                silent for both timeouts together counts as lost.
            start_timeout: See there.
        """
        self.blocks = blocks
        self.wanted = Wanted()
        self._hosts, self._interrupts = hosts, interrupts
        self._start_timeout, self._limit = start_timeout, start_timeout + step_timeout
        self._columns: dict[str, np.ndarray] = {}
        self._links: dict[int, Link] = {}
        # Filled by the threads that receive.
        self._answers: queue.SimpleQueue[tuple[Link, Future[Answer]]] = queue.SimpleQueue()
        try:
            digest = asset_digest(assets)
            self._starts = [
                (vla_gym.__version__, assets, digest, packed(b, "The environments"))
                for b in builders
            ]
            for worker in range(len(blocks)):
                self.start(worker)
        except BaseException:
            self.close()
            raise

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Return the table, in memory of this process; parts have tables of their own."""
        del same_step
        self._columns = map_arrays(layout)
        return self._columns

    @property
    def places(self) -> tuple[str, ...]:
        """Where each part is."""
        return tuple(link.shard.place for _, link in sorted(self._links.items()))

    # Commands

    def start(self, worker: int) -> None:
        """Place a part, at first or after it was lost."""
        link = Link(worker, self._hosts.place(worker), self._start_timeout, self._answers)
        self._links[worker] = link
        link.send("start", self._starts[worker])

    def run(self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any]) -> None:
        """Have environments of a part do what their rows say, with reset options by id."""
        link, columns = self._links[worker], self._columns
        ops = columns["op"][ids]
        names = ("action", *OF_RESETS) if (ops == RESET).any() else ("action",)
        rows = {name: columns[name][ids] for name in names}
        own = {i: options[i] for i in ids.tolist() if i in options}
        link.send("run", (each, ids, own, ops, rows), ids)
        if each:
            link.going.update(ids.tolist())

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows; the results come as an event."""
        self._links[worker].send("call", (np.array(ids), method, arguments), ids)

    # Events

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds, or if nothing is under way."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            total = sum(len(link.going) for link in self._links.values())
            for link in self._links.values():
                if link.again_at is not None and time.monotonic() >= link.again_at:
                    link.go_on_with(self._hosts.place(link.worker))
                link.ask(self.wanted, total)
            busy = [link for link in self._links.values() if link.pending]
            if not busy and timeout is None:
                return []
            until = [link.again_at or link.since + link.limit for link in busy]
            pause = max(
                0.0, min([3600.0, end - time.monotonic(), *(at - time.monotonic() for at in until)])
            )
            events: list[Event] = []
            with contextlib.suppress(queue.Empty):
                events += self._take(*self._interrupts.wait(self._answers.get, timeout=pause))
                while True:
                    events += self._take(*self._answers.get_nowait())
            events += self._expired()
            if events or time.monotonic() >= end:
                return events

    def _expired(self) -> list[Event]:
        now = time.monotonic()
        late = [
            link for link in self._links.values() if link.pending and now >= link.since + link.limit
        ]
        return [self._fail(link, *self._why_late(link)) for link in late]

    def _why_late(self, link: Link) -> tuple[str, Exception | None]:
        if link.ready:
            return f"did not answer in {link.limit:g} s", None
        text = (
            f"The environments {self.blocks[link.worker].tolist()} have not come up in "
            f"{link.limit:g} s on {link.shard.place}.{link.obituary} See whether the "
            "machines are there ('ray status'), or give a longer start_timeout."
        )
        return "has not come up", WorkerError(text)

    def _take(self, link: Link, future: Future[Answer]) -> list[Event]:
        """Return the events of an answer."""
        given_up = link.again_at is not None or self._links.get(link.worker) is not link
        if given_up or future not in link.pending:
            return []
        try:
            events = future.result()
        except Exception as error:
            return self._lost(link, error)
        command, _, ids = link.pending.pop(future)
        if command == "start" and events[-1].kind == "raised":
            return [self._fail(link, "could not be built", events[-1].value)]
        link.ready, link.limit, link.since = True, self._limit, time.monotonic()
        return [self._noted(link, ids, event) for event in events]

    def _noted(self, link: Link, ids: Sequence[int] | np.ndarray, event: Event) -> Event:
        """Take note of an event of a command for environments; return it as of a worker."""
        value = event.value
        if event.kind == "done":
            self._write(event.ids, value.columns)
            self._write(value.final_ids, value.finals)
            value = value.extras
            link.going.difference_update(event.ids)
            if self.wanted.count is not None:
                self.wanted.count -= len(event.ids)
        elif event.kind == "raised":
            event = event._replace(ids=sorted({*map(int, ids), *event.ids}))
            link.going.difference_update(event.ids)
        elif event.kind == "value":
            value, columns = value
            self._write(ids, columns)
        return event._replace(worker=link.worker, value=value)

    def _write(self, ids: Sequence[int] | np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        columns, ids = self._columns, np.asarray(ids)
        for name, values in rows.items():
            if name == "obs" or name.startswith("obs/"):
                columns[name][columns["half"][ids], ids] = values
            else:
                columns[name][ids] = values

    def _lost(self, link: Link, error: Exception) -> list[Event]:
        text = str(error).strip()
        reason = f"is lost: {type(error).__name__}" + (f": {text}" if text else "")
        if link.ready or not self._hosts.passes(link.worker, error, link.losses):
            return [self._fail(link, reason, raised=not link.ready)]
        link.give_up(reason)
        return []

    def _fail(
        self, link: Link, reason: str, error: Exception | None = None, *, raised: bool = False
    ) -> Event:
        del self._links[link.worker]
        link.shard.kill()
        own = error if isinstance(error, VlaGymError) else None
        reason += f" (on {link.shard.place})" + ("" if error is None else f": {error}")
        failure = Failure(reason, own, raised or error is not None, link.ready, link.command)
        return Event("failed", link.worker, (), failure)

    def close(self) -> None:
        """End all parts: idle ones close their environments, others are killed."""
        if self._interrupts.in_fork:
            return  # the parts are not ours
        links, self._links = self._links, {}
        closing = []
        for link in links.values():
            if not link.pending:
                with contextlib.suppress(Exception):  # Ray may have been shut down
                    closing.append(link.shard.submit("close"))
        wait(closing, _CLOSE_S)
        for link in links.values():
            link.shard.kill()
        self._hosts.close()
        self._columns.clear()
