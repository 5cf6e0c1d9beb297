"""ActionChunk by hand-computed tables, FrozenVLAObservation with a counting VLA and with mini."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stub_envs import LIMIT, SUCCESS, StubEnv
from trees import assert_same

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, InvalidActionError
from vla_gym.vla import FrozenVLA, VLAOutput
from vla_gym.wrappers import ActionChunk, FrozenVLAObservation


@pytest.mark.parametrize(
    ("script", "reward", "terminated", "truncated", "executed"),
    [
        # A step's reward is a quarter of its number: (1 + 0.5 * 2 + 0.25 * 3) / 4
        ([(9, LIMIT)], 0.6875, False, False, 3),
        # (1 + 0.5 * 2) / 4, and 0.5 for the success in the second step
        ([(2, SUCCESS)], 1.0, True, False, 2),
        ([(1, LIMIT)], 0.25, False, True, 1),
    ],
)
def test_action_chunk_table(script, reward, terminated, truncated, executed):
    env = ActionChunk(StubEnv(script=script), 3, gamma=0.5)
    env.reset(seed=0)
    result = env.step(np.zeros((3, 3), np.float32))
    assert result[1:4] == (reward, terminated, truncated)
    assert result[0]["proprio"][2] == executed and result[4]["elapsed_steps"] == 4 * executed
    assert result[4]["executed_steps"] == executed and result[4]["discount"] == 0.5**executed


def test_action_chunk_refuses_bad_input():
    env = ActionChunk(StubEnv(), 3)
    env.reset(seed=0)
    for action in (np.zeros((2, 3)), np.full((3, 3), np.nan), None, "abc", [[0, 0], [0]]):
        with pytest.raises(InvalidActionError):
            env.step(action)
    assert env.unwrapped.count == 0
    for chunk_len in (0, 10**8):
        with pytest.raises(ConfigError, match=r"chunk_len must be in 1\.\.1000"):
            ActionChunk(StubEnv(), chunk_len)
    for gamma in (0.0, 1.5, "x", True):
        with pytest.raises(ConfigError, match="gamma"):
            ActionChunk(StubEnv(), 3, gamma=gamma)


def test_action_chunk_equals_the_native_chunk():
    kwargs = {"task_ids": 7, "image_size": 32, "max_control_steps": 10}
    native = LiberoEnv("goal", chunk_len=4, gamma=0.9, **kwargs)
    wrapped = ActionChunk(LiberoEnv("goal", **kwargs), 4, gamma=0.9)
    assert native.action_space == wrapped.action_space
    rng = np.random.default_rng(1)
    for env in (native, wrapped):
        env.reset(seed=2)
    assert native.metadata["render_fps"] == 5.0
    undiscounted = ActionChunk(LiberoEnv("goal", gamma=0.9, **kwargs), 4)
    undiscounted.reset(seed=2)
    info = undiscounted.step(undiscounted.action_space.sample())[4]
    assert info["executed_steps"] == 4 and "discount" not in info
    for _ in range(3):
        action = rng.uniform(-1, 1, (4, 7)).astype(np.float32)
        result = native.step(action)
        assert_same(wrapped.step(action), result)
    assert result[3] and result[4]["executed_steps"] == 2


class FakeVLA(FrozenVLA):
    """Returns what it was given, so that the wrapper's wiring can be read off."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "fake", 8, 2, 4, 32

    def infer(self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray):
        assert set(images) == {"agentview", "wrist"} and images["wrist"].dtype == np.uint8
        self.seen = (images, instructions, proprio)
        mean = float(images["agentview"].mean())
        hidden = torch.full((1, 2, 4), mean)
        return VLAOutput(
            hidden=hidden, actions=torch.linspace(-2, 2, 8)[None, :, None].repeat(1, 1, 7)
        )


@pytest.fixture(scope="module")
def chunked():
    env = LiberoEnv("goal", task_ids=8, image_size=32, chunk_len=4)
    yield env
    env.close()


def test_frozen_vla_cuts_and_clips_the_chunk_and_passes_everything_on(chunked):
    vla = FakeVLA()
    env = FrozenVLAObservation(chunked, vla=vla, rl_token=None)
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert obs["vla_action"].shape == (4, 7) and obs["vla_action"].min() == -1.0
    assert vla.seen[1] == [info["instruction"]] == ["put the bowl on the plate"]
    np.testing.assert_array_equal(vla.seen[2][0], obs["proprio"])
    assert obs["rl_token"] == pytest.approx(vla.seen[0]["agentview"].mean())


def test_frozen_vla_refuses_what_does_not_fit(chunked):
    for kwargs, match in (
        ({"chunk_len": 9}, "horizon"),
        ({}, "chunk_len"),
        ({"chunk_len": 4, "cameras": ()}, "cameras"),
    ):
        with pytest.raises(ConfigError, match=match):
            FrozenVLAObservation(LiberoEnv("goal", **kwargs), vla=FakeVLA(), rl_token=None)
    with pytest.raises(ConfigError, match="hidden"):
        FrozenVLAObservation(chunked, vla=FakeVLA(), rl_token="mini")


@pytest.mark.parametrize(
    ("hidden", "actions", "problem"),
    [
        ((1, 2, 4), (1, 2, 7), r"\(1, 8, 7\)\) .*VLAOutput with tensors \(\(1, 2, 4\), \(1, 2, 7"),
        ((1, 4), (1, 8, 7), "as its attributes say"),  # pooled: its mean would fill the token
        ((2, 2, 4), (2, 8, 7), "as its attributes say"),
        (None, (1, 8, 7), r"tensors \(\(1, 8, 7\),\)"),
    ],
)
def test_what_a_vla_returns_is_checked(chunked, monkeypatch, hidden, actions, problem):
    parts = [None if shape is None else torch.zeros(shape) for shape in (hidden, actions)]
    monkeypatch.setattr(FakeVLA, "infer", lambda *_: VLAOutput(*parts))
    with pytest.raises(ConfigError, match=problem):
        FrozenVLAObservation(chunked, vla=FakeVLA(), rl_token=None).reset(seed=0)


def test_a_vla_may_return_bfloat16(chunked, monkeypatch):
    hidden, actions = torch.ones(1, 2, 4).bfloat16(), torch.zeros(1, 8, 7).bfloat16()
    monkeypatch.setattr(FakeVLA, "infer", lambda *_: VLAOutput(hidden, actions))
    env = FrozenVLAObservation(chunked, vla=FakeVLA(), rl_token=None)
    assert env.reset(seed=0)[0]["rl_token"].tolist() == [1.0] * 4


def test_frozen_vla_refuses_infos_without_an_instruction(chunked):
    class Silent(gym.Wrapper):
        def reset(self, **kwargs):
            return self.env.reset(**kwargs)[0], {}

    with pytest.raises(ConfigError, match="put its instruction into info"):
        FrozenVLAObservation(Silent(chunked), vla=FakeVLA(), rl_token=None).reset(seed=0)


def test_libero_vla_passes_both_checkers(recwarn) -> None:
    env: Any = gym.make("LiberoVLA-goal-v0", task_ids=8, gamma=0.99)
    check_env(env.env, skip_render_check=True)
    sb3_check_env(env, warn=True)
    obs, info = env.reset(seed=0)
    assert obs["rl_token"].shape == (256,) and obs["vla_action"].shape == (8, 7)
    assert info["instruction"] == "put the bowl on the plate"
    env.close()
