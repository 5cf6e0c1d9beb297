"""A stateful VLA in the vector FrozenVLAObservation: its state against the single wrapper's."""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from memory_vla import GRUVLA, STATE
from on_policy_toys import tiny_vla
from picture_env import PictureEnv
from trees import assert_same
from vector_reference import DISABLED, NEXT_STEP, SAME_STEP, by_autoreset, by_mode, play_alike, rows

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers import FrozenVLAObservation
from vla_gym.wrappers.vector import FrozenVLAObservation as VectorFrozenVLAObservation

SEED, SIZE = 5, 64
ACTION = np.zeros((2, 7), np.float32)

pytestmark = pytest.mark.usefixtures("warm_server")


def make_vla() -> GRUVLA:
    return GRUVLA(tiny_vla(), row_by_row=True)


def make_vector(mode: AutoresetMode, num_envs: int = 3, workers: int = 0, length: int = 0) -> Any:
    class Pictures(PictureEnv):
        def reset(self, **kwargs):
            result = super().reset(**kwargs)
            self.length = length or self.length
            return result

    envs = LiberoVectorEnv(
        num_envs,
        workers=workers,
        env_factory=lambda _: Pictures(size=SIZE),
        autoreset_mode=mode,
        copy=False,
    )
    return VectorFrozenVLAObservation(envs, make_vla(), rl_token=None)


@by_mode
def test_each_environment_remembers_as_a_single_one(mode):
    """Over several episodes, final observations included."""
    envs = make_vector(mode)
    singles = [lambda: FrozenVLAObservation(PictureEnv(size=SIZE), make_vla(), rl_token=None)] * 3
    expected = SyncVectorEnv(singles, autoreset_mode=mode)
    ended = np.zeros(3, int)
    for result in play_alike(envs, expected, SEED, steps=14):
        for i, env in enumerate(expected.envs):
            assert_same(envs.features.memory.save(i), env.features.memory.save(0))
        ended += result[2] | result[3]
    assert ended.min() >= 3
    envs.close()


@by_autoreset
def test_send_and_recv_go_on_with_the_rows_that_are_returned(mode):
    envs = make_vector(mode, num_envs=3, length=3)
    envs.reset_send(seed=SEED)
    envs.recv(3, timeout=60)

    def frames_after(ids):
        if ids is not None:
            envs.send(np.stack([ACTION] * len(ids)), ids)
            envs.recv(len(ids), timeout=60)
        return [envs.features.memory.save(i)["frames"] for i in range(3)]

    assert [frames_after(ids) for ids in (None, [0], [0, 2], [2])] == [
        [1, 1, 1],
        [2, 1, 1],
        [3, 1, 2],
        [3, 1, 3],
    ]
    envs.reset_send([2])  # in the middle of its episode
    envs.recv(1, timeout=60)
    assert frames_after(None) == [3, 1, 1]
    # The end of 0's episode, and the beginning of its next one.
    for expected in ([4, 1, 1], [1, 1, 1])[mode is SAME_STEP :]:
        assert frames_after([0]) == expected
    envs.close()


@by_mode
def test_a_worker_that_died_begins_anew(mode):
    envs = make_vector(mode, num_envs=2, workers=2, length=9)
    memory = envs.features.memory
    envs.reset(seed=SEED)
    last, *_ = envs.step(np.stack([ACTION] * 2))
    before = memory.save(1)
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        obs, _, _, truncations, infos = envs.step(np.stack([ACTION] * 2))
    assert truncations.tolist() == [False, True]
    # It ends at the frame that was seen before: the VLA does not see it a second time.
    final = infos["final_obs"][1] if mode is SAME_STEP else rows(obs, 1)
    assert_same(final, rows(last, 1))
    if mode is not SAME_STEP:
        np.testing.assert_array_equal(memory.save(1)["h"], before["h"])
    if mode is NEXT_STEP:
        envs.step(np.stack([ACTION] * 2))
    if mode is DISABLED:
        envs.reset(options={"reset_mask": truncations})
    assert memory.save(1)["frames"] == 1
    assert memory.save(0)["frames"] == (4 if mode is NEXT_STEP else 3)
    envs.close()


