"""Upstream LIBERO in a child process, driven state for state by parity tests.

Importing libero prints, asks questions and imports gym, so it lives in a process of its own whose
output is captured in a file. ``python tests/helpers/upstream.py FD ASSETS`` is that process; tests
use :class:`Upstream`::

    with Upstream(assets_root) as upstream:
        upstream.build("goal", 8)
        upstream.start(layout)
        result = upstream.steps(actions)          # qpos, qvel, success after every control step
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from run_python import ROOT

CAMERAS = ("agentview", "robot0_eye_in_hand")
DEADLINE_S = 280.0


class UpstreamError(RuntimeError):
    """The child process died, timed out or raised."""


class Upstream:
    """Handle of the child process; every public method of :class:`_Child` is a method here."""

    def __init__(self, assets_root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vla-gym-upstream-")
        self._log = Path(self._folder.name) / "output.txt"
        self._connection, other = Pipe()
        workdir = Path(self._folder.name) / "work"
        workdir.mkdir()
        environment = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        with other, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), str(assets_root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(other.fileno(),),
                cwd=workdir,
                env=environment,
            )

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run one method in the child and return its result."""
        try:
            self._connection.send((name, args, kwargs))
            if not self._connection.poll(DEADLINE_S):
                raise UpstreamError(f"{name}: no answer in {DEADLINE_S} s.\n{self._tail()}")
            ok, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise UpstreamError(f"{name}: upstream's process died.\n{self._tail()}") from error
        if not ok:
            raise UpstreamError(f"{name} failed in upstream's process:\n{result}")
        return result

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the child, which has nothing to put away."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class _Child:
    """Upstream's environment and what tests do with it."""

    def __init__(self, assets_root: Path) -> None:
        from vla_gym.suites.libero import upstream_env

        upstream_env.prepare(assets_root, Path.cwd())
        self._make = upstream_env.make_env
        self.env: Any = None
        self._built: tuple[Any, ...] = ()

    def build(self, suite: str, task_id: int, image_size: int | None = None) -> None:
        """Make the env of a task, cameras only with an image size.

        The one that there is stays if it is of that task: what plays in it begins with
        :meth:`start` or :meth:`sync`; with cameras it begins with ``start(through_reset=True)``.
        """
        from vla_gym.suites import get_task

        wanted = suite, task_id, image_size
        if wanted == self._built:
            return
        if self.env is not None:
            self.env.close()
            self.env = None
        options: dict[str, Any] = {"horizon": 10**9}
        if image_size is not None:
            options |= {
                "use_camera_obs": True,
                "has_offscreen_renderer": True,
                "camera_heights": image_size,
                "camera_widths": image_size,
            }
        self.env = self._make(get_task(suite, task_id).bddl_file, **options)
        self.env.seed(0)
        if image_size is None:
            self._reset()
        self._built = wanted

    @property
    def _domain(self) -> Any:
        return self.env.env

    @property
    def _raw(self) -> tuple[Any, Any]:
        return self.env.sim.model._model, self.env.sim.data._data

    def _place(self, names: tuple[str, ...], pos: np.ndarray, quat: np.ndarray) -> None:
        model, _ = self._raw
        for name, p, q in zip(names, pos, quat, strict=True):
            body = model.body(self._domain.fixtures_dict[name].root_body).id
            model.body_pos[body], model.body_quat[body] = p, q

    def _reset(self) -> None:
        """Reset upstream, and remember what the controller holds then, see :meth:`start`."""
        self.env.reset()
        self._fresh = dict(vars(self._domain.robots[0].controller))

    def _clear_counters(self) -> None:
        self._domain.timestep = 0
        self._domain.done = False

    def start(
        self, layout: Any, names: tuple[str, ...], *, through_reset: bool = False
    ) -> dict[str, Any]:
        """Put an official layout into the environment; no settling; return what it observes.

        Args:
            layout: A ``task_model.Layout``.
            names: Fixture names in the layout's order.
            through_reset: Take the path of evaluations: upstream's own ``env.reset()``, then its
                ``set_init_state``. The default is the same but faster: it clears the data and
                gives the controller what it held after the last ``env.reset()``.
        """
        import mujoco

        if through_reset:
            self._reset()
        model, data = self._raw
        self._place(names, layout.fixture_pos, layout.fixture_quat)
        robot = self._domain.robots[0]
        if not through_reset:
            mujoco.mj_resetData(model, data)
            vars(robot.controller).update(self._fresh)
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        assert np.array_equal(robot.controller.initial_joint, layout.nullspace_qpos)
        obs = self.env.set_init_state(np.concatenate([[layout.time], layout.qpos, layout.qvel]))
        self._clear_counters()
        return self._read(obs)

    def sync(self, snapshot: Any, names: tuple[str, ...]) -> None:
        """Continue from a ``vla_gym.sim.Snapshot`` that was taken after a control step."""
        import mujoco

        model, data = self._raw
        self._place(names, snapshot.fixture_pos, snapshot.fixture_quat)
        mujoco.mj_setState(model, data, snapshot.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)
        robot, state = self._domain.robots[0], snapshot.controller
        robot.controller.initial_joint = np.array(state.nullspace_qpos)
        robot.controller.goal_pos = np.array(state.goal_pos)
        robot.controller.goal_ori = np.array(state.goal_mat)
        robot.controller.new_update = state.stale is None
        robot.gripper.current_action = np.array(state.gripper_command)
        self._clear_counters()

    def steps(self, actions: np.ndarray, *, observe: bool = False) -> dict[str, np.ndarray]:
        """Run control steps; return qpos (T, nq), qvel (T, nv), success (T,) after each.

        Args:
            actions: (T, 7).
            observe: Return also what ``step`` returned: ``images`` uint8 (T, 2, H, W, 3) upright
                (None without cameras) and ``proprio`` (T, 8).
        """
        _, data = self._raw
        rows: dict[str, list[Any]] = {"qpos": [], "qvel": [], "success": []}
        for action in actions:
            obs, _, done, _ = self.env.step(action)
            for key, value in self._read(obs).items() if observe else ():
                rows.setdefault(key, []).append(value)
            rows["qpos"].append(data.qpos.copy())
            rows["qvel"].append(data.qvel.copy())
            rows["success"].append(bool(done))
        return {key: np.array(value) for key, value in rows.items()}

    def step_from(
        self, snapshots: list[Any], actions: np.ndarray, names: tuple[str, ...]
    ) -> np.ndarray:
        """Run one control step from each snapshot; return qpos after it, (N, nq)."""
        _, data = self._raw
        result = []
        for snapshot, action in zip(snapshots, actions, strict=True):
            self.sync(snapshot, names)
            self.env.step(action)
            result.append(data.qpos.copy())
        return np.array(result)

    def _read(self, obs: dict[str, Any]) -> dict[str, Any]:
        import robosuite.utils.transform_utils as transform_utils

        images = None
        if f"{CAMERAS[0]}_image" in obs:
            images = np.stack([obs[f"{camera}_image"][::-1] for camera in CAMERAS])
        proprio = np.concatenate(
            [
                obs["robot0_eef_pos"],
                transform_utils.quat2axisangle(obs["robot0_eef_quat"]),
                obs["robot0_gripper_qpos"],
            ]
        )
        return {"images": images, "proprio": proprio}

    def ask(self, suite: str, task_id: int, request: dict[str, Any]) -> dict[str, np.ndarray]:
        """Answer a request, see :mod:`_upstream_goals`."""
        import _upstream_goals

        return _upstream_goals.answer(suite, task_id, request)

    def model_arrays(self) -> dict[str, np.ndarray]:
        """Return every numeric array of upstream's model."""
        return model_arrays(self._raw[0])


