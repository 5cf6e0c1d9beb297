"""What a training run does beside learning: progress, checkpoints, limits, statistics."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from vla_gym_trainers.td3bc import TD3BC

if TYPE_CHECKING:
    from vla_gym_trainers.train_td3 import TD3Config


class RunCallback(BaseCallback):
    """Progress bar with the success rate, checkpoints, wall-time limit, training statistics."""

    def __init__(self, config: TD3Config, run_dir: Path) -> None:
        """Watch a run.

        Args:
            config: The run's settings.
            run_dir: Where checkpoints go.
        """
        super().__init__()
        self.config, self.run_dir = config, run_dir
        self.recent: deque[bool] = deque(maxlen=50)
        self.warmup: list[bool] = []
        self.trained: list[bool] = []
        self.next_checkpoint = config.checkpoint_every
        self.bar: Any = None

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()
        if self.config.progress:
            from tqdm import tqdm

            self.bar = tqdm(total=self.config.total_chunks, desc="warm-up", unit="chunk")

    def _on_step(self) -> bool:
        is_warm_up = self.num_timesteps <= self.config.learning_starts
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                success = bool(info.get("is_success", False))
                self.recent.append(success)
                (self.warmup if is_warm_up else self.trained).append(success)
        if self.bar is not None:
            self._show(is_warm_up)
        # By threshold, not modulo: several environments step at once.
        if self.num_timesteps >= self.next_checkpoint:
            self.next_checkpoint += self.config.checkpoint_every
            assert isinstance(self.model, TD3BC)
            self.model.save(self.run_dir / "checkpoints" / f"chunk_{self.num_timesteps}.zip")
        limit = self.config.max_minutes
        return limit is None or time.perf_counter() - self.started < 60 * limit

    def _show(self, is_warm_up: bool) -> None:
        self.bar.update(self.num_timesteps - self.bar.n)
        if self.recent and self.num_timesteps % 20 == 0:
            self.bar.set_description("warm-up" if is_warm_up else "TD3+BC", refresh=False)
            rate = f"{np.mean(self.recent):.2f} (last {len(self.recent)}, with noise)"
            self.bar.set_postfix(success=rate, refresh=False)

    def _on_training_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def summary(self, model: TD3BC, minutes: float) -> dict[str, Any]:
        """Return counts and rates of the training episodes (played with exploration noise)."""

        def rate(values: list[bool]) -> float | None:
            return float(np.mean(values)) if values else None

        return {
            "chunks": model.num_timesteps,
            "critic_steps": model._n_updates,
            "minutes": round(minutes, 3),
            "chunks_per_second": round(model.num_timesteps / max(60 * minutes, 1e-9), 2),
            "warmup_episodes": len(self.warmup),
            "warmup_success": rate(self.warmup),
            "episodes": len(self.trained),
            "success_by_100_episodes": [
                rate(self.trained[i : i + 100]) for i in range(0, len(self.trained), 100)
            ],
        }
