"""What environments do in their workers beside playing: the expert acts, goals are watched."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.scene_cache import load_task
from vla_gym.suites import get_suite
from vla_gym.suites.libero import Predicate, TaskModel, evaluate_goal


class ExpertActs(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """The scripted expert acts, control step by control step; the values of actions are ignored."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode, with an expert of its own."""
        from vla_gym.experts import make_expert

        obs, info = self.env.reset(seed=seed, options=options)
        base = cast(LiberoEnv, self.unwrapped)
        expert = make_expert(base.sim)
        base.replace_action = lambda _: expert.act()
        return obs, info


class WatchGoals(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Finds which of a scene's tasks is the first whose goal becomes true in an episode.

    At the end of an episode info holds its ``achieved`` (task) and ``achieved_step`` (control
    step), -1 each if no goal became true. Goals that hold at the reset are left out.
    """

    def __init__(self, env: gym.Env[dict[str, Any], np.ndarray]) -> None:
        super().__init__(env)
        cast(LiberoEnv, env.unwrapped).on_control_step.append(self.watch)
        self._goals: dict[str, dict[int, tuple[Predicate, ...]]] = {}
        self._open: dict[int, tuple[Predicate, ...]] = {}
        self._first = (-1, -1)

    def watch(self, env: LiberoEnv, info: dict[str, Any]) -> None:
        """Test the goals; called at each reset and after each control step."""
        if info["elapsed_steps"] == 0:
            self._begin(env, info)
        elif self._first[0] < 0:
            for task_id, goal in self._open.items():
                if evaluate_goal(goal, env.sim.data):
                    self._first = task_id, int(info["elapsed_steps"])
                    return

    def _begin(self, env: LiberoEnv, info: dict[str, Any]) -> None:
        own, scene = env.task_model.task, env.task_model.scene_key
        if scene not in self._goals:
            self._goals[scene] = {
                task_id: tuple(model.goal)
                for task_id, task in enumerate(get_suite(env.suite).tasks)
                if task.scene_name == own.scene_name
                and isinstance(model := load_task(task, env.assets), TaskModel)
            }
        # The task's own goal first: it wins if two become true in one control step.
        goals = sorted(self._goals[scene].items(), key=lambda item: item[0] != info["task_id"])
        self._open = {
            task_id: goal for task_id, goal in goals if not evaluate_goal(goal, env.sim.data)
        }
        self._first = -1, -1

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Step; at the end of the episode, say what was achieved."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info["achieved"], info["achieved_step"] = self._first
        return obs, reward, terminated, truncated, info
