"""Where the mass matrix is read."""

import mujoco
import numpy as np
import pytest

from vla_gym.sim import LiberoSim
from vla_gym.sim.osc_fast import mass_addresses
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model


@pytest.fixture(scope="module")
def sim() -> LiberoSim:
    model = load_task_model(get_task("goal", 8), assets="lite")
    sim = LiberoSim(model, physics="exact")
    sim.reset(model.official_layout(0), settle=False)
    return sim


def test_the_arms_mass_matrix_is_read_where_it_is(sim: LiberoSim) -> None:
    model, data = sim._model, sim._data
    mujoco.mj_forward(model, data)
    mass, dofs = np.zeros((model.nv, model.nv)), np.array(sim.task_model.robot.joint_qvel)
    mujoco.mj_fullM(model, mass, data.qM)
    read = data.qM[mass_addresses(model, dofs)]
    np.testing.assert_array_equal(read, mass[np.ix_(dofs, dofs)])
