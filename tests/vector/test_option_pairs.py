"""Options drawn at random together: what one of them does must not undo another.

Each draw is a vector env with some of everything, compared with single environments, and its
states are put back in another order. ``OPTION_DRAWS=200`` tries more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from memory_vla import GRUVLA
from on_policy_toys import tiny_vla
from vector_reference import (
    DISABLED,
    MODES,
    Follower,
    Reference,
    assert_same,
    copied,
    follow,
    random_action,
    rows,
)

from vla_gym.envs.libero import LiberoEnv
from vla_gym.remote.shards import ThreadHosts
from vla_gym.remote.vector_env import RemoteVectorEnv
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers.make import make_libero_vla_vec

pytestmark = pytest.mark.usefixtures("warm_server")

NUM_ENVS = 4
DRAWS = range(3, 3 + 7 * int(os.environ.get("OPTION_DRAWS", "2")), 7)
#: Tasks by suite; those of several suites count on from one suite to the next.
SUITES: list[tuple[Any, list[int]]] = [
    ("goal", [7, 8]),
    ("object", [0, 4]),
    (["goal", "spatial"], [2, 13]),
]
#: Options of a single environment, the first value the usual one.
OPTIONS: dict[str, list[Any]] = {
    "variation": [None, "mild", "strong"],
    "scene_reset_interval": [1, 2],
    "cameras": [None, ("wrist",), ("wrist", "agentview"), ()],
    "depth": [False, True],
    "segmentation": [False, True],
    "observation_timing": ["libero", "end"],
    "init_states": ["sampled", "official", (3, 1)],
    "task_sampling": ["uniform", "round_robin", "balanced"],
    "group_size": [1, 2],
    "chunk_len": [4, None, 8],
    "max_control_steps": [18, 24],
    "reward": ["sparse", "staged"],
    "settle_steps": [None, 0],
    "settle_gripper": [None, 0.5],
    "physics": ["fast", "exact"],
    "visual_profile": [None, "libero", "coarse"],
    "scene_cache_size": [10, 1],
    "gamma": [None, 0.9],
    "render_mode": [None, "rgb_array"],
}


def draw(rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    """Each option has its usual value half of the time."""
    suite, task_ids = SUITES[rng.integers(len(SUITES))]
    usual = {name: rng.random() < 0.5 for name in OPTIONS}
    options = {
        name: values[0 if usual[name] else rng.integers(len(values))]
        for name, values in OPTIONS.items()
    }
    if options["variation"] is None:
        options["scene_reset_interval"] = 1
    if options["cameras"] == ():
        options |= {"depth": False, "segmentation": False}
    return suite, {"task_ids": task_ids, "image_size": 32, **options}


@pytest.mark.parametrize("number", DRAWS)
def test_options_drawn_together(number):
    rng = np.random.default_rng([number, 5])
    suite, options = draw(rng)
    mode = MODES[rng.integers(3)]
    make: Callable[..., LiberoVectorEnv] = LiberoVectorEnv
    workers = int(rng.choice([0, 2, 3]))
    if rng.random() < 0.4:
        make, workers = partial(RemoteVectorEnv, hosts=ThreadHosts(2)), 0
    singles = [LiberoEnv(suite, env_index=i, **options) for i in range(NUM_ENVS)]
    references = [
        Reference(env, 40 + i, partial(random_action, i, env.action_space.shape))
        for i, env in enumerate(singles)
    ]
    expected = Follower(references, mode)
    envs = make(NUM_ENVS, suite, workers=workers, autoreset_mode=mode, **options)
    try:
        follow(envs, expected, 40, episodes=2, stagger=[1])
        assert_states_return(envs, rng)
    finally:
        envs.close()
        for env in singles:
            env.close()


def assert_states_return(envs: Any, rng: np.random.Generator) -> None:
    """Some environments go on from their states, given in another order, as they did."""
    envs.reset(seed=7)
    given = rng.uniform(-1, 1, (2, *envs.action_space.shape)).astype(np.float32)
    envs.step(given[0])
    ids = rng.permutation(NUM_ENVS)[: rng.integers(3, NUM_ENVS + 1)]
    states = envs.get_state(ids)
    once = copied(envs.step(given[1])[:4])
    envs.set_state(states, ids)
    again = envs.step(given[1])[:4]
    assert_same(chosen(again, ids), chosen(once, ids))


def chosen(result: Sequence[Any], ids: np.ndarray) -> list[Any]:
    return [rows(value, ids) for value in result]


#: Options of what the VLA's wrapper shows.
SHOWN: dict[str, list[Any]] = {
    "keep_images": [False, True],
    "keep_inputs": [False, True],
    "flat": [False, True],
    "obs_keys": [None, ("vla_action", "rl_token")],
    "string_infos": [True, False],
    "rl_token": [None, "mean"],
}


@pytest.mark.parametrize("number", DRAWS)
def test_options_of_a_vla_drawn_together(number):
    """Beside the environments on two hosts or here: the same."""
    rng = np.random.default_rng([number, 6])
    suite, options = draw(rng)
    options |= {"image_size": 64, "cameras": None, "chunk_len": int(rng.choice([4, 8]))}
    options |= {name: values[rng.integers(len(values))] for name, values in SHOWN.items()}
    mode = MODES[rng.integers(3)]
    both = []
    try:
        for hosts in (None, ThreadHosts(2)):
            vla = GRUVLA(tiny_vla(), row_by_row=True)
            more = {"vla": vla, "hosts": hosts, "workers": 0, "autoreset_mode": mode}
            both.append(make_libero_vla_vec(suite, NUM_ENVS, **options, **more))
        assert both[0].single_observation_space == both[1].single_observation_space
        assert_same(*(envs.reset(seed=9) for envs in both))
        over = np.zeros(NUM_ENVS, bool)
        for _ in range(6):
            reset = over if mode == DISABLED else np.zeros(NUM_ENVS, bool)
            reset |= rng.random(NUM_ENVS) < 0.2
            if reset.any():
                mask = {"reset_mask": reset}
                assert_same(*(copied(envs.reset(options=mask)) for envs in both))
            given = rng.uniform(-1, 1, both[0].action_space.shape).astype(np.float32)
            results = [copied(envs.step(given)) for envs in both]
            assert_same(*results)
            over = results[0][2] | results[0][3]
        for envs in both:
            assert_states_return(envs, np.random.default_rng(number))
    finally:
        for envs in both:
            envs.close()
