"""A suite of another robot: a ball on three rails is driven to a mark.

Its scene is compiled by ``python -m example_suite REQUEST.json``, in a process of its own, and
cached by vla_gym.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vla_gym.assets import AssetPack, cache_dir
from vla_gym.errors import ConfigError
from vla_gym.suites import ActionSpec, CompiledTask, ProprioSpec, Suite, Task
from vla_gym.suites.disk_cache import SceneRequest, load_scene

XML = """
<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <light pos="0 0 2"/>
    <camera name="camera_above" pos="0 0 1.5"/>
    <geom type="plane" size="1 1 0.1" rgba="0.4 0.5 0.6 1" group="1"/>
    <site name="left" pos="-0.3 0 0.1"/>
    <site name="right" pos="0.3 0 0.1"/>
    <body name="ball" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="y" type="slide" axis="0 1 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.05" rgba="0.9 0.2 0.1 1" group="1"/>
    </body>
  </worldbody>
</mujoco>
"""
NUM_INIT_STATES, SPEED, RADIUS = 5, 0.5, 0.05
SPREAD = np.array([1.0, 0.2, 0.2])


def reach_task(task_id: int, name: str) -> Task:
    instruction = f"move the ball to the {name} mark"
    return Task("reach", task_id, name, instruction, max_control_steps=30, scene_name="rails")


@dataclass(frozen=True, eq=False)
class ReachModel(CompiledTask):
    init_states: np.ndarray

    def official_layout(self, init_state_id: int) -> SimpleNamespace:
        return SimpleNamespace(qpos=self.init_states[init_state_id], init_state_id=init_state_id)

    def sample_layout(self, rng: np.random.Generator) -> SimpleNamespace:
        return SimpleNamespace(qpos=rng.uniform(-0.1, 0.1, 3) * SPREAD, init_state_id=-1)


class ReachSim:
    """One action sets the ball's velocity for ten physics steps."""

    variation = None

    def __init__(self, task_model: ReachModel) -> None:
        import mujoco

        from vla_gym.sim.model_io import load_shared

        self._step, self.task_model = mujoco.mj_step, task_model
        self._forward = mujoco.mj_forward
        self._model = load_shared(task_model).model
        self.data = mujoco.MjData(self._model)

    def set_task(self, task_model: ReachModel) -> None:
        self.task_model = task_model

    def reset(self, layout: Any) -> None:
        self.set_state(SimpleNamespace(qpos=layout.qpos, qvel=np.zeros(3)))

    def run_chunk(self, actions: np.ndarray) -> tuple[int, bool]:
        for done, action in enumerate(actions, 1):
            self.data.qvel[:] = SPEED * np.clip(action, -1, 1)
            for _ in range(10):
                self._step(self._model, self.data)
            self._forward(self._model, self.data)
            if self.success():
                return done, True
        return done, False

    def proprio(self) -> np.ndarray:
        return np.concatenate([self.data.qpos, self.data.qvel]).astype(np.float32)

    def success(self) -> bool:
        away = self.data.body("ball").xpos - self.data.site(self.task_model.task.name).xpos
        return bool(np.linalg.norm(away) < RADIUS)

    def get_state(self) -> SimpleNamespace:
        qpos, qvel = self.data.qpos.copy(), self.data.qvel.copy()
        return SimpleNamespace(scene_key=self.task_model.scene_key, qpos=qpos, qvel=qvel)

    def set_state(self, snapshot: Any) -> None:
        self.data.qpos[:], self.data.qvel[:] = snapshot.qpos, snapshot.qvel
        self._forward(self._model, self.data)

    def set_variation(self, vector: np.ndarray | None) -> None:
        if vector is not None:
            raise ConfigError("The suite 'reach' does not vary.")

    def prepare_render(self) -> Any:
        return self.data  # nothing of a simulation's own is in the shared model


class ReachSuite(Suite):
    name = "reach"
    tasks = (reach_task(0, "left"), reach_task(1, "right"))
    num_init_states = NUM_INIT_STATES
    cameras = {"above": "camera_above"}
    action = ActionSpec(names=("x", "y", "z"), noop=(0.0, 0.0, 0.0))
    proprio = ProprioSpec((("position", 3), ("velocity", 3)))
    control_hz = 10.0

    def load_task_model(self, task: Task, assets: Any = "lite", *, clutter: bool = False):
        del assets  # there is one look only
        if clutter:
            raise ConfigError("The suite 'reach' has no clutter.")
        pack = AssetPack("none", Path(__file__).parent, "")
        request = SceneRequest(task.scene_name, pack, "example_suite", {"xml": XML}, {})
        folder = load_scene(request, cache_dir())
        with np.load(folder / "init_states.npz") as states:
            qpos = states[task.key]
        return ReachModel(task, pack, request.key(), folder / "scene.mjb", {}, qpos)

    def make_simulation(
        self, task_model: ReachModel, physics: str = "fast", observation_timing: str = "libero"
    ) -> ReachSim:
        del observation_timing  # a step's end is all that there is
        if physics != "fast":
            raise ConfigError("The suite 'reach' knows physics='fast' alone.")
        return ReachSim(task_model)


REACH = ReachSuite()


def main(request: str) -> None:
    """Compile the scene into the folder that the request names."""
    import mujoco

    out = Path(json.loads(Path(request).read_text())["out"])
    model = mujoco.MjModel.from_xml_string(XML)
    mujoco.mj_saveModel(model, str(out / "scene.mjb"), None)
    (out / "scene.json").write_text("{}")
    rng = np.random.default_rng(0)
    states = {
        task.key: rng.uniform(-0.1, 0.1, (NUM_INIT_STATES, 3)) * SPREAD for task in REACH.tasks
    }
    np.savez(out / "init_states.npz", **states)


if __name__ == "__main__":
    main(sys.argv[1])
