"""What the operational space controller computes of the arm: upstream's way and a faster one.

Upstream inverts four matrices a substep, three of them by a singular value decomposition, which
takes a third of the time of the physics. All four are symmetric and, away from singular postures,
positive definite: there :func:`operational_torques` gives the same torques, to rounding, by
Cholesky factors, without LAPACK and without allocations.
"""

from __future__ import annotations

import numpy as np

from vla_gym.sim.compiled import compiled

# Gain of the null space's pull towards the reset posture, in 1/s^2 (upstream's constant).
NULLSPACE_KP = 10.0
# A pivot is what cancellation leaves of a diagonal entry. Where less than this part is left, the
# posture is nearly singular: torques are large and their last digits are decided by upstream's
# rounding, which is repeated then. In 700 states around singular postures one control step was
# within 3e-10 of upstream's. Experts stay above 0.05; of random actions 0.2 % fall below 1e-4.
MIN_PIVOT = 1e-4


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


@compiled
def factorize(matrix: np.ndarray, factor: np.ndarray) -> bool:
    """Write the Cholesky factor (n, n) of a matrix, of which the lower triangle is read.

    The diagonal holds its entries' inverses: divisions are slow.

    Returns:
        Whether it is well-conditioned, see ``MIN_PIVOT``; never if it is not positive definite or
        has NaN. If not, ``factor`` is not usable.
    """
    for i in range(len(matrix)):
        for j in range(i + 1):
            rest = matrix[i, j]
            for k in range(j):
                rest -= factor[i, k] * factor[j, k]
            if j < i:
                factor[i, j] = rest * factor[j, j]
            elif rest > MIN_PIVOT * matrix[i, i]:
                factor[i, i] = 1.0 / np.sqrt(rest)
            else:
                return False
    return True


@compiled
def _forward(factor: np.ndarray, vector: np.ndarray) -> None:
    """Replace a vector (n,) by the solution of ``factor x = vector``."""
    for i in range(len(vector)):
        for k in range(i):
            vector[i] -= factor[i, k] * vector[k]
        vector[i] *= factor[i, i]


@compiled
def solve(factor: np.ndarray, vector: np.ndarray) -> None:
    """Replace a vector (n,) by the solution of ``factor factor^T x = vector``."""
    _forward(factor, vector)
    for i in range(len(vector) - 1, -1, -1):
        for k in range(i + 1, len(vector)):
            vector[i] -= factor[k, i] * vector[k]
        vector[i] *= factor[i, i]


@compiled
def operational_torques(
    arm: tuple[np.ndarray, ...],
    wrench: np.ndarray,
    posture: np.ndarray,
    work: tuple[np.ndarray, ...],
    torques: np.ndarray,
) -> bool:
    """Add the arm's torques to (7,) ``torques``, unless the posture is nearly singular.

    With ``A = J M^-1 J^T`` these are ``J^T [A_pp^-1 f; A_rr^-1 t]`` for force and torque and
    ``(M - J^T A^-1 J) posture`` for the null space.

    Args:
        arm: ``jac_pos``, ``jac_rot`` (3, 7) and ``mass`` (7, 7) of an ``ArmReading``.
        wrench: (6,) accelerations of position and rotation that are wanted; overwritten.
        posture: (7,) joint accelerations that are wanted in the null space.
        work: Arrays (7, 7), (6, 7), (6, 6), (6, 6), (3, 3), (6,); overwritten.
        torques: (7,); changed.

    Returns:
        Whether the torques were added; if not, only ``work`` has changed.
    """
    jac_pos, jac_rot, mass = arm
    mass_factor, rows, mobility, factor, factor_rot, pull = work
    if not factorize(mass, mass_factor):
        return False
    for i in range(6):
        jac = jac_pos[i] if i < 3 else jac_rot[i - 3]
        pull[i] = 0.0
        for k in range(7):
            rows[i, k] = jac[k]
            pull[i] += jac[k] * posture[k]
        _forward(mass_factor, rows[i])
        for j in range(i + 1):
            mobility[i, j] = 0.0
            for k in range(7):
                mobility[i, j] += rows[i, k] * rows[j, k]
    if not factorize(mobility, factor) or not factorize(mobility[3:, 3:], factor_rot):
        return False
    # The first rows and columns of a factor are the factor of the first rows and columns.
    solve(factor[:3, :3], wrench[:3])
    solve(factor_rot, wrench[3:])
    solve(factor, pull)
    for i in range(7):
        for k in range(7):
            torques[i] += mass[i, k] * posture[k]
        for k in range(3):
            torques[i] += jac_pos[k, i] * (wrench[k] - pull[k])
            torques[i] += jac_rot[k, i] * (wrench[k + 3] - pull[k + 3])
    return True
