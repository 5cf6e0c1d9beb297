"""The vector FrozenVLAObservation against the single one, in every autoreset mode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from vla_gym.env import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.vla.base import VLAOutput
from vla_gym.wrappers import FrozenVLAObservation
from vla_gym.wrappers.vector import FrozenVLAObservation as VectorFrozenVLAObservation

NEXT_STEP, SAME_STEP, DISABLED = (
    AutoresetMode.NEXT_STEP,
    AutoresetMode.SAME_STEP,
    AutoresetMode.DISABLED,
)
INSTRUCTIONS = ("open the drawer", "push the plate", "turn on the stove")


class PictureEnv(gym.Env):
    """LIBERO's spaces without a simulator: pictures that tell seed, episode and step apart."""

    def __init__(self, size: int = 4, chunk_len: int = 2) -> None:
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "agentview": image,
                "wrist": image,
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(len(INSTRUCTIONS)),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, 7), np.float32)
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        del options
        super().reset(seed=seed)
        if seed is not None:
            self.episode = 0
        self.episode += 1
        self.task = int(self.np_random.integers(len(INSTRUCTIONS)))
        self.length = int(self.np_random.integers(1, 4))
        self.t = 0
        return self._observe(), self._info()

    def step(self, action):
        assert np.shape(action) == self.action_space.shape
        self.t += 1
        ends = self.t == self.length
        success = ends and self.task == 0
        return self._observe(), float(success), success, ends and not success, self._info()

    def _observe(self):
        shape = self.observation_space["agentview"].shape
        draw = self.np_random.integers
        return {
            "agentview": draw(256, size=shape, dtype=np.uint8),
            "wrist": draw(256, size=shape, dtype=np.uint8),
            "proprio": np.full(8, 10 * self.episode + self.t, np.float32),
            "task_id": np.int64(self.task),
        }

    def _info(self):
        return {"instruction": INSTRUCTIONS[self.task], "t": self.t}


class StagedEnv(PictureEnv):
    """Asks for something else at every step, so that each frame has an instruction of its own."""

    def _info(self):
        info = super()._info()
        return info | {"instruction": f"{self.t} x {info['instruction']}" + self.t * "!"}


class RowVLA:
    """Tells by its output which picture, instruction and proprio each row had; counts its calls."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "rows", 8, 2, 3, 4

    def __init__(self) -> None:
        self.batches: list[int] = []

    def infer(self, images, instructions, proprio):
        self.batches.append(len(instructions))
        assert all(type(instruction) is str for instruction in instructions)
        rows = [
            (float(left.mean()), float(right.mean()) + len(instruction), float(state[0]))
            for left, right, instruction, state in zip(
                images["agentview"], images["wrist"], instructions, proprio, strict=True
            )
        ]
        hidden = torch.tensor(rows)[:, None].repeat(1, 2, 1)
        return VLAOutput(hidden, torch.sin(hidden[:, :1, :1]).repeat(1, 8, 7))


class Views(SyncVectorEnv):
    """Hands out arrays that the next call overwrites, as shared memory does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, copy=False, **kwargs)

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        self.handed = (obs, rewards, terminations, truncations, infos)
        return self.handed

    def scramble(self):
        """Overwrite all that the last step handed out."""
        obs, *flags, infos = self.handed
        for array in [*obs.values(), *flags, *_arrays(infos)]:
            if array.dtype != object:
                array[...] = 77
        for final in infos.get("final_obs", ()):
            for array in [] if final is None else final.values():
                if isinstance(array, np.ndarray):
                    array[...] = 77


def _arrays(infos: dict[str, Any]) -> list[np.ndarray]:
    nested = [_arrays(value) for value in infos.values() if isinstance(value, dict)]
    return [value for value in infos.values() if isinstance(value, np.ndarray)] + sum(nested, [])


