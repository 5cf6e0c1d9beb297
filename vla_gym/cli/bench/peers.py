"""Other packages' vector environments of LIBERO; runs in their own venvs, without vla_gym.

Two cameras, single control steps, official states, each through the class that the package offers
for many environments. Which state a reset plays is the package's own order where it has one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np

from .measuring import NO_LIMIT, NOOP, SETTLE_STEPS, Measured


class _Peer(Measured):
    """A peer's environments.

    Attributes:
        options: ``suite`` (``libero_goal``), ``tasks`` (one for each environment), ``image_size``,
            ``chunk_len``, ``seed``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = SimpleNamespace(**options)
        self.chunk_len = self.options.chunk_len
        self._build()
        self._start(0)

    @abstractmethod
    def _build(self) -> None:
        """Make ``envs``."""

    @abstractmethod
    def _start(self, state: int) -> None:
        """Reset all of them, to that official state if the package lets one choose."""

    def _step(self, actions: np.ndarray) -> Any:
        """Execute a control step (N, 7); return (N,) whether episodes ended."""
        raise NotImplementedError

    def reset(self, init_state_id: int, states: list[np.ndarray] | None) -> None:
        """Reset every environment and settle it."""
        del states
        self._start(init_state_id)

    def play(self, actions: np.ndarray) -> int:
        """Play actions (N, T, 7); return the episodes ended."""
        rows = np.ascontiguousarray(actions.swapaxes(0, 1))
        return sum(int(np.sum(self._step(row))) for row in rows)


