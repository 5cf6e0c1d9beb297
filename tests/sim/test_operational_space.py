"""Torques by Cholesky factors against upstream's way; where they are refused."""

import numpy as np
import pytest

from vla_gym.sim import LiberoSim
from vla_gym.sim.operational_space import (
    MIN_PIVOT,
    null_torques,
    operational_inertia,
    operational_torques,
)
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model


@pytest.fixture(scope="module")
def sim() -> LiberoSim:
    model = load_task_model(get_task("goal", 8), assets="lite")
    sim = LiberoSim(model, physics="exact")
    sim.reset(model.official_layout(0), settle=False)
    return sim


def reading(sim: LiberoSim, joints: np.ndarray):
    """Return the arm's reading with the joints (7,) at these angles."""
    sim._data.qpos[sim.task_model.robot.joint_qpos] = joints
    return sim._exact.read()


def work_arrays() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(shape) for shape in ((7, 7), (6, 7), (6, 6), (6, 6), (3, 3), (6,)))


def torques_of(arm, wrench: np.ndarray, posture: np.ndarray) -> np.ndarray | None:
    """Return the torques without bias forces, None if refused."""
    torques = np.ones(7)
    parts = (arm.jac_pos, arm.jac_rot, arm.mass)
    added = operational_torques(parts, wrench.copy(), posture, work_arrays(), torques)
    if not added:
        assert torques.tolist() == [1.0] * 7
        return None
    return torques - 1.0


def upstreams_torques(arm, wrench: np.ndarray, posture: np.ndarray) -> np.ndarray:
    jac = np.array(np.vstack([arm.jac_pos, arm.jac_rot]))
    position, rotation, projection = operational_inertia(arm.mass, jac, arm.jac_pos, arm.jac_rot)
    task = jac.T @ np.concatenate([position @ wrench[:3], rotation @ wrench[3:]])
    # With a target of posture / 10 and the arm at rest at zero, the pull is `posture`.
    return task + null_torques(arm.mass, projection, posture / 10.0, np.zeros(7), np.zeros(7))


def test_torques_equal_upstreams_and_are_refused_where_nearly_singular(sim: LiberoSim) -> None:
    rng = np.random.default_rng(0)
    init, written = np.array(sim.task_model.robot.init_qpos), 0
    for _ in range(200):
        arm = reading(sim, init + rng.normal(0, 0.5, 7))
        wrench, posture = rng.normal(0, 10, 6), rng.normal(0, 10, 7)
        torques = torques_of(arm, wrench, posture)
        if torques is None:
            continue
        expected = upstreams_torques(arm, wrench, posture)
        # Rounding by what cancellation may leave of an entry.
        np.testing.assert_allclose(torques, expected, atol=1e-14 / MIN_PIVOT * abs(expected).max())
        written += 1
    assert written > 190
    for bend in (0.0, 1e-9, 1e-3):  # stretched upwards
        arm = reading(sim, np.array([0.3, bend, 0.1, -bend, 0.2, bend, 0.4]))
        assert torques_of(arm, np.ones(6), np.ones(7)) is None


def test_what_is_no_number_is_refused(sim: LiberoSim) -> None:
    arm = reading(sim, np.array(sim.task_model.robot.init_qpos))
    for name in ("jac_pos", "jac_rot", "mass"):
        array = getattr(arm, name)
        value, array[2, 3] = array[2, 3], np.nan
        if name == "mass":
            array[3, 2] = np.nan
        assert torques_of(arm, np.ones(6), np.ones(7)) is None
        array[2, 3] = value
