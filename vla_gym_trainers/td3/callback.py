"""What a training run does beside learning: progress, evaluation, checkpoints, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from vla_gym_trainers.rollout.reward_terms import reward_metrics
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.checkpoint import save_checkpoint
from vla_gym_trainers.td3.closed_loop import BestModel
from vla_gym_trainers.td3.episode_log import EpisodeLog, counts


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
        run: Run,
        best: BestModel | None = None,
        film: Callable[[TD3BC, Path], None] | None = None,
    ) -> None:
        """Watch a run; ``best`` evaluates and keeps a policy, ``film`` films one, if given."""
        super().__init__()
        self.run, self.best, self.film = run, best, film
        self.episodes = EpisodeLog()
        self.env_steps = 0
        #: Chunks at the newest checkpoint; None before the first.
        self.saved_at = None if run.checkpoint is None else run.checkpoint.step

    def _on_rollout_start(self) -> None:
        done = self.model.num_timesteps
        if self.best is not None and self.best.is_due(done):
            self.best.begin(self.model, done)
        self.log_evaluation()
        if self.film is not None:
            self.run.film_if_due(self.episodes.total, partial(self.film, self.model))
        if self.run.is_checkpoint_due(done):
            self.save()
        if self.run.is_late or self.run.stop.is_made:
            raise StopRun

    def _on_training_end(self) -> None:
        self.log_evaluation(wait=True)  # while one is under way, none is due
        self._on_rollout_start()  # what the last block made due

    def log_evaluation(self, wait: bool = False) -> None:
        """Log the evaluation that is under way, if it has ended or ``wait`` says to wait for it."""
        metrics = {} if self.best is None else self.best.poll(wait)
        for key, value in metrics.items():
            self.logger.record(key, value)
        if metrics:
            self.logger.dump(self.model.num_timesteps)

    def save(self) -> None:
        """Write a checkpoint; call it between two rollouts only."""
        self.log_evaluation(wait=True)
        model = self.model
        with nullcontext() if model.pipeline is None else model.pipeline.paused():
            done = model.num_timesteps
            figures = {  # to look at
                "chunks": done,
                "critic_steps": model._n_updates,
                "episodes": model._episode_num,
                "transitions": model.replay_buffer.size(),
            }
            with self.run.new_checkpoint(done, figures) as folder:
                save_checkpoint(folder, model, self.state())
        self.saved_at = done

    def _on_step(self) -> bool:
        is_warm_up = not self.locals["by_actor"]
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            self.env_steps += int(info.get("executed_steps", 0))
            for key, value in reward_metrics(info.get("reward_terms", {})).items():
                self.logger.record_mean(key, value)
            if done and counts(info):
                success = bool(info.get("is_success", False))
                self.episodes.add(int(info.get("task_id", 0)), success, is_warm_up)
        self.logger.record("time/total_env_steps", self.env_steps)
        phase = "warm-up" if is_warm_up else "TD3+BC"
        self.run.show(self.num_timesteps, self.episodes.recent_success(), phase)
        return True

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "best": None if self.best is None else self.best.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.episodes, self.env_steps = state["episodes"], state["env_steps"]
        if self.best is not None and state["best"] is not None:
            self.best.restore(state["best"])

    def summary(self, model: TD3BC) -> dict[str, Any]:
        """Return counts and rates of the training episodes (played with exploration noise)."""
        summary: dict[str, Any] = {
            "chunks": model.num_timesteps,
            "env_steps": self.env_steps,
            "critic_steps": model._n_updates,
            **self.run.throughput(model.num_timesteps),
            **self.episodes.summary(),
        }
        if self.best is not None:
            summary["closed_loop"] = self.best.state()
        return summary
