"""What a training run does beside learning: progress, evaluation, checkpoints, limits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from vla_gym_trainers.runs.checkpoint import save_checkpoint
from vla_gym_trainers.runs.closed_loop import BestModel
from vla_gym_trainers.runs.episode_log import EpisodeLog
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.stopping import StopRequest
from vla_gym_trainers.td3.algorithm import TD3BC

if TYPE_CHECKING:
    from vla_gym_trainers.td3.config import TD3RunConfig


class StopRun(Exception):  # noqa: N818  (no error)
    """Ends ``learn`` between two rollouts, where a checkpoint is whole."""


class RunCallback(BaseCallback):
    """Progress bar with the success rate, evaluation, checkpoints, wall-time limit, statistics.

    All but counting happens between two rollouts: the state is whole there, so a checkpoint is
    where a resumed run goes on exactly.
    """

    model: TD3BC

    def __init__(
        self,
        config: TD3RunConfig,
        run: RunDir,
        best: BestModel | None = None,
        request: StopRequest | None = None,
    ) -> None:
        """Watch a run.

        Args:
            config: The run's settings.
            run: Where checkpoints go.
            best: Evaluates and keeps the best policy; None for neither.
            request: Ends the run between two rollouts once it is made.
        """
        super().__init__()
        self.request = request or StopRequest()
        self.config, self.run, self.best = config, run, best
        self.recent: deque[bool] = deque(maxlen=50)
        self.episodes = EpisodeLog()
        self.env_steps = 0
        self.next_checkpoint = config.checkpoint_every
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        self.bar: Any = None

    @property
    def seconds(self) -> float:
        """Seconds of this run so far, those before it was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()
        if self.config.progress:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.config.total_timesteps,
                initial=self.num_timesteps,
                desc="warm-up",
                unit="chunk",
            )

    def _on_rollout_start(self) -> None:
        done = self.model.num_timesteps
        if self.best is not None and self.best.is_due(done):
            self.best.begin(self.model, done)
        self._log_evaluation()
        # By threshold, not modulo: several environments step at once.
        if done >= self.next_checkpoint:
            self.save()
        limit = self.config.max_minutes
        if self.request.is_made or (limit is not None and self.seconds >= 60 * limit):
            raise StopRun

    def _log_evaluation(self, wait: bool = False) -> None:
        metrics = {} if self.best is None else self.best.poll(wait)
        for key, value in metrics.items():
            self.logger.record(key, value)
        if metrics:
            self.logger.dump(self.model.num_timesteps)

    def save(self) -> None:
        """Write a checkpoint; call it between two rollouts only."""
        self._log_evaluation(wait=True)
        with self.model.paused():
            done = self.model.num_timesteps
            while self.next_checkpoint <= done:
                self.next_checkpoint += self.config.checkpoint_every
            with self.run.new_checkpoint(done, self.config.keep_checkpoints) as folder:
                save_checkpoint(folder, self.model, self.state())

    def _on_step(self) -> bool:
        is_warm_up = self.num_timesteps <= self.config.learning_starts
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            self.env_steps += int(info.get("executed_steps", 0))
            if done and not info.get("worker_restarted", False):
                success = bool(info.get("is_success", False))
                self.recent.append(success)
                self.episodes.add(int(info.get("task_id", 0)), success, is_warm_up)
        self.logger.record("time/total_env_steps", self.env_steps)
        if self.bar is not None:
            self._show(is_warm_up)
        return True

    def _show(self, is_warm_up: bool) -> None:
        before = self.bar.n
        self.bar.update(self.num_timesteps - before)
        if self.recent and self.num_timesteps // 20 > before // 20:
            self.bar.set_description("warm-up" if is_warm_up else "TD3+BC", refresh=False)
            rate = f"{np.mean(self.recent):.2f} (last {len(self.recent)}, with noise)"
            self.bar.set_postfix(success=rate, refresh=False)

    def _on_training_end(self) -> None:
        self.finish()
        self.close()

    def finish(self) -> None:
        """Log the evaluation that is under way, if any."""
        self._log_evaluation(wait=True)

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, the logger's state included."""
        logger = self.logger
        return {
            "recent": list(self.recent),
            "episodes": self.episodes.state(),
            "env_steps": self.env_steps,
            "next_checkpoint": self.next_checkpoint,
            "seconds": self.seconds,
            "best": None if self.best is None else self.best.state(),
            "logger": logger.state(self.num_timesteps) if isinstance(logger, RunLogger) else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned (the logger's is restored where it is made)."""
        self.recent.extend(state["recent"])
        self.episodes.restore(state["episodes"])
        self.env_steps = state["env_steps"]
        self.next_checkpoint, self.seconds_before = state["next_checkpoint"], state["seconds"]
        if self.best is not None and state["best"] is not None:
            self.best.restore(state["best"])

    def summary(self, model: TD3BC) -> dict[str, Any]:
        """Return counts and rates of the training episodes (played with exploration noise)."""
        minutes = self.seconds / 60
        summary: dict[str, Any] = {
            "chunks": model.num_timesteps,
            "env_steps": self.env_steps,
            "critic_steps": model._n_updates,
            "minutes": round(minutes, 3),
            "chunks_per_second": round(model.num_timesteps / max(60 * minutes, 1e-9), 2),
            **self.episodes.summary(),
        }
        if self.best is not None:
            summary["closed_loop"] = self.best.state()
        return summary
