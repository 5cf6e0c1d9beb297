"""Collecting and learning at once: the loop that takes what a collector gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from vla_gym_trainers.td3.collector import Collector, Record

if TYPE_CHECKING:
    from vla_gym_trainers.td3.algorithm import TD3BC


class AsyncLoop:
    """Stores what the collector gives and does the gradient steps that it is worth.

    ``utd_ratio`` holds in both directions: the learner waits for chunks, the collector waits when
    it is ``max_ahead`` chunks ahead. So weights that act are never older than
    :attr:`staleness_bound` critic steps when their transition is stored.

    Attributes:
        max_staleness: Largest age of acting weights so far, in critic steps.
        max_ahead_seen: Largest lead of the collector so far, in chunks.
    """

    def __init__(
        self, model: TD3BC, callback: BaseCallback, total: int, log_interval: int | None
    ) -> None:
        """Prepare.

        Args:
            model: The algorithm, set up for learning.
            callback: SB3's; it is called in this thread, once a step as in SB3's own loop.
            total: Chunks at which to end.
            log_interval: Episodes between two logs.
        """
        assert model.env is not None
        self.model, self.callback, self.total = model, callback, total
        self.log_interval = log_interval
        self.num_envs = model.env.num_envs
        self.steps_a_block = int(model.train_freq.frequency)  # type: ignore[union-attr]
        self.collector = Collector(model, total, model.max_ahead)
        self.max_staleness = self.max_ahead_seen = 0
        self._unlearned, self._go_on = 0, True

    @property
    def staleness_bound(self) -> int:
        """Largest possible age of acting weights when their transition is stored."""
        chunks = self.model.max_ahead + self.steps_a_block * self.num_envs
        return int(np.ceil(self.model.utd_ratio * chunks)) + 1

    def run(self) -> None:
        """Collect and learn until ``total`` chunks, or until a callback stops it."""
        model = self.model
        try:
            with self.collector:
                model.loop = self
                while model.num_timesteps < self.total and self._go_on:
                    self.callback.on_rollout_start()
                    if not self._unlearned:  # else ``rest`` has taken them already
                        with model.clock("wait"):
                            records = self.collector.take(self.steps_a_block)
                        self._store(records)
                    self.callback.on_rollout_end()
                    self._learn()
        finally:
            model.loop = None
            self._store(self.collector.take_all())
            if model.num_timesteps > model.learning_starts:
                model.update_debt += self._unlearned * model.utd_ratio
            model.hand_over()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Keep the environments still, with all that they gave stored."""
        with self.collector.rest():
            self._store(self.collector.take_all())
            yield

    def _learn(self) -> None:
        model, chunks = self.model, self._unlearned
        self._unlearned = 0
        if model.num_timesteps > model.learning_starts:
            model.train(chunks, model.batch_size)
        self.collector.learned(model.num_timesteps)

    def _store(self, records: Sequence[Record]) -> None:
        model, callback, logger = self.model, self.callback, self.model.logger
        for record in records:
            model.num_timesteps += self.num_envs
            self._unlearned += self.num_envs
            callback.update_locals({**record._asdict(), "self": model})
            self._go_on &= callback.on_step()
            model._update_info_buffer(record.infos, record.dones)
            next_obs = _after(record)
            model.replay_buffer.add(
                record.obs, next_obs, record.action, record.rewards, record.dones, record.infos
            )
            model._update_current_progress_remaining(model.num_timesteps, self.total)
            staleness = model._n_updates - record.version
            ahead = self.collector.collected - self.collector.finished
            self.max_staleness = max(self.max_staleness, staleness)
            self.max_ahead_seen = max(self.max_ahead_seen, ahead)
            logger.record_mean("async/staleness", staleness)
            logger.record_mean("async/ahead", ahead)
            logger.record("async/staleness_max", self.max_staleness)
            for _ in np.flatnonzero(record.dones):
                model._episode_num += 1
                if self.log_interval and model._episode_num % self.log_interval == 0:
                    model.dump_logs()


def _after(record: Record) -> dict[str, np.ndarray]:
    """Return the observations after the chunks, of the same episodes."""
    ended = [
        (i, info["terminal_observation"])
        for i, (done, info) in enumerate(zip(record.dones, record.infos, strict=True))
        if done and info.get("terminal_observation") is not None
    ]
    if not ended:
        return record.new_obs
    after = {key: value.copy() for key, value in record.new_obs.items()}
    for i, terminal in ended:
        for key, value in after.items():
            value[i] = terminal[key]
    return after