class RLinf(_Peer):
    """``rlinf.envs.libero``: its LiberoEnv is a vector environment with chunks."""

    def _build(self) -> None:
        from omegaconf import OmegaConf
        from rlinf.envs.libero.libero_env import LiberoEnv

        size, tasks = self.options.image_size, self.options.tasks
        cfg = OmegaConf.create(
            {
                "seed": self.options.seed,
                "group_size": 1,
                "task_suite_name": self.options.suite,
                "is_eval": True,  # in training each reset builds the environments anew
                "auto_reset": False,
                "ignore_terminations": False,
                "use_fixed_reset_state_ids": False,
                "use_ordered_reset_state_ids": False,
                "use_rel_reward": False,
                "reward_coef": 1.0,
                "reset_gripper_open": True,
                "max_episode_steps": NO_LIMIT,
                "video_cfg": {"save_video": False},
                "init_params": {"camera_heights": size, "camera_widths": size},
            }
        )
        self.envs = LiberoEnv(cfg, len(tasks), 0, 1, None)
        bins = self.envs.trial_id_bins
        self.offsets = np.array([sum(bins[:task]) for task in tasks])

    def _start(self, state: int) -> None:
        self.envs.is_start = False
        self.envs.reset(reset_state_ids=self.offsets + state)

    def play(self, actions: np.ndarray) -> int:
        """Play actions (N, T, 7) chunk by chunk; return the episodes ended."""
        ended = 0
        for chunk in np.split(actions, actions.shape[1] // self.chunk_len, axis=1):
            _, _, terminations, truncations, _ = self.envs.chunk_step(chunk)
            ended += int((terminations | truncations).any(dim=1).sum())
        return ended

    def close(self) -> None:
        """Free everything."""
        self.envs.env.close()


class TorchRL(_Peer):
    """``torchrl.envs.LiberoEnv`` in its ParallelEnv."""

    def _build(self) -> None:
        import torch
        from torchrl.envs import LiberoEnv, ParallelEnv, step_mdp

        torch.set_num_threads(1)
        self.torch, self.step_mdp = torch, step_mdp
        size, tasks = self.options.image_size, self.options.tasks
        arguments = {
            "camera_height": size,
            "camera_width": size,
            "wrist_camera": "robot0_eye_in_hand",
            "init_state_mode": "cycle",
            "settle_steps": SETTLE_STEPS,
            "max_episode_steps": NO_LIMIT,
        }
        makers = [partial(LiberoEnv, self.options.suite, task, **arguments) for task in tasks]
        # What LiberoEnv(num_workers=...) returns for two or more.
        self.envs = ParallelEnv(len(tasks), makers, metadata_from_workers=len(set(tasks)) == 1)

    def _start(self, state: int) -> None:
        del state  # its own order, "cycle"
        self.data = self.envs.reset()

    def _step(self, actions: np.ndarray) -> Any:
        self.data["action"] = self.torch.from_numpy(actions)
        after = self.envs.step(self.data)
        ended = after["next", "done"].numpy()
        self.data = self.step_mdp(after)
        return ended


class LeRobot(_Peer):
    """``lerobot.envs.libero`` in Gymnasium's AsyncVectorEnv, which LeRobot takes."""

    def _build(self) -> None:
        define_torchvision_operators()
        from gymnasium.vector import AsyncVectorEnv
        from lerobot.envs.libero import create_libero_envs

        size, tasks = self.options.image_size, self.options.tasks
        if len(set(tasks)) > 1:
            raise ValueError("LeRobot has one vector environment a task: measure one task.")
        arguments = {
            "task_ids": tasks[:1],
            "obs_type": "pixels_agent_pos",
            "observation_height": size,
            "observation_width": size,
        }
        made = create_libero_envs(
            self.options.suite,
            len(tasks),
            arguments,
            # fork, LeRobot's before 0.6, would share an OpenGL context between processes.
            env_cls=partial(AsyncVectorEnv, context="forkserver"),
        )
        self.envs = made[self.options.suite][tasks[0]]

    def _start(self, state: int) -> None:
        del state  # its own order
        self.envs.reset(seed=self.options.seed)

    def _step(self, actions: np.ndarray) -> Any:
        _, _, terminations, truncations, _ = self.envs.step(actions)
        return terminations | truncations


class Libero2Gym(_Peer):
    """``libero2gym`` in its own AsyncVectorEnv; it does not settle, so the no-ops are played."""

    def _build(self) -> None:
        from libero2gym import libero_env
        from libero2gym.vector_env import AsyncVectorEnv

        suite = self.options.suite.removeprefix("libero_").capitalize()
        kind = getattr(libero_env, f"Libero{suite}Env")
        arguments = {
            "image_size": self.options.image_size,
            "seed": self.options.seed,
            "max_episode_steps": NO_LIMIT,
        }
        tasks = self.options.tasks
        makers = [partial(kind, task_id=task, **arguments) for task in tasks]
        dummy = partial(kind, dummy=True, task_id=tasks[0], **arguments)
        self.envs = AsyncVectorEnv(makers, dummy_env_fn=dummy)

    def _start(self, state: int) -> None:
        count = len(self.options.tasks)
        self.envs.reset(options=[{"init_state_id": state}] * count)
        noops = np.tile(NOOP, (count, 1)).astype(np.float32)
        for _ in range(SETTLE_STEPS):
            self.envs.step(noops)

    def _step(self, actions: np.ndarray) -> Any:
        return self.envs.step(actions)[2]


def define_torchvision_operators() -> None:
    """Let torchvision of the registry be imported beside a CPU build of torch.

    Its compiled part does not load there; LIBERO in LeRobot uses nothing of it.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    vars(define_torchvision_operators)["kept"] = library  # gone with it otherwise


def prepare_worker() -> None:
    """Do, in a process that a peer has spawned, what must be done before its imports."""
    if find_spec("lerobot") is not None:
        define_torchvision_operators()


def make(name: str, options: dict[str, Any]) -> Measured:
    """Build a peer's environments and reset them."""
    kinds: dict[str, Callable[[dict[str, Any]], Measured]]
    kinds = {"rlinf": RLinf, "torchrl": TorchRL, "lerobot": LeRobot, "libero2gym": Libero2Gym}
    return kinds[name](options)