LIBERO: dict[str, Any] = {
    "task_ids": [2, 8],
    "chunk_len": 4,
    "image_size": 64,
    "max_control_steps": 12,
    "rl_token": None,
}


def libero(num_envs: int, mode: AutoresetMode = NEXT_STEP, **kwargs: Any) -> Any:
    kwargs = {"vla": make_vla(), "autoreset_mode": mode, "workers": 0} | kwargs
    return gym.make_vec("LiberoVLA-goal-v0", num_envs=num_envs, **LIBERO, **kwargs)


def played(envs: Any, obs: dict[str, np.ndarray], steps: int) -> list[Any]:
    """Play the VLA's own chunks; return observations and states."""
    looks = [obs]
    for _ in range(steps):
        obs, *_ = envs.step(obs["vla_action"])
        states = [envs.features.memory.save(i) for i in range(envs.num_envs)]
        looks += [obs, {name: np.stack([s[name] for s in states]) for name in states[0]}]
    return looks


@pytest.mark.parametrize("steps", [2, 3])
def test_a_saved_state_goes_on_bit_for_bit(steps):
    """In the middle of an episode, and at its end, where a reset is due; in other rows."""
    envs = libero(2)
    obs, _ = envs.reset(seed=1)
    first = played(envs, obs, steps)[-2]
    states = pickle.loads(pickle.dumps(envs.get_state()))
    expected = played(envs, first, 4)
    envs.close()
    others = libero(3)
    others.reset(seed=77)
    calls = others.features.memory.vla
    calls.infer_with_state = None  # nothing is looked at: it could only be looked at otherwise
    restored = others.set_state([states[1], states[0]], [0, 2])
    del calls.infer_with_state
    assert_same([rows(look, [2, 0]) for look in played(others, restored, 4)], expected)
    assert 1 in [look["frames"][0] for look in expected[2::2]]  # an episode began meanwhile
    others.close()


def test_the_single_environments_state_goes_on_bit_for_bit():
    env, other = (gym.make("LiberoVLA-goal-v0", vla=make_vla(), **LIBERO) for _ in range(2))
    obs, _ = env.reset(seed=3)
    obs, *_ = env.step(obs["vla_action"])
    state = pickle.loads(pickle.dumps(env.get_wrapper_attr("get_state")()))
    other.reset(seed=50)
    again = other.get_wrapper_attr("set_state")(state)
    for _ in range(2):
        assert_same(again, obs)
        obs, *_ = env.step(obs["vla_action"])
        again, *_ = other.step(again["vla_action"])
    env.close()
    other.close()


def test_states_with_and_without_a_memory():
    envs, plain = libero(1), libero(1, vla=tiny_vla())
    for one in (envs, plain):
        one.reset(seed=1)
    remembering, states = envs.get_state(), plain.get_state()
    before = envs.features.memory.save(0)
    with pytest.raises(ConfigError, match="this EnvRowState was saved without one"):
        envs.set_state(states)
    other = [pickle.loads(pickle.dumps(remembering[0]))]
    kept = other[0].kept
    kept["memory"]["h"] = np.zeros(STATE + 1)
    with pytest.raises(ConfigError, match="belongs to another VLA"):
        envs.set_state(other)
    kept["memory"]["h"], kept["made"]["vla_action"] = before["h"], np.zeros((8, 7))
    with pytest.raises(ConfigError, match="saved with other observations"):
        envs.set_state(other)
    np.testing.assert_array_equal(envs.features.memory.save(0)["h"], before["h"])
    # A VLA without a state takes both, and looks at the frame.
    expected = plain.set_state(states)
    assert_same(plain.set_state(remembering), expected)
    envs.close()
    plain.close()


def test_what_is_refused():
    with pytest.raises(ConfigError, match="leave out the stride"):
        libero(1, stride=2)
    envs = VectorFrozenVLAObservation(
        SyncVectorEnv([lambda: PictureEnv(size=SIZE)]), make_vla(), rl_token=None
    )
    envs.reset(seed=0)
    for name in ("get_state", "set_state", "begin"):
        assert not hasattr(envs, name)  # as the environments below