def make_vector(
    mode: AutoresetMode, num_envs: int = 3, keep_images: bool = False, env: Any = PictureEnv
) -> VectorFrozenVLAObservation:
    envs = Views([env] * num_envs, autoreset_mode=mode)
    return VectorFrozenVLAObservation(envs, RowVLA(), rl_token=None, keep_images=keep_images)


def assert_equal_trees(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts, object arrays of dicts and arrays, dtypes included."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_equal_trees(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, tuple) or (
        isinstance(expected, np.ndarray) and expected.dtype == object
    ):
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal_trees(one, other, f"{where}[{i}]")
    elif isinstance(expected, np.ndarray | np.generic):
        assert actual.dtype == expected.dtype, where
        np.testing.assert_array_equal(actual, expected, err_msg=where)
    else:
        assert actual == expected, where


@pytest.mark.parametrize("keep_images", [False, True])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_equals_gymnasiums_vector_of_single_wrappers(mode: AutoresetMode, keep_images: bool):
    """Every array, dtype, mask and final observation, also after the inner arrays changed."""
    envs = make_vector(mode, keep_images=keep_images, env=StagedEnv)

    def single() -> gym.Env:
        return FrozenVLAObservation(
            StagedEnv(), vla=RowVLA(), rl_token=None, keep_images=keep_images
        )

    expected = SyncVectorEnv([single] * 3, autoreset_mode=mode)
    assert envs.observation_space == expected.observation_space
    assert envs.single_observation_space == expected.single_observation_space
    assert envs.action_space == expected.action_space
    assert envs.metadata["autoreset_mode"] is mode
    assert_equal_trees(envs.reset(seed=5), expected.reset(seed=5))
    ended = np.zeros(3, int)
    for _ in range(20):
        actions = envs.action_space.sample()
        result = envs.step(actions)
        envs.env.scramble()
        assert_equal_trees(result, expected.step(actions))
        assert result[0] in envs.observation_space
        for final in result[4].get("final_obs", ()):
            assert final is None or final in envs.single_observation_space
        ended += result[2] | result[3]
    assert ended.min() >= 3


def test_one_forward_a_step_with_the_final_observations_in_it():
    envs = make_vector(SAME_STEP)
    envs.reset(seed=5)
    expected = [3]
    for _ in range(10):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        expected.append(3 + int((terminations | truncations).sum()))
    assert envs.vla.batches == expected and max(expected) > 3


def test_masked_reset_runs_the_vla_on_what_was_reset():
    envs = make_vector(DISABLED)
    envs.reset(seed=5)
    ended = np.zeros(3, bool)
    while not ended.any():
        obs, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        ended = terminations | truncations
    assert not ended.all()
    before = {key: value.copy() for key, value in obs.items()}
    obs["rl_token"][...] = 7  # the caller's own: the wrapper must not read it back
    envs.vla.batches.clear()
    options = {"reset_mask": ended}
    obs, infos = envs.reset(options=options)
    assert options == {"reset_mask": ended}
    assert envs.vla.batches == [ended.sum()]
    for key in obs:
        np.testing.assert_array_equal(obs[key][~ended], before[key][~ended])
        assert key == "task_id" or (obs[key][ended] != before[key][ended]).any()
    np.testing.assert_array_equal(infos["_instruction"], ended)
    np.testing.assert_array_equal(obs["proprio"][ended, 0] % 10, 0)


@pytest.mark.parametrize("keep_images", [False, True])
def test_returns_nothing_of_its_own_buffers(keep_images: bool):
    envs = make_vector(SAME_STEP, keep_images=keep_images)
    first, _ = envs.reset(seed=1)
    kept = {key: value.copy() for key, value in first.items()}
    second, *_ = envs.step(envs.action_space.sample())
    for key, value in first.items():
        assert not np.shares_memory(value, second[key])
        np.testing.assert_array_equal(value, kept[key])


