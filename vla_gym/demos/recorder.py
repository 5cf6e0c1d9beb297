"""Records, in a worker of the vector environment, noisy episodes of who acts there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.demos.config import DemosConfig
from vla_gym.demos.files import part_path, parts_folder, write_part
from vla_gym.envs.scene_cache import SceneCache
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.rollout.player import SCENES
from vla_gym.suites import get_suite

# Frames recorded after the goal is reached: the policy also sees how a finished task looks.
SUCCESS_TAIL = 4


class DemoRecorder(NoisyEpisodes):
    """Writes every episode that reaches the goal to a part file of its task.

    The episodes' numbers are those of the attempts.
    """

    def __init__(self, env: gym.Env[dict[str, Any], np.ndarray], *, config: DemosConfig) -> None:
        super().__init__(env, seed=config.seed, noise=config.noise, expert=config.vla is None)
        self._output, self._size = Path(config.output).expanduser(), config.image_size
        # Its physics is not used: this cache only keeps renderers.
        self._scenes = SceneCache(image_size=self._size, visual_profile=None, max_scenes=SCENES)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start attempt number ``seed`` of the task that the options name."""
        obs, info = super().reset(seed=seed, options=options)
        self._number = seed
        self._frames: dict[str, list[np.ndarray]] = {}
        self._snapshot = self._base.sim.get_state()
        return obs, info

    def on_action(self, action: np.ndarray, executed: np.ndarray) -> None:
        """Keep the frame before a control step."""
        sim = self._base.sim
        cameras = tuple(get_suite(self._base.suite).cameras.values())
        images = np.empty((len(cameras), self._size, self._size, 3), np.uint8)
        self._scenes.render(sim, images, cameras)
        _, quat, qpos, _ = sim.observed_robot()
        frame = {
            "images": images,
            "proprio": sim.proprio(),
            "actions": action,
            "executed_actions": executed,
            "states": np.concatenate([[sim.data.time], sim.qpos, sim.qvel]),
            "joints": qpos[sim.task_model.robot.joint_qpos],
            "eef_quat": np.roll(quat, -1),
        }
        for name, value in frame.items():
            self._frames.setdefault(name, []).append(value)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Step; a success is recorded a few frames further, within the limit, and written."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated:
            base, elapsed = self._base, int(info["elapsed_steps"])
            limit = base.max_control_steps or base.task_model.task.max_control_steps
            for _ in range(min(SUCCESS_TAIL, limit - elapsed)):
                base.sim.step(self.choose(action[int(info["executed_steps"]) - 1]))
            self._write(elapsed - 1)
        return obs, reward, terminated, truncated, info

    def _write(self, success_step: int) -> None:
        frames = {name: np.stack(values) for name, values in self._frames.items()}
        for name in ("actions", "executed_actions"):
            frames[name] = frames[name].astype(np.float32)
        sim = self._base.sim
        attributes = {
            "success_step": success_step,
            "fixtures": json.dumps(sim.task_model.fixtures),
            "fixture_pos": self._snapshot.fixture_pos,
            "fixture_quat": self._snapshot.fixture_quat,
        }
        if sim.variation is not None:
            attributes["variation"] = sim.variation
        assert self._number is not None
        folder = parts_folder(self._output, sim.task_model.task)
        write_part(part_path(folder, self._number), frames, attributes)

    def close(self) -> None:
        """Free the renderers too."""
        self._scenes.close()
        super().close()
