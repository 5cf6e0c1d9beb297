"""A fork of the process that made environments can neither move nor close them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forks import in_fork
from stub_envs import LIMIT
from trees import assert_same

from vla_gym.vector import LiberoVectorEnv

ACTIONS = np.zeros((2, 3), np.float32)

USES: dict[str, Callable[[LiberoVectorEnv], Any]] = {
    "reset": lambda envs: envs.reset(seed=5),
    "step": lambda envs: envs.step(ACTIONS),
    "step_async": lambda envs: envs.step_async(ACTIONS),
    "send": lambda envs: envs.send(ACTIONS[:1], [0]),
    "reset_send": lambda envs: envs.reset_send([0]),
    "get_state": lambda envs: envs.get_state(),
    "call": lambda envs: envs.call("render"),
}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_cannot_move_its_parents_environments(make_vec: Any, workers: int) -> None:
    envs, twin = (make_vec(2, workers=workers, script=[(9, LIMIT)]) for _ in range(2))
    for each in (envs, twin):
        each.reset(seed=0)
        each.step(ACTIONS)
    for name, use in USES.items():
        text = in_fork(lambda use=use: use(envs))
        assert text.startswith(f"{name}()") or name in ("step", "call"), text
        assert "a fork of process" in text and "make new ones" in text, text
    assert in_fork(envs.close) == ""
    assert_same(envs.step(ACTIONS), twin.step(ACTIONS))