def model_arrays(model: Any) -> dict[str, np.ndarray]:
    """Return copies of all arrays of an MjModel by name."""
    arrays = {}
    for name in dir(model):
        if not name.startswith("_") and isinstance(value := getattr(model, name), np.ndarray):
            arrays[name] = value.copy()
    return arrays


def assert_same_steps(
    sim: Any, actions: np.ndarray, theirs: dict[str, np.ndarray], where: str, first: int = 0
) -> None:
    """Run control steps; each must give the bits of upstream's, from its step ``first`` on."""
    for index, action in enumerate(actions, first):
        success, told = sim.step(action), f"{where}, control step {index}"
        np.testing.assert_array_equal(sim.qpos, theirs["qpos"][index], err_msg=told)
        np.testing.assert_array_equal(sim.qvel, theirs["qvel"][index], err_msg=told)
        assert success == theirs["success"][index], told


def random_actions(count: int, seed: int = 0) -> np.ndarray:
    """Return actions that wander and press down into the scene, (count, 7)."""
    rng = np.random.default_rng(seed)
    drift = np.repeat(rng.uniform(-0.8, 0.8, (count // 10 + 1, 7)), 10, axis=0)[:count]
    drift[:, 2] -= 0.3
    return np.clip(drift + rng.normal(0, 0.3, (count, 7)), -1, 1)


def _main(fd: int, assets_root: str) -> None:
    connection = Connection(fd)
    child: _Child | None = None
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            child = child or _Child(Path(assets_root))
            connection.send((True, getattr(child, name)(*args, **kwargs)))
        except Exception:
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
