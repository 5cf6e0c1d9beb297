"""Numbers that decide memory or time, seeds and actions: refused before anything is allocated."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stub_envs import stub_factory

import vla_gym  # noqa: F401  (registers the environments)
from vla_gym import memory
from vla_gym.errors import ConfigError, InvalidActionError, NotEnoughMemoryError, VlaGymError
from vla_gym.vector.vector_env import LiberoVectorEnv
from vla_gym.wrappers import ActionChunk


def toy_vector(num_envs: int = 2, **options: Any) -> LiberoVectorEnv:
    return LiberoVectorEnv(num_envs, env_factory=stub_factory(), workers=0, **options)


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: gym.make("Libero-goal-v0", chunk_len=10**8), "chunk_len must be in 1..1000"),
        (lambda: ActionChunk(gym.make("Libero-goal-v0"), 10**8), "chunk_len must be in 1..1000"),
    ],
)
def test_numbers_are_bounded_before_anything_is_allocated(
    make: Callable[[], Any], expected: str
) -> None:
    begun = time.perf_counter()
    with pytest.raises(VlaGymError, match=expected):
        make()
    assert time.perf_counter() - begun < 10.0


def test_a_table_that_does_not_fit_is_refused_with_both_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy_vector().close()
    monkeypatch.setattr(memory, "free_ram", lambda: 100)
    with pytest.raises(NotEnoughMemoryError, match="2 environments takes about .* free"):
        toy_vector()


SEEDS = ["ab", -1, [0.5, 1], [2**200, 1], True, [1], 1j]


@pytest.mark.parametrize("seed", SEEDS, ids=[str(seed)[:20] for seed in SEEDS])
def test_a_bad_seed_of_a_vector_environment_is_refused(seed: Any) -> None:
    envs = toy_vector()
    with pytest.raises(ConfigError, match="seed"):
        envs.reset(seed=seed)
    envs.reset(seed=3)
    envs.close()


@pytest.mark.parametrize("seed", [0.5, -1, 2**200, True])
def test_a_bad_seed_of_a_single_environment_is_refused(seed: Any) -> None:
    env = gym.make("Libero-goal-v0", assets="lite", disable_env_checker=True)
    with pytest.raises(ConfigError, match="seed"):
        env.unwrapped.reset(seed=seed)


@pytest.fixture(scope="module")
def single() -> Any:
    env = gym.make("Libero-goal-v0", assets="lite", image_size=16, disable_env_checker=True)
    env.reset(seed=0)
    yield env
    env.close()


ACTIONS = [
    np.zeros(7, complex),
    [0, 0, 0, 0, 0, 0, [1, 2]],
    {"a": 1},
    np.full(7, np.nan),
    np.zeros(6),
    np.zeros((1, 7)),
]


@pytest.mark.parametrize("action", ACTIONS, ids=[str(i) for i in range(len(ACTIONS))])
def test_a_bad_action_is_refused_before_anything_moves(action: Any, single: Any) -> None:
    before = single.unwrapped.sim.qpos.copy()
    with pytest.raises(InvalidActionError):
        single.unwrapped.step(action)
    with pytest.raises(InvalidActionError):
        single.unwrapped.sim.step(action)
    np.testing.assert_array_equal(single.unwrapped.sim.qpos, before)
