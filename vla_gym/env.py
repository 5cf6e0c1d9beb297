"""The single LIBERO environment: Gymnasium's contract over :class:`vla_gym.sim.LiberoSim`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.checks import as_integer, check_choice
from vla_gym.env_state import EnvState
from vla_gym.errors import ConfigError, InvalidActionError
from vla_gym.schedule import TaskSampling, TaskSchedule
from vla_gym.suites import NUM_INIT_STATES, get_task, suite_tasks

if TYPE_CHECKING:
    from pathlib import Path

    from vla_gym.sim import LiberoSim, SceneRenderer
    from vla_gym.suites import Task
    from vla_gym.task_model import TaskModel

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

    Which episode comes next depends on (seed, episode number) alone, see
    :class:`~vla_gym.schedule.TaskSchedule`. ``reset(seed=...)`` starts the count again,
    :meth:`seek` goes to any episode, ``reset(options={"task_id": t, "init_state_id": i})``
    overrides one. :meth:`get_state` and :meth:`set_state` save and continue an episode.

    Attributes:
        schedule: Which task and layout each episode has.
        tasks: The tasks of the schedule, in its order.
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
        task_sampling: TaskSampling = "uniform",
        env_index: int = 0,
        group_size: int = 1,
    ) -> None:
        """Check the arguments; the simulation itself is built at the first reset.

        Building late keeps the OpenGL context in the process that uses it.

        Args:
            suite: Suite name, e.g. ``"goal"``.
            task_ids: One task, several, or all of the suite (None). A task that is listed twice
                is played twice as often.
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
            task_sampling: ``"uniform"``, ``"round_robin"`` or ``"balanced"``.
            env_index: Number of this environment in a vector env, from 0.
            group_size: Consecutive environments that play the same tasks and layouts.

        Raises:
            UnknownTaskError: If the suite or a task id does not exist.
            ConfigError: If another argument is out of range.
        """
        self.suite = suite.removeprefix("libero_")
        self.tasks = _parse_tasks(suite, task_ids)
        ids = [task.task_id for task in self.tasks]
        self.schedule = TaskSchedule(ids, task_sampling, env_index, group_size)
        check_choice(physics, "physics", ("fast", "exact"))
        check_choice(visual_profile, "visual_profile", (None, "libero", "fast"))
        check_choice(init_states, "init_states", ("sampled", "official"))
        check_choice(render_mode, "render_mode", (None, *self.metadata["render_modes"]))
        for camera in cameras:
            check_choice(camera, "cameras", tuple(CAMERAS))
        for name, value in (
            ("chunk_len", 1 if chunk_len is None else chunk_len),
            ("image_size", image_size),
            ("max_control_steps", 1 if max_control_steps is None else max_control_steps),
        ):
            as_integer(value, name, 1)
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
        self._image_out: dict[str, np.ndarray] | None = None
        self._plays = self.schedule  # another environment's after its state was set
        self._seed: int | None = None
        self._episode = 0
        self._elapsed, self._init_state_id, self._needs_reset = 0, -1, True

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
            ConfigError: If an option is unknown or out of range, or the seed is smaller than
                ``schedule.min_seed``.
            UnknownTaskError: If there is no such task.
        """
        task_id, init_state_id = _parse_options(options or {})
        super().reset(seed=seed)
        if seed is not None:
            self.seek(seed, 0)
        elif self._seed is None:
            self.seek(int(self.np_random.integers(2**31)) + self.schedule.min_seed, 0)
        assert self._seed is not None
        # Drawn in any case, so that an option changes nothing else.
        drawn, key_seed, rng = self._plays.task_and_rng(self._seed, self._episode)
        model = self._model(drawn if task_id is None else task_id)
        if init_state_id is None and self.init_states == "official":
            init_state_id = (key_seed + self._episode) % NUM_INIT_STATES
        if init_state_id is None:
            layout = model.sample_layout(rng)
        else:
            layout = model.official_layout(init_state_id)
        self._needs_reset = True  # until the new episode stands
        self._prepare(model)
        self.sim.reset(layout)
        self._episode += 1
        self._init_state_id = layout.init_state_id
        self._elapsed, self._needs_reset = 0, False
        return self._observe(), self._info(success=False, executed=0)

    def seek(self, seed: int, episode: int, env_index: int | None = None) -> None:
        """Make the next reset without a seed play a certain episode; the present one goes on.

        Args:
            seed: The environment's seed.
            episode: Number of the episode that ``reset(seed=seed)`` and ``episode`` more resets
                would begin.
            env_index: Play what that environment of the vector env would, until the next seed;
                None: what this one does.

        Raises:
            ConfigError: If one is not an integer, negative, or the seed is smaller than
                ``schedule.min_seed``.
        """
        plays = self.schedule if env_index is None else self.schedule.of_env(env_index)
        plays.task_and_rng(seed, episode)  # refuses what cannot be played
        self._plays, self._seed, self._episode = plays, int(seed), int(episode)

    @property
    def next_episode(self) -> tuple[int, int, int] | None:
        """What the next reset without a seed plays, as arguments of :meth:`seek`.

        None as long as no seed has been given or drawn.
        """
        if self._seed is None:
            return None
        return self._seed, self._episode, self._plays.env_index

    def get_state(self) -> EnvState:
        """Return everything that the future of the episode, and the ones after it, depends on.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        snapshot = self.sim.get_state()
        assert self._seed is not None
        return EnvState(
            suite=self.suite,
            task_id=self.task_model.task.task_id,
            physics=self.physics,
            snapshot=snapshot,
            elapsed_steps=self._elapsed,
            needs_reset=self._needs_reset,
            init_state_id=self._init_state_id,
            seed=self._seed,
            next_episode=self._episode,
            env_index=self._plays.env_index,
        )

    def set_state(self, state: EnvState) -> dict[str, Any]:
        """Continue a saved episode, exactly as the environment that saved it would.

        The state may come from another environment or process, from another task or scene of the
        suite. Afterwards the next reset plays what the original would have played next.

        Args:
            state: What :meth:`get_state` returned.

        Returns:
            The observation of that moment.

        Raises:
            ConfigError: If the state belongs to another suite, asset pack or physics mode;
                nothing has changed then.
        """
        if not isinstance(state, EnvState):
            raise ConfigError(f"Expected an EnvState of get_state(), got {type(state).__name__}.")
        own = (self.suite, self.physics)
        if (state.suite, state.physics) != own:
            raise ConfigError(
                f"The state was saved with (suite, physics) = {(state.suite, state.physics)}, "
                f"this environment has {own}."
            )
        model = self._model(state.task_id)
        if state.snapshot.scene_key != model.scene_key:
            raise ConfigError(
                f"The state belongs to scene {state.snapshot.scene_key!r}, the task of this "
                f"environment to {model.scene_key!r}: both need the same assets and versions."
            )
        self.seek(state.seed, state.next_episode, state.env_index)
        self._needs_reset = True  # until the episode stands
        self._prepare(model)
        self.sim.set_state(state.snapshot)
        self._init_state_id, self._elapsed = state.init_state_id, state.elapsed_steps
        self._needs_reset = state.needs_reset
        return self._observe()

    def _model(self, task_id: int) -> TaskModel:
        from vla_gym.task_model import load_task_model

        task = get_task(self.suite, task_id)
        if task.task_id not in self._models:
            self._models[task.task_id] = load_task_model(task, self.assets)
        return self._models[task.task_id]

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
    def image_out(self) -> dict[str, np.ndarray] | None:
        """Where the cameras render to: camera -> (image_size, image_size, 3) uint8, or None.

        When set, observations of :meth:`reset`, :meth:`step` and :meth:`set_state` hold these very
        arrays: they belong to the caller, who must not let them be written again while an
        observation that holds them is in use. None (default): each observation has arrays of its
        own.

        Raises:
            ConfigError: On setting, if a camera is missing or an array does not fit.
        """
        return self._image_out

    @image_out.setter
    def image_out(self, arrays: dict[str, np.ndarray] | None) -> None:
        if arrays is not None:
            if set(arrays) != set(self.cameras):
                raise ConfigError(
                    f"image_out must name the cameras {list(self.cameras)}, got {list(arrays)}."
                )
            for camera, array in arrays.items():
                shape = (self.image_size, self.image_size, 3)
                if array.shape != shape or array.dtype != np.uint8 or not array.flags.writeable:
                    raise ConfigError(
                        f"image_out[{camera!r}] must be a writeable uint8 array {shape}, got "
                        f"{array.dtype} {array.shape}."
                    )
            arrays = {camera: arrays[camera] for camera in self.cameras}
        self._image_out = arrays

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
            if self._image_out is not None:
                for camera, image in self._image_out.items():
                    np.copyto(image, observation[camera])
                    observation[camera] = image
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


def _parse_tasks(suite: str, task_ids: int | Sequence[int] | None) -> tuple[Task, ...]:
    """Return the tasks that the argument names.

    Raises:
        UnknownTaskError: If the suite or a task id does not exist.
    """
    if task_ids is None:
        return suite_tasks(suite)
    if isinstance(task_ids, np.ndarray):
        task_ids = task_ids.tolist()
    ids = list(task_ids) if isinstance(task_ids, Sequence) else [task_ids]
    return tuple(get_task(suite, task_id) for task_id in ids)


def _parse_options(options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the task and the official state that reset options ask for; None: as scheduled.

    Raises:
        ConfigError: If an option is unknown, not an integer or out of range.
    """
    unknown = options.keys() - {"task_id", "init_state_id"}
    if unknown:
        raise ConfigError(
            f"Unknown reset options {sorted(unknown)}: expected 'task_id', 'init_state_id'."
        )
    task_id, init_state_id = options.get("task_id"), options.get("init_state_id")
    if init_state_id is not None:
        init_state_id = as_integer(init_state_id, "init_state_id", 0, NUM_INIT_STATES - 1)
    return task_id, init_state_id
