"""An environment of an evaluation, as it runs in its worker: a chunk, control step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.observation import Observer
from vla_gym.envs.scene_cache import SceneCache, load_task
from vla_gym.suites import get_suite, suite_tasks
from vla_gym.suites.libero import Predicate, evaluate_goal

if TYPE_CHECKING:
    from vla_gym.experts import Expert
    from vla_gym.sim import LiberoSim

_Obs = dict[str, Any]
# Scenes whose renderer stays open. Episodes come task by task, so two are enough; with LIBERO's
# meshes each takes half a gigabyte on a software renderer.
SCENES = 2


class EvalEnv(gym.Wrapper[_Obs, np.ndarray, _Obs, np.ndarray]):
    """Executes a chunk per ``step`` over a ``LiberoEnv`` of single control steps without cameras.

    What happens is what ``LiberoEnv(chunk_len=C)`` does: a chunk ends at success, limit or its
    last row, and the cameras are drawn once, at its end. Going through it row by row allows to
    look at every control step.

    At the end of an episode that is watched, info holds ``achieved`` and ``achieved_step``, see
    :class:`GoalWatch` (-1 each if there is none).
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        chunk_len: int,
        cameras: Sequence[str] = (),
        image_size: int = 128,
        expert: bool = False,
        watch_goals: bool = False,
        on_step: Callable[[LiberoEnv, dict[str, Any], bool], None] | None = None,
    ) -> None:
        """Wrap an environment.

        Args:
            env: A ``LiberoEnv`` with ``cameras=()`` and ``chunk_len=None``.
            chunk_len: Rows of an action.
            cameras: What to observe.
            image_size: In pixels.
            expert: The scripted expert acts, control step by control step; actions are ignored.
            watch_goals: Whether the goals of the scene's other tasks are tested too.
            on_step: Called with the environment, its info and whether the episode is over, at the
                reset and after every control step.
        """
        super().__init__(env)
        base = env.unwrapped
        assert isinstance(base, LiberoEnv) and not base.cameras and base.chunk_len is None
        self._base, self._on_step = base, on_step
        self._expert: Expert | None = None
        self._has_expert = expert
        self._watch = GoalWatch(base) if watch_goals else None
        self._scenes = SceneCache(
            physics=base.physics,
            image_size=image_size,
            visual_profile=base.visual_profile,
            max_scenes=SCENES,
        )
        self._cameras = tuple(cameras)
        suite = get_suite(base.suite)
        self._observer = Observer(suite, cameras, image_size, self._scenes)
        self.observation_space = self._observer.space
        self.action_space = spaces.Box(
            suite.action.low, suite.action.high, (chunk_len, suite.action.size), np.float32
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Obs, dict[str, Any]]:
        """Start an episode."""
        _, info = self.env.reset(seed=seed, options=options)
        if self._has_expert:
            from vla_gym.experts import make_expert

            self._expert = make_expert(self._base.sim)
        if self._watch is not None:
            self._watch.begin(self._base.sim)
        if self._on_step is not None:
            self._on_step(self._base, info, False)
        return self._observer.observe(self._base.sim, info["task_id"]), info

    def step(self, action: np.ndarray) -> tuple[_Obs, float, bool, bool, dict[str, Any]]:
        """Execute the rows of ``action`` (C, 7) until they or the episode end."""
        rows = np.asarray(action)
        executed = 0
        for row in rows:
            chosen = row if self._expert is None else self._expert.act()
            _, reward, terminated, truncated, info = self.env.step(chosen)
            executed += 1
            if self._watch is not None:
                self._watch.look(self._base.sim, int(info["elapsed_steps"]))
            if self._on_step is not None:
                self._on_step(self._base, info, terminated or truncated)
            if terminated or truncated:
                break
        info = {**info, "executed_steps": executed}
        if self._watch is not None and (terminated or truncated):
            info["achieved"], info["achieved_step"] = self._watch.first or (-1, -1)
        observation = self._observer.observe(self._base.sim, info["task_id"])
        return observation, float(reward), terminated, truncated, info

    def facts(self) -> dict[str, str | None]:
        """Return what the images depend on: GL renderer and visual profile (None: no cameras)."""
        if not self._cameras:
            return {"gl_renderer": None, "visual_profile": None}
        renderer = self._scenes.renderer(self._base.task_model)
        return {"gl_renderer": renderer.renderer_info(), "visual_profile": renderer.profile}

    def close(self) -> None:
        """Free everything."""
        self._scenes.close()
        super().close()


class GoalWatch:
    """Which of a scene's tasks is the first whose goal becomes true in an episode.

    Attributes:
        first: Task and control step; None as long as no goal has become true.
    """

    def __init__(self, env: LiberoEnv) -> None:
        """Watch over the tasks of the environment's suite."""
        self._env = env
        self._goals: dict[str, dict[int, tuple[Predicate, ...]]] = {}
        self._open: dict[int, tuple[Predicate, ...]] = {}
        self.first: tuple[int, int] | None = None

    def begin(self, sim: LiberoSim) -> None:
        """Begin an episode; goals that hold now are left out of it."""
        own = sim.task_model.task
        scene = sim.task_model.scene_key
        if scene not in self._goals:
            same = [t for t in suite_tasks(own.suite) if t.scene_name == own.scene_name]
            models: list[Any] = [load_task(task, self._env.assets) for task in same]
            self._goals[scene] = {m.task.task_id: tuple(m.goal) for m in models}
        # The task's own goal first: it wins if two become true in one control step.
        goals = sorted(self._goals[scene].items(), key=lambda item: item[0] != own.task_id)
        self._open = {t: goal for t, goal in goals if not evaluate_goal(goal, sim.view)}
        self.first = None

    def look(self, sim: LiberoSim, step: int) -> None:
        """Test the goals after a control step."""
        if self.first is None:
            for task_id, goal in self._open.items():
                if evaluate_goal(goal, sim.view):
                    self.first = (task_id, step)
                    return
