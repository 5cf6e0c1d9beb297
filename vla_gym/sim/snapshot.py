"""A saved simulation state: everything that the next step depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_gym.sim.controller_data import ControllerState, StepTrace


@dataclass(frozen=True)
class Snapshot:
    """State of a :class:`~vla_gym.sim.LiberoSim`; never changed after it was made.

    Attributes:
        scene_key: Scene the state belongs to.
        physics: ``mjSTATE_INTEGRATION`` of MuJoCo: time, positions, velocities, solver warm
            start, controls, applied forces, mocap poses; float64, flat.
        trace: What observations read of the last control step. Body poses, contacts and so the
            success test belong to its last state, as in upstream, and are recomputed on restore.
        controller: Goal pose, gripper command and null-space target.
        fixture_pos, fixture_quat: (F, 3), (F, 4) poses that are written into the model.
        variation: What the scene looks like, see ``DomainVariation.describe``; None: as it is.
    """

    scene_key: str
    physics: np.ndarray
    trace: StepTrace
    controller: ControllerState
    fixture_pos: np.ndarray
    fixture_quat: np.ndarray
    variation: np.ndarray | None = None
