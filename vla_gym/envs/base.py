"""What an environment is made of: arguments, spaces and simulation; no episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces

from vla_gym.assets.pack import default_assets
from vla_gym.envs.cameras import CameraEnv
from vla_gym.envs.checks import (
    MAX_CHUNK_LEN,
    MAX_IMAGE_SIZE,
    MAX_SETTLE_STEPS,
    as_integer,
    as_number,
    check_choice,
    parse_cameras,
    parse_init_states,
    parse_tasks,
)
from vla_gym.envs.scene_cache import SceneCache, VisualProfile, load_task
from vla_gym.envs.schedule import TaskSampling, TaskSchedule
from vla_gym.errors import ConfigError
from vla_gym.outside import check_path
from vla_gym.suites import get_suite
from vla_gym.suites.protocol import CompiledTask, Simulation
from vla_gym.variation import DomainVariation


class LiberoEnvBase(CameraEnv):
    """Arguments, spaces, simulation and images of :class:`~vla_gym.envs.libero.LiberoEnv`."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        suite: str | Sequence[str],
        *,
        task_ids: int | str | Sequence[int | str] | None = None,
        assets: str | Path | None = None,
        physics: Literal["fast", "exact"] = "fast",
        observation_timing: Literal["libero", "end"] = "libero",
        chunk_len: int | None = None,
        cameras: Sequence[str] | None = None,
        image_size: int = 256,
        depth: bool = False,
        segmentation: bool = False,
        visual_profile: VisualProfile | None = None,
        init_states: Literal["sampled", "official"] | Sequence[int] = "sampled",
        gamma: float | None = None,
        reward: Literal["sparse", "staged"] = "sparse",
        max_control_steps: int | None = None,
        settle_steps: int | None = None,
        settle_gripper: float | None = None,
        render_mode: str | None = None,
        task_sampling: TaskSampling = "uniform",
        env_index: int = 0,
        group_size: int = 1,
        scene_cache_size: int = 10,
        variation: DomainVariation | str | None = None,
        scene_reset_interval: int = 1,
    ) -> None:
        """Check the arguments; the simulation itself is built at the first reset.

        Building late keeps the OpenGL context in the process that uses it.

        Args:
            suite: Suite name, e.g. ``"goal"``; or several, ``["goal", "spatial"]``: their tasks
                are numbered one suite after the other.
            task_ids: One task, several, or all of the suite (None), each a number or
                ``"<suite>/<number>"``. A task that is listed twice is played twice as often.
            assets: The suite's asset pack; LIBERO's are ``"lite"``, ``"libero"`` or a path. None:
                :func:`~vla_gym.assets.pack.default_assets`.
            physics: ``"fast"``, or ``"exact"``: upstream's arithmetic bit for bit, slower.
            observation_timing: ``"libero"``: images and proprioception of the moment that
                upstream's ``step`` returns, 4 ms (images, pose of the hand) and 2 ms (fingers)
                before a control step's end; ``"end"``: of its end.
            chunk_len: None for single control steps, else rows per action.
            cameras: Which of the suite's cameras to observe (LIBERO's are ``agentview`` and
                ``wrist``): None for all of them, empty for none.
            image_size: Height and width of the images in pixels.
            depth: Whether to observe ``<camera>_depth`` of each camera.
            segmentation: Whether to observe ``<camera>_segmentation`` of each camera.
            visual_profile: ``"libero"`` (upstream's pixels), ``"fast"`` (no anti-aliasing, no
                reflection, no shadow) or ``"coarse"`` (as fast, large meshes with fewer triangles
                where there is no GPU). Default: ``"libero"`` on the real pack, else ``"fast"``.
            init_states: ``"sampled"`` layouts, the ``"official"`` ones in turn, or in turn those
                whose indices are given.
            gamma: Discount per control step, in (0, 1].
            reward: ``"sparse"``: 1 on success; ``"staged"``: by how much each control step brings
                the share of the goal's conditions that hold closer to 1, see ``LiberoEnv``.
            max_control_steps: Step limit; default is the suite's.
            settle_steps: No-op control steps before an episode; default is the suite's, of LIBERO
                10. LIBERO's suites alone take this and the next one.
            settle_gripper: Their gripper command in [-1, 1], by default -1: open. 0 leaves the
                fingers where they are.
            render_mode: None or ``"rgb_array"``. For a window, ``gymnasium.make`` or
                ``gymnasium.wrappers.HumanRendering``.
            task_sampling: ``"uniform"``, ``"round_robin"`` or ``"balanced"``.
            env_index: Number of this environment in a vector env, from 0.
            group_size: Consecutive environments that play the same tasks and layouts.
            scene_cache_size: Scenes that are kept ready, at least 1: simulations of this
                environment, and renderers, which the environments of a thread share. By default
                those of LIBERO's suites of ten tasks all fit.
            variation: How light, cameras, colours and clutter vary: a
                :class:`~vla_gym.variation.DomainVariation`, ``"mild"`` or ``"strong"``; None: not.
            scene_reset_interval: Episodes that a variation lasts.

        Raises:
            UnknownTaskError: If the suite or a task does not exist.
            ConfigError: If suites do not agree in spaces, or another argument is out of range.
        """
        self._suite = get_suite(suite)
        self.suite = self._suite.name
        ids = parse_tasks(self._suite, task_ids)
        self.tasks = tuple(self._suite.tasks[i] for i in ids)
        self.schedule = TaskSchedule(ids, task_sampling, env_index, group_size)
        check_choice(physics, "physics", ("fast", "exact"))
        check_choice(observation_timing, "observation_timing", ("libero", "end"))
        check_choice(visual_profile, "visual_profile", (None, *get_args(VisualProfile)))
        check_choice(render_mode, "render_mode", (None, "rgb_array"))
        self.cameras = parse_cameras(self._suite, cameras)
        self.image_size = as_integer(image_size, "image_size", 1, MAX_IMAGE_SIZE)
        if chunk_len is not None:
            chunk_len = as_integer(chunk_len, "chunk_len", 1, MAX_CHUNK_LEN)
        if max_control_steps is not None:
            max_control_steps = as_integer(max_control_steps, "max_control_steps", 1, 2**31 - 1)
        settle: dict[str, Any] = {}
        if settle_steps is not None:
            settle["settle_steps"] = as_integer(settle_steps, "settle_steps", 0, MAX_SETTLE_STEPS)
        if settle_gripper is not None:
            settle["settle_gripper"] = as_number(settle_gripper, "settle_gripper", -1, 1)
        if settle and not self._suite.can_settle:
            raise ConfigError(
                f"Suite {self._suite.name!r} does not take {', '.join(settle)}: leave them out."
            )
        if gamma is not None:
            gamma = as_number(gamma, "gamma", 0, 1, above=True)
        check_choice(reward, "reward", ("sparse", "staged"))
        self._staged = reward == "staged"
        if self._staged and not self._suite.has_progress:
            raise ConfigError(
                f"Suite {self._suite.name!r} does not tell how much of a goal is reached, as "
                "reward='staged' needs: leave it out."
            )
        self.assets = default_assets() if assets is None else assets
        if not isinstance(self.assets, str | os.PathLike):
            raise ConfigError(f"assets must be the name or path of a pack, got {assets!r:.80}.")
        check_path(self.assets)
        # Where it is now, wherever this process goes; what is no path here is a suite's name.
        place = os.path.expanduser(self.assets)
        if self.assets not in ("lite", "libero") and os.path.exists(place):
            self.assets = str(Path(place).absolute())
        self.physics, self.chunk_len, self.visual_profile = physics, chunk_len, visual_profile
        self.init_states = parse_init_states(init_states, self._suite.num_init_states)
        self.gamma, self.max_control_steps = gamma, max_control_steps
        self.render_mode = render_mode
        self.variation = DomainVariation.parse(variation)
        self.scene_reset_interval = as_integer(scene_reset_interval, "scene_reset_interval", 1)
        self.drawing: dict[str, Any] = {  # arguments of a SceneCache
            "image_size": self.image_size,
            "visual_profile": visual_profile,
            "max_scenes": as_integer(scene_cache_size, "scene_cache_size", 1),
        }
        self._scene_options = {
            "physics": physics,
            "observation_timing": observation_timing,
            **settle,
            **self.drawing,
        }
        self._scenes = SceneCache(**self._scene_options)
        self._image_shape = (self.image_size, self.image_size, 3)
        self._image_out: dict[str, np.ndarray] | None = None
        self.depth, self.segmentation = depth, segmentation
        fields = self._camera_fields()
        fields["proprio"] = spaces.Box(-np.inf, np.inf, (self._suite.proprio.size,), np.float32)
        fields["task_id"] = spaces.Discrete(len(self._suite.tasks))
        self.observation_space = spaces.Dict(fields)
        action = self._suite.action
        shape = (action.size,) if chunk_len is None else (chunk_len, action.size)
        self.action_space = spaces.Box(action.low, action.high, shape, np.float32)
        # Frames are of steps.
        self.metadata = {**self.metadata, "render_fps": self._suite.control_hz / (chunk_len or 1)}
        self._sim: Simulation | None = None
        self._task_id = -1
        self.on_control_step: list[Callable[[Any, dict[str, Any]], None]] = []
        self.replace_action: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def task_model(self) -> Any:
        """The compiled task of the current episode; LIBERO's is a ``libero.TaskModel``."""
        return self.sim.task_model

    @property
    def cluttered(self) -> bool:
        """Whether scenes with clutter are played."""
        return self.variation is not None and self.variation.distractors > 0

    def _model(self, task_id: int, *, clutter: bool) -> CompiledTask:
        return load_task(self._suite.tasks[task_id], self.assets, clutter=clutter)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and copies hold: the simulation's state, not itself nor OpenGL."""
        kept = self.__dict__ | {"_suite": self.suite, "_image_out": None}
        del kept["_scenes"], kept["_sim"]
        sim = self._sim
        saved = None if sim is None else (sim.get_state(), bool(sim.task_model.clutter))
        return {**kept, "_saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on where the original was; nothing is drawn before the next observation."""
        saved = state.pop("_saved")
        self.__dict__.update(state, _suite=get_suite(state["suite"]), _sim=None)
        self._scenes = SceneCache(**self._scene_options)
        if saved is not None:
            snapshot, clutter = saved
            self._sim = self._scenes.simulation(self._model(self._task_id, clutter=clutter))
            self._sim.set_state(snapshot)

    def close(self) -> None:
        """Free the simulations, and the renderers that nobody else uses; twice is fine."""
        self._scenes.close()
        self._sim = None
