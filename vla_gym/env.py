"""The single LIBERO environment: Gymnasium's contract over :class:`vla_gym.sim.LiberoSim`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError, InvalidActionError
from vla_gym.suites import NUM_INIT_STATES, get_task, suite_tasks

if TYPE_CHECKING:
    from pathlib import Path

    from vla_gym.sim import LiberoSim, SceneRenderer
    from vla_gym.task_model import Layout, TaskModel

#: Our camera keys and the names of LIBERO's cameras.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
ACTION_DIM = 7
PROPRIO_DIM = 8


class LiberoEnv(gym.Env[dict[str, Any], np.ndarray]):
    """LIBERO tasks of one suite.

    Observation, a Dict of:
        ``agentview``, ``wrist``: (image_size, image_size, 3) uint8, upright;
        ``proprio``: (8,) float32: end-effector position (m), axis-angle (rad), finger joints (m);
        ``task_id``: index of the task in its suite.

    Action: (7,) float32 in [-1, 1], or (chunk_len, 7): translation (1.0 = 5 cm), rotation
    (1.0 = 0.5 rad), gripper (-1 opens, +1 closes). One row is one control step of 50 ms.

    Reward: 1.0 on success, else 0; inside a chunk it is discounted by ``gamma`` if that is given.
    ``terminated`` means success, ``truncated`` the step limit; they are never true together. A
    chunk stops at the first of success, limit and its end.

    info: ``success``, ``is_success``, ``executed_steps`` (of this call), ``elapsed_steps`` (of the
    episode), ``instruction``, ``task_id``, ``init_state_id`` (-1 for a sampled layout) and, when
    ``gamma`` is given, ``discount`` = gamma ** executed_steps.

    Which episode comes next depends on (seed, episode number) alone. ``reset(seed=...)`` starts
    the count again; ``reset(options={"task_id": t, "init_state_id": i})`` overrides it once.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        suite: str,
        *,
        task_ids: int | Sequence[int] | None = None,
        assets: str | Path = "lite",
        physics: Literal["fast", "exact"] = "fast",
        chunk_len: int | None = None,
        cameras: Sequence[str] = ("agentview", "wrist"),
        image_size: int = 256,
        visual_profile: Literal["libero", "fast"] | None = None,
        init_states: Literal["sampled", "official"] = "sampled",
        gamma: float | None = None,
        max_control_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Check the arguments; the simulation itself is built at the first reset.

        Building late keeps the OpenGL context in the process that uses it.

        Args:
            suite: Suite name, e.g. ``"goal"``.
            task_ids: One task, several, or all of the suite (None); several are drawn uniformly.
            assets: ``"lite"``, ``"libero"`` or a path to LIBERO's assets.
            physics: ``"fast"``, or ``"exact"``: upstream's arithmetic bit for bit, slower.
            chunk_len: None for single control steps, else rows per action.
            cameras: Which of ``agentview`` and ``wrist`` to observe; empty for none.
            image_size: Height and width of the images in pixels.
            visual_profile: ``"libero"`` (upstream's pixels) or ``"fast"`` (no anti-aliasing, no
                reflection, no shadow). Default: ``"libero"`` on the real pack, else ``"fast"``.
            init_states: ``"sampled"`` layouts, or the 50 ``"official"`` ones in turn.
            gamma: Discount per control step, in (0, 1].
            max_control_steps: Step limit; default is the suite's.
            render_mode: None or ``"rgb_array"``.

        Raises:
            UnknownTaskError: If the suite or a task id does not exist.
            ConfigError: If another argument is out of range.
        """
        if task_ids is None:
            self.tasks = suite_tasks(suite)
        else:
            ids = list(task_ids) if isinstance(task_ids, Sequence | np.ndarray) else [task_ids]
            self.tasks = tuple(get_task(suite, i) for i in ids)
        self.suite = suite.removeprefix("libero_")
        self._check(physics, "physics", ("fast", "exact"))
        self._check(visual_profile, "visual_profile", (None, "libero", "fast"))
        self._check(init_states, "init_states", ("sampled", "official"))
        self._check(render_mode, "render_mode", (None, *self.metadata["render_modes"]))
        for camera in cameras:
            self._check(camera, "cameras", tuple(CAMERAS))
        for name, value in (
            ("number of task_ids", len(self.tasks)),
            ("chunk_len", 1 if chunk_len is None else chunk_len),
            ("image_size", image_size),
            ("max_control_steps", 1 if max_control_steps is None else max_control_steps),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if gamma is not None and not 0.0 < gamma <= 1.0:
            raise ConfigError(f"gamma must be in (0, 1], got {gamma}.")
        self.assets, self.physics, self.chunk_len = assets, physics, chunk_len
        self.cameras, self.image_size = tuple(cameras), int(image_size)
        self.visual_profile, self.init_states = visual_profile, init_states
        self.gamma, self.max_control_steps = gamma, max_control_steps
        self.render_mode = render_mode
        self._build_spaces()
        self._sim: LiberoSim | None = None
        self._renderer: SceneRenderer | None = None
        self._models: dict[int, TaskModel] = {}
        self._seed: int | None = None
        self._episode = 0
        self._needs_reset = True

    @staticmethod
    def _check(value: Any, name: str, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise ConfigError(f"{name} must be one of {choices}; got {value!r}.")

    def _build_spaces(self) -> None:
        image = (self.image_size, self.image_size, 3)
        observation: dict[str, spaces.Space[Any]] = {
            camera: spaces.Box(0, 255, image, np.uint8) for camera in self.cameras
        }
        observation["proprio"] = spaces.Box(-np.inf, np.inf, (PROPRIO_DIM,), np.float32)
        observation["task_id"] = spaces.Discrete(len(suite_tasks(self.suite)))
        self.observation_space = spaces.Dict(observation)
        shape = (ACTION_DIM,) if self.chunk_len is None else (self.chunk_len, ACTION_DIM)
        self.action_space = spaces.Box(-1.0, 1.0, shape, np.float32)

    @property
    def sim(self) -> LiberoSim:
        """The simulation, with its privileged state.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        if self._sim is None:
            raise gym.error.ResetNeeded("The simulation is built at the first reset().")
        return self._sim

    @property
    def task_model(self) -> TaskModel:
        """The compiled task of the current episode."""
        return self.sim.task_model

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Fixes this and all following episodes, and starts their count again.
            options: ``task_id`` and ``init_state_id`` (0..49) for this episode only.

        Raises:
            ConfigError: If an option is unknown or out of range.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        unknown = options.keys() - {"task_id", "init_state_id"}
        if unknown:
            raise ConfigError(
                f"Unknown reset options {sorted(unknown)}: expected 'task_id', 'init_state_id'."
            )
        if seed is not None:
            self._seed, self._episode = int(seed), 0
        elif self._seed is None:
            self._seed = int(self.np_random.integers(2**31))
        rng = np.random.default_rng([self._seed, self._episode])
        # Drawn before the options are looked at, so that an option changes nothing else.
        drawn = self.tasks[int(rng.integers(len(self.tasks)))].task_id
        model = self._model(options.get("task_id", drawn))
        layout = self._layout(model, options.get("init_state_id"), rng)
        self._episode += 1
        self._prepare(model)
        self.sim.reset(layout)
        self._init_state_id = layout.init_state_id
        self._elapsed, self._needs_reset = 0, False
        return self._observe(), self._info(success=False, executed=0)

    def _model(self, task_id: int) -> TaskModel:
        from vla_gym.task_model import load_task_model

        task = get_task(self.suite, task_id)
        if task.task_id not in self._models:
            self._models[task.task_id] = load_task_model(task, self.assets)
        return self._models[task.task_id]

    def _layout(
        self, model: TaskModel, init_state_id: int | None, rng: np.random.Generator
    ) -> Layout:
        if init_state_id is None and self.init_states == "official":
            assert self._seed is not None
            init_state_id = (self._seed + self._episode) % NUM_INIT_STATES
        if init_state_id is None:
            return model.sample_layout(rng)
        if not 0 <= init_state_id < NUM_INIT_STATES:
            raise ConfigError(
                f"init_state_id must be in 0..{NUM_INIT_STATES - 1}, got {init_state_id}."
            )
        return model.official_layout(int(init_state_id))

    def _prepare(self, model: TaskModel) -> None:
        """Bring the simulation and the renderer to the task's scene."""
        from vla_gym.sim import LiberoSim, SceneRenderer

        if self._sim is None or self._sim.task_model.scene_key != model.scene_key:
            self._close_renderer()
            self._sim = LiberoSim(model, physics=self.physics)
        else:
            self._sim.set_task(model)
        if self._renderer is None and (self.cameras or self.render_mode):
            default = "libero" if model.assets.name == "libero" else "fast"
            profile = self.visual_profile or default
            size = self.image_size
            self._renderer = SceneRenderer(model, size, size, profile=profile)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Run one control step, or one chunk of them.

        Raises:
            InvalidActionError: Wrong shape, or a value that is not finite; nothing has moved then.
            gymnasium.error.ResetNeeded: Before the first reset, or after the episode's end.
        """
        if self._needs_reset:
            raise gym.error.ResetNeeded("The episode is over or never began: call reset() first.")
        rows = np.asarray(action, dtype=np.float64)
        if rows.shape != self.action_space.shape:
            raise InvalidActionError(
                f"Expected an action of shape {self.action_space.shape}, got {rows.shape}."
            )
        budget = self._limit - self._elapsed
        executed, success = self.sim.run_chunk(rows.reshape(-1, ACTION_DIM), max_steps=budget)
        self._elapsed += executed
        truncated = not success and self._elapsed >= self._limit
        self._needs_reset = success or truncated
        reward = 0.0
        if success:
            reward = 1.0 if self.gamma is None else float(self.gamma ** (executed - 1))
        return self._observe(), reward, success, truncated, self._info(success, executed)

    @property
    def _limit(self) -> int:
        return self.max_control_steps or self.task_model.task.max_control_steps

    def _observe(self) -> dict[str, Any]:
        observation: dict[str, Any] = {}
        if self.cameras:
            # A fresh array each time: an observation that is handed out never changes later.
            images = np.empty((len(self.cameras), self.image_size, self.image_size, 3), np.uint8)
            assert self._renderer is not None
            names = tuple(CAMERAS[camera] for camera in self.cameras)
            self._renderer.render(self.sim, images, cameras=names)
            observation = dict(zip(self.cameras, images, strict=True))
        observation["proprio"] = self.sim.proprio()
        observation["task_id"] = np.int64(self.task_model.task.task_id)
        return observation

    def _info(self, success: bool, executed: int) -> dict[str, Any]:
        task = self.task_model.task
        info: dict[str, Any] = {
            "success": success,
            "is_success": success,
            "executed_steps": executed,
            "elapsed_steps": self._elapsed,
            "instruction": task.instruction,
            "task_id": task.task_id,
            "init_state_id": self._init_state_id,
        }
        if self.gamma is not None:
            info["discount"] = float(self.gamma**executed)
        return info

    def render(self) -> np.ndarray | None:
        """Return the upright agentview image, (image_size, image_size, 3) uint8, or None."""
        if self.render_mode is None:
            return None
        sim, renderer = self.sim, self._renderer
        assert renderer is not None
        image = np.empty((1, self.image_size, self.image_size, 3), np.uint8)
        renderer.render(sim, image, cameras=(CAMERAS["agentview"],))
        return image[0]

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def close(self) -> None:
        """Free the OpenGL context and the simulation; closing twice is fine."""
        self._close_renderer()
        self._sim = None
        self._needs_reset = True
