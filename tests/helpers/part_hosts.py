"""Machines of this process that can be lost: ``ThreadHosts`` whose parts a test can cut off."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vla_gym.remote.part import Part
from vla_gym.remote.shards import ThreadHosts


class LostPart(Exception):
    """What a future raises when its machine is gone."""


class BreakableShard(Part):
    """A part whose answers stop coming."""

    place = "a thread"

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self.silent = False
        self.open: list[Future[Any]] = []

    def submit(self, command: str, *arguments: Any) -> Future[Any]:
        outer: Future[Any] = Future()
        self.open.append(outer)
        if self.lost:
            outer.set_exception(LostPart("gone"))
            return outer

        def deliver(inner: Future[Any]) -> None:
            if not (self.lost or self.silent or outer.done()):
                outer.set_result(inner.result())

        super().submit(command, *arguments).add_done_callback(deliver)
        return outer

    def kill(self) -> None:
        """Also if the part is lost: its thread must not stay."""
        super().submit("close")

    def lose(self) -> None:
        """Cut the part off: nothing that it says arrives any more."""
        self.lost = True
        for future in self.open:
            if not future.done():
                future.set_exception(LostPart("gone"))


class BreakableHosts(ThreadHosts):
    """Keeps the shards in the order of their placement; can refuse some placements."""

    def __init__(self, count: int = 3) -> None:
        super().__init__(count)
        self.shards: dict[int, BreakableShard] = {}
        self.placed: list[int] = []
        self.dead_on_arrival = 0  # so many of the next placements are lost before they come up
        self.closed = 0

    def place(self, part: int) -> BreakableShard:
        shard = self.shards[part] = BreakableShard()
        self.placed.append(part)
        if self.dead_on_arrival:
            self.dead_on_arrival -= 1
            shard.lose()
        return shard

    def passes(self, part: int, error: BaseException, losses: int) -> bool:
        del losses
        return part in self.shards and isinstance(error, LostPart)

    def close(self) -> None:
        self.closed += 1
