"""Where rollouts come from: collected now, or while the rollout before is learnt from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from vla_gym.errors import ConfigError, WorkerError
from vla_gym_trainers.on_policy.collector import Actor, Collector
from vla_gym_trainers.on_policy.policy import TokenPolicy
from vla_gym_trainers.on_policy.rollout import Rollout

DEADLINE_SECONDS = 6 * 3600.0  # of one rollout


@dataclass(frozen=True)
class Order:
    """What to collect.

    Attributes:
        seed: Of layouts and draws.
        version: Of the parameters that act.
        make_actor: Wraps the policy that acts.
    """

    seed: int
    version: int
    make_actor: Callable[[TokenPolicy], Actor]


class RolloutSource:
    """Hands out rollouts; see :meth:`collect`, or :meth:`start` and :meth:`take`.

    Asynchronous use: the rollout that :meth:`start` begins is played by a copy of the policy as it
    was at that moment, into the buffer that was not handed out last, in a thread that alone
    touches collector and environments. So nothing that is learnt from is written to, nothing that
    acts is changed, and every rollout is handed out exactly once. If ``start`` is called before
    each update and ``take`` after it, rollouts are stale by one update.
    """

    def __init__(
        self,
        collector: Collector,
        policy: TokenPolicy,
        *,
        asynchronous: bool = False,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        """Take the memory of one rollout, or two.

        Args:
            collector: Used by nobody else.
            policy: The one that learns.
            asynchronous: Whether :meth:`start` is going to be used.
            deadline: Seconds that a rollout may take.
        """
        self._collector, self._policy = collector, policy
        self._deadline = deadline
        self._behaviour = policy.twin() if asynchronous else policy
        count = 2 if asynchronous else 1
        self._buffers = [Rollout.empty(collector.shape) for _ in range(count)]
        self._turn = 0
        # One thread for all collections: a renderer belongs to the thread that made it.
        self._pool = ThreadPoolExecutor(1, "collector") if asynchronous else None
        self._pending: Future[Rollout] | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether rollouts may be started ahead."""
        return self._pool is not None

    @property
    def is_pending(self) -> bool:
        """Whether a rollout was started and not taken yet."""
        return self._pending is not None

    def collect(self, order: Order) -> Rollout:
        """Collect with the parameters of now, and wait for it.

        The rollout before is overwritten unless the source is asynchronous.
        """
        if self._pool is not None:
            self.start(order)
            return self.take()
        actor = order.make_actor(self._policy)
        out = self._buffers[0]
        return self._collector.collect(actor, out, seed=order.seed, version=order.version)

    def start(self, order: Order) -> None:
        """Begin a rollout with the parameters of now; learning may go on.

        Raises:
            ConfigError: If the source is not asynchronous, or a rollout was not taken.
        """
        if self._pool is None:
            raise ConfigError("start() needs an asynchronous source.")
        if self._pending is not None:
            raise ConfigError("The rollout before has not been taken.")
        self._behaviour.follow(self._policy)  # nobody acts at this moment
        self._turn = 1 - self._turn
        actor, out = order.make_actor(self._behaviour), self._buffers[self._turn]
        self._pending = self._pool.submit(
            self._collector.collect, actor, out, seed=order.seed, version=order.version
        )

    def take(self) -> Rollout:
        """Wait for the rollout that was started; it stays as it is until the next but one start.

        Raises:
            ConfigError: If none was started.
            WorkerError: If it takes longer than the deadline.
        """
        if self._pending is None:
            raise ConfigError("take() needs a start() before it.")
        pending, self._pending = self._pending, None
        try:
            return pending.result(self._deadline)
        except FutureTimeoutError as error:
            if pending.done():  # raised by what was run
                raise
            self._pending = pending
            raise WorkerError(
                f"A rollout took longer than {self._deadline:.0f} seconds."
            ) from error

    def restart(self) -> None:
        """Let the next rollout begin new episodes everywhere.

        Raises:
            ConfigError: If one is under way.
        """
        if self._pending is not None:
            raise ConfigError("A rollout is under way.")
        self._collector.restart()

    def close(self) -> None:
        """Wait for what is under way, as long as the deadline allows; drop it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.exception(self._deadline)
            except FutureTimeoutError:
                pass
        if self._pool is not None:
            self._pool.shutdown(wait=pending is None or pending.done())
