"""Environments for ``lerobot-eval``: LeRobot's EnvHub, and a type of environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from lerobot.envs.configs import EnvConfig, HubEnvConfig, LiberoEnv

from vla_gym.envs.libero import LiberoEnv as VlaGymEnv
from vla_gym.errors import ConfigError
from vla_gym.integrations.lerobot.observation import IMAGES, LeRobotObservation
from vla_gym.suites import get_suite, task_number
from vla_gym.suites.libero.spec import CAMERAS
from vla_gym.vector import LiberoVectorEnv

Envs = dict[str, dict[int, VectorEnv[Any, Any, Any]]]


@EnvConfig.register_subclass("vla_gym_libero")
@dataclass
class VlaGymLibero(LiberoEnv, HubEnvConfig):
    """``--env.type=vla_gym_libero``: what LeRobot's ``libero`` takes, and where it is simulated.

    Its fields mean what they mean there: ``task`` (suites, ``libero_goal`` or several with commas),
    ``task_ids``, ``episode_length``, ``obs_type``, ``observation_height`` and
    ``observation_width``, ``init_states``, ``camera_name``, ``camera_name_mapping``.

    Attributes:
        assets: Asset pack: ``libero``, ``lite`` or a path.
        workers: Worker processes with asynchronous environments; None for one a core.
    """

    assets: str = "libero"
    workers: int | None = None

    def __post_init__(self) -> None:
        """Fill in the features.

        Raises:
            ConfigError: If this LeRobot loads environments from the hub only, and none is named.
        """
        super().__post_init__()
        if self.hub_path is None and not hasattr(EnvConfig, "create_envs"):
            raise ConfigError(
                "This LeRobot (before 0.6) loads environments of other packages from a hub "
                "repository only: set hub_path to one with an env.py, see docs/libraries.md."
            )

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> Envs:
        """Return the environments, see :func:`make_env`; LeRobot from 0.6 on calls it."""
        return make_env(n_envs, use_async_envs, self)


def make_env(n_envs: int = 1, use_async_envs: bool = False, cfg: Any = None) -> Envs:
    """Return LIBERO's tasks as LeRobot's own environments of them look, by suite and task.

    Episodes of ``init_states`` begin from LIBERO's official states: that of seed s from state
    s % 50. So ``lerobot-eval`` with its default seed plays them in order.

    Args:
        n_envs: Environments of each task.
        use_async_envs: Whether they run in worker processes, which the tasks share: then one task
            is played at a time. Else in this process, a ``SyncVectorEnv`` for each task.
        cfg: A :class:`VlaGymLibero`, or LeRobot's own config of LIBERO; None for its defaults.

    Raises:
        ConfigError: A value is out of range or not supported.
        UnknownTaskError: A suite or task does not exist.
    """
    cfg = LiberoEnv() if cfg is None else cfg
    if n_envs < 1:
        raise ConfigError(f"n_envs must be at least 1, got {n_envs}.")
    names = [name.strip() for name in cfg.task.split(",")]
    suite = get_suite(names)
    chosen: dict[str, dict[int, int]] = {}  # suite as it was named -> task -> number among all
    for name in names:
        own = get_suite(name)
        ids = range(len(own.tasks)) if cfg.task_ids is None else sorted(set(cfg.task_ids))
        chosen[name] = {i: task_number(suite, f"{own.name}/{task_number(own, i)}") for i in ids}
    arguments, wrap = _arguments(cfg)
    if not use_async_envs:

        def sync(number: int) -> SyncVectorEnv:
            def make() -> Any:
                return wrap(VlaGymEnv(suite.name, task_ids=number, **arguments))

            return SyncVectorEnv([make] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)

        return {name: {i: sync(n) for i, n in own.items()} for name, own in chosen.items()}
    numbers = [n for own in chosen.values() for n in own.values()]
    if len(numbers) > 1 and cfg.max_parallel_tasks > 1:
        raise ConfigError(
            "Asynchronous environments share their workers between tasks: set "
            f"max_parallel_tasks=1, got {cfg.max_parallel_tasks}."
        )
    envs = LiberoVectorEnv(
        n_envs,
        suite.name,
        workers=getattr(cfg, "workers", None),
        task_ids=numbers,
        autoreset_mode=AutoresetMode.SAME_STEP,
        env_wrappers=[wrap],
        **arguments,
    )
    left = set(numbers)
    return {
        name: {i: _OneTask(envs, n, left) for i, n in own.items()} for name, own in chosen.items()
    }


class _OneTask(VectorWrapper):
    """One task of a vector environment of many.

    Attributes:
        envs: What LeRobot before 0.6 looks at: whether environments tell their task.
    """

    def __init__(self, env: LiberoVectorEnv, task_id: int, left: set[int]) -> None:
        super().__init__(env)
        self._all, self.task_id, self._left = env, task_id, left
        told = SimpleNamespace(task="", task_description="")
        self.envs = (told,) * self.num_envs

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode of the task in all environments."""
        return self.env.reset(seed=seed, options={**(options or {}), "task_id": self.task_id})

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute."""
        return self._all.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self._all.get_attr(name)

    def close(self, **kwargs: Any) -> None:
        """Close the environments with the last of the tasks that share them."""
        self._left.discard(self.task_id)
        if not self._left:
            self._all.close(**kwargs)


def _arguments(cfg: Any) -> tuple[dict[str, Any], Any]:
    """Return the arguments of ``LiberoEnv`` that a config stands for, and its wrapper.

    Raises:
        ConfigError: If something is not supported.
    """
    height, width = cfg.observation_height, cfg.observation_width
    if height != width:
        raise ConfigError(
            f"observation_height and observation_width must be equal, got {height} and {width}."
        )
    if cfg.control_mode != "relative":
        raise ConfigError(f"control_mode must be 'relative', got {cfg.control_mode!r:.80}.")
    images = {f"{CAMERAS[camera]}_image": camera for camera in IMAGES}
    raw = cfg.camera_name
    raw = [name.strip() for name in raw.split(",")] if isinstance(raw, str) else list(raw)
    if not raw or not set(raw) <= images.keys():
        raise ConfigError(f"camera_name must be some of {', '.join(images)}, got {raw}.")
    renamed = cfg.camera_name_mapping or {}
    names = {images[name]: renamed.get(name, IMAGES[images[name]]) for name in raw}
    arguments = {
        "assets": getattr(cfg, "assets", None),
        "cameras": tuple(names),
        "image_size": height,
        "init_states": "official" if cfg.init_states else "sampled",
        "max_control_steps": cfg.episode_length,
        "render_mode": "rgb_array",
    }
    wrap = partial(LeRobotObservation, names=names, robot_state=cfg.obs_type == "pixels_agent_pos")
    return arguments, wrap
