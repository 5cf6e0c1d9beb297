"""A goal's geometric part as a table that compiled code can read.

The chunk kernel must notice success after every control step without returning to Python. It
evaluates these necessary conditions; when all hold, Python decides with the exact predicates
(:func:`vla_gym.suites.libero.goals.evaluate_goal`), contacts included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_gym.sim.compiled import compiled
from vla_gym.suites.libero.goals import (
    IN_SITE,
    IN_SITE_BELOW,
    JOINT,
    ON_OBJECT,
    ON_OBJECT_RADIUS,
    ON_SITE,
    ON_SITE_BELOW,
    ON_SITE_HEIGHT,
    Predicate,
)

# Rounding may differ between the compiled test and the exact one: the test is this much wider.
SLACK = 1e-6

_JOINT_RANGE, _NEAR_BODY, _ABOVE_SITE, _INSIDE_SITE = range(4)
_COLUMNS = 6


def compile_tests(goal: Sequence[Predicate]) -> np.ndarray:
    """Return the table of necessary conditions of a goal.

    Args:
        goal: Conjunction of predicates.

    Returns:
        (T, 6) float64 rows [kind, i, j, a, b, c]: kind 0: ``a <= qpos[i] <= b``; 1: body i above
        body j and within ``a`` metres in the plane; 2: body i above site j with half sizes
        (a, b, c); 3: body i inside site j. A predicate with no necessary condition here adds no
        row; with no rows at all every control step is a candidate.
    """
    rows: list[list[float]] = []
    for predicate in goal:
        size = [float(v) for v in predicate.size]
        if predicate.kind == JOINT:
            rows += _joint_rows(predicate)
        elif predicate.kind == ON_OBJECT:
            rows.append([_NEAR_BODY, predicate.body, predicate.target_body, ON_OBJECT_RADIUS, 0, 0])
        elif predicate.kind == ON_SITE:
            rows.append([_ABOVE_SITE, predicate.body, predicate.site, *size])
        elif predicate.kind == IN_SITE:
            rows.append([_INSIDE_SITE, predicate.body, predicate.site, *size])
    return np.array(rows, dtype=np.float64).reshape(-1, _COLUMNS)


def _joint_rows(predicate: Predicate) -> list[list[float]]:
    """Return one row a joint, or none when any of several joints is enough."""
    if predicate.any_joint and len(predicate.joint_qpos) > 1:
        return []
    low, high = -np.inf, np.inf
    if predicate.comparison.startswith("<"):
        high = predicate.threshold + SLACK
    else:
        low = predicate.threshold - SLACK
    return [[_JOINT_RANGE, float(a), 0, low, high, 0] for a in predicate.joint_qpos]


@compiled
def is_candidate(  # noqa: C901 - one branch a kind keeps the table readable
    tests: np.ndarray,
    qpos: np.ndarray,
    xpos: np.ndarray,
    site_xpos: np.ndarray,
    site_xmat: np.ndarray,
) -> bool:
    """Tell whether the goal may be reached; never False when it is.

    Args:
        tests: (T, 6) from :func:`compile_tests`.
        qpos: (nq,) positions.
        xpos: (nbody, 3) body positions.
        site_xpos: (nsite, 3).
        site_xmat: (nsite, 9).
    """
    delta = np.empty(3)
    turned = np.empty(3)
    for t in range(tests.shape[0]):
        kind, i, j = int(tests[t, 0]), int(tests[t, 1]), int(tests[t, 2])
        a, b, c = tests[t, 3], tests[t, 4], tests[t, 5]
        if kind == _JOINT_RANGE:
            if not (a <= qpos[i] <= b):
                return False
        elif kind == _NEAR_BODY:
            dx, dy = xpos[i, 0] - xpos[j, 0], xpos[i, 1] - xpos[j, 1]
            if xpos[j, 2] > xpos[i, 2] + SLACK or np.sqrt(dx * dx + dy * dy) > a + SLACK:
                return False
        else:
            mat = site_xmat[j].reshape(3, 3)
            for k in range(3):
                delta[k] = xpos[i, k] - site_xpos[j, k]
            if kind == _ABOVE_SITE:
                for k in range(3):
                    turned[k] = mat[k, 0] * delta[0] + mat[k, 1] * delta[1] + mat[k, 2] * delta[2]
                if abs(turned[0]) > a + SLACK or abs(turned[1]) > b + SLACK:
                    return False
                if not (c - ON_SITE_BELOW - SLACK < turned[2] < c + ON_SITE_HEIGHT + SLACK):
                    return False
            else:
                for k in range(3):
                    reach = abs(mat[k, 0] * a + mat[k, 1] * b + mat[k, 2] * c) + SLACK
                    below = IN_SITE_BELOW if k == 2 else 0.0
                    if not (-reach - below < delta[k] < reach):
                        return False
    return True
