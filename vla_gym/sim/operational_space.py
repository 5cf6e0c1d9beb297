"""What upstream's operational space controller computes of the arm, operation by operation."""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled

# Gain of the null space's pull towards the reset posture, in 1/s^2 (upstream's constant).
NULLSPACE_KP = 10.0


@compiled
def operational_inertia(
    mass: np.ndarray, jac: np.ndarray, jac_pos: np.ndarray, jac_rot: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the inertia felt at the site and the null-space projection.

    ``mass`` is the arm's (7, 7) joint-space mass matrix, ``jac`` the (6, 7) site Jacobian,
    ``jac_pos`` and ``jac_rot`` (3, 7) are its halves. Returned are the translational (3, 3) and
    rotational (3, 3) inertia and the projection (7, 7).
    """
    mass_inv = np.linalg.inv(mass)
    # The pseudo-inverse keeps these finite near singular postures.
    full = np.linalg.pinv(np.dot(np.dot(jac, mass_inv), jac.transpose()))
    position = np.linalg.pinv(np.dot(np.dot(jac_pos, mass_inv), jac_pos.transpose()))
    rotation = np.linalg.pinv(np.dot(np.dot(jac_rot, mass_inv), jac_rot.transpose()))
    jac_bar = np.dot(np.dot(mass_inv, jac.transpose()), full)
    return position, rotation, np.eye(7, 7) - np.dot(jac_bar, jac)


@compiled
def null_torques(
    mass: np.ndarray,
    projection: np.ndarray,
    target: np.ndarray,
    joint_pos: np.ndarray,
    joint_vel: np.ndarray,
) -> np.ndarray:
    """Return the (7,) torques that pull towards a posture without moving the site."""
    damping = np.sqrt(NULLSPACE_KP) * 2
    posture = np.dot(mass, NULLSPACE_KP * (target - joint_pos) - damping * joint_vel)
    return np.dot(projection.transpose(), posture)


@compiled
def orientation_error(goal: np.ndarray, current: np.ndarray) -> np.ndarray:
    """Return the rotation error of two (3, 3) matrices as a vector (3,), small angles."""
    error = np.zeros(3)  # sums of cross products; np.cross takes seconds to compile
    for c in range(3):
        for i in range(3):
            j, k = (i + 1) % 3, (i + 2) % 3
            error[i] += current[j, c] * goal[k, c] - current[k, c] * goal[j, c]
    return 0.5 * error