def test_an_environment_that_tells_its_instruction_at_reset_only():
    class Quiet(PictureEnv):
        def step(self, action):
            *result, info = super().step(action)
            del info["instruction"]
            return *result, info

    envs = VectorFrozenVLAObservation(
        SyncVectorEnv([Quiet] * 2, autoreset_mode=SAME_STEP), RowVLA(), rl_token=None
    )
    expected = make_vector(SAME_STEP, num_envs=2)
    assert_equal_trees(envs.reset(seed=2)[0], expected.reset(seed=2)[0])
    finals = 0
    for _ in range(12):
        actions = envs.action_space.sample()
        a, b = envs.step(actions), expected.step(actions)
        assert_equal_trees(a[0], b[0])
        if "final_obs" in b[4]:
            finals += 1
            assert_equal_trees(a[4]["final_obs"], b[4]["final_obs"])
    assert finals > 2


def test_refuses_infos_without_an_instruction():
    class Silent(PictureEnv):
        def _info(self):
            return {}

    envs = VectorFrozenVLAObservation(SyncVectorEnv([Silent]), RowVLA(), rl_token=None)
    with pytest.raises(ConfigError, match="instruction"):
        envs.reset(seed=0)


def test_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="horizon"):
        VectorFrozenVLAObservation(
            SyncVectorEnv([lambda: PictureEnv(chunk_len=9)]), RowVLA(), rl_token=None
        )
    with pytest.raises(ConfigError, match="hidden"):
        VectorFrozenVLAObservation(SyncVectorEnv([PictureEnv]), RowVLA(), rl_token="mini")


def test_reaches_the_wrapped_environment_through_the_wrapper():
    envs = make_vector(NEXT_STEP)
    envs.reset(seed=0)
    assert envs.get_attr("length") == envs.env.get_attr("length")
    envs.set_attr("length", [9, 8, 7])
    assert envs.call("get_wrapper_attr", "length") == (9, 8, 7)
    assert not hasattr(envs, "send")  # Gymnasium's has none
    with pytest.raises(AttributeError, match="_nothing"):
        _ = envs._nothing


@pytest.mark.parametrize("rl_token", ["auto", None])
def test_mini_on_libero_equals_the_single_wrapper(rl_token: str | None):
    """Images and proprio exactly; what the VLA makes of them to the rounding of its batches."""
    kwargs: dict[str, Any] = {
        "task_ids": [2, 8],
        "chunk_len": 4,
        "image_size": 64,
        "max_control_steps": 8,
    }
    envs = VectorFrozenVLAObservation(
        SyncVectorEnv([lambda: LiberoEnv("goal", **kwargs)] * 3, autoreset_mode=SAME_STEP),
        rl_token=rl_token,
        keep_images=True,
    )
    singles = [
        FrozenVLAObservation(LiberoEnv("goal", **kwargs), rl_token=rl_token, keep_images=True)
        for _ in range(3)
    ]
    batch, infos = envs.reset(seed=7)
    rows = [env.reset(seed=7 + i)[0] for i, env in enumerate(singles)]
    instructions = set(infos["instruction"])
    for _ in range(4):
        for i, row in enumerate(rows):
            _assert_close({key: value[i] for key, value in batch.items()}, row)
        actions = batch["vla_action"]
        batch, _, terminations, truncations, infos = envs.step(actions)
        instructions |= set(infos["instruction"])
        for i, env in enumerate(singles):
            rows[i], _, terminated, truncated, _ = env.step(actions[i])
            assert (terminated, truncated) == (terminations[i], truncations[i])
            if terminated or truncated:
                _assert_close(infos["final_obs"][i], rows[i])
                rows[i], _ = env.reset()
        assert batch in envs.observation_space
    assert len(instructions) == 2  # both tasks were in one batch
    envs.close()
    for env in singles:
        env.close()


def _assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 1e-5 if key in ("rl_token", "vla_action") else 0.0
        np.testing.assert_allclose(actual[key], value, rtol=0, atol=tolerance, err_msg=key)
