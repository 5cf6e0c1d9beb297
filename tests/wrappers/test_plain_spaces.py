"""PlainSpaces: by hand, and one environment against many in every autoreset mode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vector_reference import by_mode, play_alike

import vla_gym  # noqa: F401  (registers the ids)
from vla_gym.errors import ConfigError, InvalidActionError
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers import PlainSpaces
from vla_gym.wrappers.vector import PlainSpaces as VectorPlainSpaces

VLA = {"vla": "mini-few", "assets": "lite", "task_ids": 8, "max_control_steps": 16}


class CountingEnv(gym.Env):
    """Observes its seed, its steps and its last action; episodes end after 2 and 3 steps by turns.

    Those of 2 steps terminate, those of 3 are truncated.
    """

    observation_space = spaces.Dict(
        {
            "grid": spaces.Box(-9, 999, (2, 2), np.float64),
            "kind": spaces.Discrete(3, start=1),
            "bits": spaces.MultiBinary(2),
        }
    )
    action_space = spaces.Box(-1, 1, (2, 3), np.float32)

    def __init__(self) -> None:
        self.episode, self.number = -1, 0

    def reset(self, *, seed=None, options=None):
        del options
        super().reset(seed=seed)
        if seed is not None:
            self.number, self.episode = seed, -1
        self.episode, self.t, self.sum = self.episode + 1, 0, 0.0
        return self._obs(), self._info()

    def step(self, action):
        assert action.shape == (2, 3)
        # Row after row: of another order another sum.
        self.t, self.sum = self.t + 1, float((action * [[1, 2, 3], [4, 5, 6]]).sum())
        odd = self.episode % 2 == 1
        return self._obs(), self.sum, self.t == 2 and not odd, self.t == 3 and odd, self._info()

    def get_state(self):
        return self.number, self.episode, self.t, self.sum

    def set_state(self, state):
        self.number, self.episode, self.t, self.sum = state
        return self._obs()

    def _obs(self):
        grid = np.array([[self.number, self.episode], [self.t, self.sum]])
        bits = np.array([self.t % 2, 1], np.int8)
        return {"grid": grid, "kind": np.int64(1 + self.t % 3), "bits": bits}

    def _info(self):
        return {"instruction": f"episode {self.episode}", "elapsed": self.t}


def make_vector(mode: AutoresetMode, ours: bool, **kwargs: Any) -> VectorPlainSpaces:
    if ours:
        envs: Any = LiberoVectorEnv(
            2, workers=0, env_factory=lambda _: CountingEnv(), autoreset_mode=mode, copy=False
        )
    else:
        envs = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=mode)
    return VectorPlainSpaces(envs, **kwargs)


def texts(infos: Any) -> list[str]:
    """Return all strings in nested infos."""
    if isinstance(infos, dict):
        return [text for value in infos.values() for text in texts(value)]
    return [value for value in np.atleast_1d(np.asarray(infos, object)) if isinstance(value, str)]


def test_by_hand():
    env = PlainSpaces(CountingEnv(), obs_keys=("kind", "grid", "bits"), string_infos=False)
    low, high = [0, 0, 0, -9, -9, -9, -9, 0, 0], [1, 1, 1, 999, 999, 999, 999, 1, 1]
    expected = spaces.Box(np.float32(low), np.float32(high), dtype=np.float32)
    assert env.observation_space == expected and env.action_space.shape == (6,)
    obs, info = env.reset(seed=7)
    assert obs.tolist() == [1, 0, 0, 7, 0, 0, 0, 0, 1] and obs.dtype == np.float32
    assert info == {"elapsed": 0}
    action = np.float32([1, 0, 0, 0, 0.5, 0])
    obs, reward, *_ = env.step(action)
    assert obs.tolist() == [0, 1, 0, 7, 0, 1, 3.5, 1, 1] and reward == 3.5
    assert env.set_state(env.get_state()).tolist() == obs.tolist()
    check_env(PlainSpaces(CountingEnv()), skip_render_check=True)


def test_dict_with_chosen_keys_keeps_order_and_actions():
    env = PlainSpaces(CountingEnv(), flat=False, obs_keys=["kind", "bits"])
    obs, info = env.reset(seed=0)
    assert list(env.observation_space.spaces) == list(obs) == ["kind", "bits"]
    assert env.action_space == CountingEnv.action_space and info["instruction"] == "episode 0"
    envs = make_vector(AutoresetMode.SAME_STEP, True, flat=False, obs_keys=["kind"])
    envs.reset(seed=0)
    for _ in range(2):
        obs, _, _, _, infos = envs.step(envs.action_space.sample())
    assert list(obs) == ["kind"] and [list(final) for final in infos["final_obs"]] == [["kind"]] * 2


@pytest.mark.parametrize("ours", [True, False])
@by_mode
def test_rows_are_those_of_single_environments(mode, ours):
    kwargs = {"obs_keys": ("bits", "kind", "grid"), "string_infos": False}
    envs = make_vector(mode, ours, **kwargs)
    single = lambda: PlainSpaces(CountingEnv(), **kwargs)  # noqa: E731
    expected = SyncVectorEnv([single] * 2, autoreset_mode=mode)
    finals = 0
    for result in play_alike(envs, expected, 5, steps=12):
        assert envs.observation_space.contains(result[0]) and not texts(result[4])
        finals += sum(final is not None for final in result[4].get("final_obs", ()))
    assert finals == (10 if mode == AutoresetMode.SAME_STEP else 0)


def test_send_recv_and_states():
    envs = make_vector(AutoresetMode.NEXT_STEP, True)
    start, _ = envs.reset(seed=3)
    states = envs.get_state()
    envs.send(np.ones((1, 6), np.float32), [1])
    obs, rewards, *_, infos = envs.recv()
    assert infos["env_id"].tolist() == [1] and obs.shape == (1, 9) and rewards[0] == 21
    np.testing.assert_array_equal(envs.set_state(states), start)
    envs.step_async(np.ones((2, 6), np.float32))
    assert envs.step_wait()[1].tolist() == [21, 21]
    gymnasiums = make_vector(AutoresetMode.NEXT_STEP, False)
    assert not hasattr(gymnasiums, "send") and not hasattr(gymnasiums, "set_state")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"flat": "yes"}, "flat must be True or False, got 'yes'"),
        ({"string_infos": None}, "string_infos must be"),
        ({"obs_keys": "grid"}, "must be a sequence of some of bits, grid, kind; got 'grid'"),
        ({"obs_keys": ()}, "must be a sequence"),
        ({"obs_keys": ("grid", "depth")}, r"Unknown obs_keys \['depth'\]: .* bits, grid, kind"),
        ({"obs_keys": ("grid", "grid")}, "must be different"),
    ],
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        PlainSpaces(CountingEnv(), **kwargs)
    with pytest.raises(ConfigError, match=message):
        make_vector(AutoresetMode.NEXT_STEP, True, **kwargs)


def test_wrong_environments_and_actions():
    with pytest.raises(ConfigError, match="Expected a Dict observation"):
        PlainSpaces(PlainSpaces(CountingEnv()))

    class Other(CountingEnv):
        action_space = spaces.Discrete(2)

    with pytest.raises(ConfigError, match="expects a Box action"):
        PlainSpaces(Other())

    class Texts(CountingEnv):
        observation_space = spaces.Dict({"words": spaces.Text(5), "grid": spaces.Box(0, 1)})

    with pytest.raises(ConfigError, match="'words'.*leave it out with obs_keys"):
        PlainSpaces(Texts())
    env, envs = PlainSpaces(CountingEnv()), make_vector(AutoresetMode.NEXT_STEP, True)
    env.reset(seed=0)
    envs.reset(seed=0)
    with pytest.raises(InvalidActionError, match=r"shape \(6,\), got \(2, 3\)"):
        env.step(np.zeros((2, 3), np.float32))
    with pytest.raises(InvalidActionError, match=r"shape \(2, 6\), got \(6,\)"):
        envs.step(np.zeros(6, np.float32))
    with pytest.raises(InvalidActionError, match="real numbers"):
        env.step([0.0, [1.0, 2.0]])
    with pytest.raises(ConfigError, match="Reset options must be a dict"):
        envs.reset(options=[1])


def test_libero_vla():
    """``flat=True`` in make and make_vec: the same numbers, and what the Dict holds."""
    keys = ("rl_token", "proprio", "vla_action", "task_id")
    kwargs = {**VLA, "flat": True, "obs_keys": keys, "string_infos": False}
    single = gym.make("LiberoVLA-goal-v0", **kwargs)
    plain = gym.make("LiberoVLA-goal-v0", **VLA)
    envs = gym.make_vec("LiberoVLA-goal-v0", 2, workers=0, autoreset_mode="SameStep", **kwargs)
    size = 7 * 8
    assert single.action_space == envs.single_action_space and single.action_space.shape == (size,)
    assert single.observation_space == envs.single_observation_space
    inside, _ = plain.reset(seed=1)
    obs, info = single.reset(seed=1)
    parts = [inside["rl_token"], inside["proprio"], inside["vla_action"].reshape(-1), np.eye(10)[8]]
    np.testing.assert_array_equal(obs, np.concatenate(parts).astype(np.float32))
    assert single.observation_space.contains(obs) and not texts(info)
    rows, infos = envs.reset(seed=1)
    np.testing.assert_allclose(rows[0], obs, atol=1e-4)  # batched matrix products round otherwise
    assert not texts(infos)
    for _ in range(2):
        action = obs[-10 - size : -10]
        inside, *_ = plain.step(action.reshape(8, 7))
        obs, _, terminated, truncated, _ = single.step(action)
        rows, _, terminations, truncations, infos = envs.step(np.stack([action, action]))
    assert truncated and not terminated and truncations.all() and not terminations.any()
    np.testing.assert_array_equal(obs[-10 - size : -10], inside["vla_action"].reshape(-1))
    np.testing.assert_allclose(infos["final_obs"][0], obs, atol=1e-4)
    assert envs.observation_space.contains(rows) and not texts(infos)
    for made in (single, plain, envs):
        made.close()
