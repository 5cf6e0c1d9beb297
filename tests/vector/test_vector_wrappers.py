"""The vector FrozenVLAObservation against the single one, in every autoreset mode."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from picture_env import PictureEnv, QuietEnv, StagedEnv
from trees import assert_same
from vector_reference import DISABLED, NEXT_STEP, SAME_STEP, by_autoreset, play_alike
from world_model_toys import TellingVLA

from vla_gym.errors import ConfigError
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla import load
from vla_gym.vla.files import resolve_weights
from vla_gym.wrappers import FrozenVLAObservation, History
from vla_gym.wrappers.make import make_libero_vla_vec
from vla_gym.wrappers.vector import FrozenVLAObservation as VectorFrozenVLAObservation
from vla_gym.wrappers.vector import History as VectorHistory

pytestmark = pytest.mark.usefixtures("warm_server")


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
    mode: AutoresetMode,
    num_envs: int = 3,
    keep_images: bool = False,
    env: Any = PictureEnv,
    workers: int | None = None,
    **kwargs: Any,
) -> VectorFrozenVLAObservation:
    """Wrap Gymnasium's vector environment, or ours if ``workers`` is given."""
    if workers is None:
        envs: Any = Views([functools.partial(env, **kwargs)] * num_envs, autoreset_mode=mode)
    else:
        envs = LiberoVectorEnv(
            num_envs,
            workers=workers,
            env_factory=lambda _: env(**kwargs),
            autoreset_mode=mode,
            copy=False,
        )
    return VectorFrozenVLAObservation(envs, TellingVLA(), rl_token=None, keep_images=keep_images)


class Notes(gym.Wrapper):
    """Adds a number of its own to the observation."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        memory = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({**env.observation_space.spaces, "memory": memory})

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs | {"memory": np.zeros(2, np.float32)}, info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return obs | {"memory": np.full(2, obs["proprio"][0], np.float32)}, *rest


def remembering() -> gym.Env:
    return Notes(History(StagedEnv(), 2))


@pytest.mark.parametrize(
    ("env", "workers"), [(StagedEnv, None), (StagedEnv, 2), (remembering, None)]
)
@pytest.mark.parametrize("keep_images", [False, True])
@by_autoreset
def test_equals_gymnasiums_vector_of_single_wrappers(mode, keep_images, env, workers):
    """Every array, dtype, mask and final observation, also after the inner arrays changed.

    What the wrapper does not know, such as histories, is passed on.
    """
    envs = make_vector(mode, keep_images=keep_images, env=env, workers=workers)
    single = lambda: FrozenVLAObservation(env(), TellingVLA(), None, keep_images=keep_images)  # noqa: E731
    expected = SyncVectorEnv([single] * 3, autoreset_mode=mode)
    keys = {"rl_token", "vla_action", "proprio", "task_id"}
    keys |= {"agentview", "wrist"} if keep_images else set()
    if env is remembering:
        keys |= {"memory", "wrist_history", "action_history", "history_mask"}
    assert set(envs.single_observation_space) == keys
    assert envs.observation_space == expected.observation_space
    assert envs.single_observation_space == expected.single_observation_space
    assert envs.action_space == expected.action_space
    assert envs.metadata["autoreset_mode"] is mode
    ended, scramble = np.zeros(3, int), envs.env.scramble if workers is None else list
    real = 0
    for result in play_alike(envs, expected, 5, steps=20, meanwhile=scramble):
        assert result[0] in envs.observation_space
        for final in result[4].get("final_obs", ()):
            assert final is None or final in envs.single_observation_space
        ended += result[2] | result[3]
        real = max(real, np.sum(result[0].get("history_mask", 0)))
    assert ended.min() >= 3 and (real > 2) == (env is remembering)
    envs.close()


def test_one_forward_a_step_with_the_final_observations_in_it():
    envs = make_vector(SAME_STEP)
    envs.reset(seed=5)
    expected = [3]
    for _ in range(10):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        expected.append(3 + int((terminations | truncations).sum()))
    assert envs.vla.batches == expected and max(expected) > 3


def test_masked_reset_runs_the_vla_on_what_was_reset():
    envs = make_vector(DISABLED, workers=2)
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
    envs.close()


@pytest.mark.parametrize("keep_images", [False, True])
def test_returns_nothing_of_its_own_buffers(keep_images: bool):
    envs = make_vector(SAME_STEP, keep_images=keep_images)
    first, _ = envs.reset(seed=1)
    kept = {key: value.copy() for key, value in first.items()}
    second, *_ = envs.step(envs.action_space.sample())
    for key, value in first.items():
        assert not np.shares_memory(value, second[key])
        np.testing.assert_array_equal(value, kept[key])


@pytest.mark.parametrize("vla", [SimpleNamespace(name="mine"), 3])
def test_refuses_what_is_no_vla(vla):
    for make in (
        lambda: FrozenVLAObservation(PictureEnv(), vla, None),
        lambda: VectorFrozenVLAObservation(SyncVectorEnv([PictureEnv]), vla, rl_token=None),
    ):
        with pytest.raises(ConfigError, match="derived from vla_gym.vla.FrozenVLA; got"):
            make()


def test_takes_a_path_and_as_many_rows_as_are_executed_up_to_the_horizon():
    envs = SyncVectorEnv([lambda: PictureEnv(64)])
    wrapped = VectorFrozenVLAObservation(envs, resolve_weights("mini"), None, chunk_len=8)
    assert wrapped.vla is load("mini")
    assert wrapped.single_observation_space["vla_action"].shape == (8, 7)
    for chunk_len, text in ((1, "in 2..8, got 1"), (9, "in 2..8, got 9"), (2.5, "an integer")):
        with pytest.raises(ConfigError, match=f"chunk_len .*horizon. must be {text}"):
            VectorFrozenVLAObservation(envs, "mini", None, chunk_len=chunk_len)


@pytest.mark.parametrize(("asked", "got"), [({}, False), ({"gpu": True}, True)])
def test_who_asks_for_a_gpu_on_the_hosts_gets_it(monkeypatch, asked, got):
    def made(suite, num_envs, **kwargs):
        raise ConfigError(f"gpu is {kwargs['gpu']}")

    monkeypatch.setattr("vla_gym.wrappers.make.make_libero_vec", made)
    with pytest.raises(ConfigError, match=f"gpu is {got}"):
        make_libero_vla_vec("goal", hosts="ray", chunk_len=8, image_size=64, **asked)


@pytest.mark.parametrize("workers", [None, 2])
def test_reaches_the_wrapped_environment_through_the_wrapper(workers):
    envs = make_vector(NEXT_STEP, workers=workers)
    envs.reset(seed=0)
    assert envs.get_attr("length") == envs.env.get_attr("length")
    envs.set_attr("length", [9, 8, 7])
    assert envs.call("get_wrapper_attr", "length") == (9, 8, 7)
    assert hasattr(envs, "send") == (workers is not None)  # Gymnasium's has none
    with pytest.raises(AttributeError, match="_nothing"):
        _ = envs._nothing
    envs.close()


@by_autoreset
def test_recv_converts_the_rows_that_it_returns(mode):
    """What each environment shows does not depend on who steps when, and each is inferred once."""
    envs = make_vector(mode, 5, workers=2, env=QuietEnv)
    expected, steps = make_vector(mode, 5), 8
    histories: list[list[Any]] = [[] for _ in range(5)]
    obs, _ = expected.reset(seed=9)
    actions = np.zeros(envs.action_space.shape, np.float32)
    for _ in range(steps):
        for i, history in enumerate(histories):
            history.append({key: value[i] for key, value in obs.items()})
        obs, _, _, _, infos = expected.step(actions)
        for i, history in enumerate(histories):
            if "final_obs" in infos and infos["_final_obs"][i]:
                history.append(infos["final_obs"][i])
    envs.reset_send(seed=9)
    seen: list[list[Any]] = [[] for _ in range(5)]
    left = np.full(5, steps)
    rows = 0
    while left.any():
        obs, rewards, _, _, infos = envs.recv(min(2, int((left > 0).sum())), timeout=30)
        ids = infos["env_id"]
        assert len(rewards) == len(ids) == len(obs["rl_token"])
        rows += len(ids) + int(infos.get("_final_obs", np.zeros(1)).sum())
        for row, i in enumerate(ids):
            if "final_obs" in infos and infos["_final_obs"][row]:
                seen[i].append(infos["final_obs"][row])
            seen[i].append({key: value[row] for key, value in obs.items()})
        left[ids] -= 1
        again = ids[left[ids] > 0]
        if len(again):
            envs.send(actions[again], again)
    assert sum(envs.vla.batches) == rows
    for one, other in zip(seen, histories, strict=True):
        assert_same(one, other[: len(one)])
        assert len(one) >= steps
    envs.close()


LIBERO: dict[str, Any] = {
    "task_ids": [2, 8],
    "chunk_len": 4,
    "image_size": 64,
    "max_control_steps": 8,
}


def test_libero_vla_vector_equals_the_single_environments():
    """Images and proprio exactly; what the VLA makes of them to the rounding of its batches."""
    kwargs = LIBERO | {"keep_images": True}
    envs: Any = gym.make_vec(
        "LiberoVLA-goal-v0", num_envs=3, workers=2, autoreset_mode=SAME_STEP, **kwargs
    )
    assert isinstance(envs, VectorFrozenVLAObservation)
    singles = [gym.make("LiberoVLA-goal-v0", **kwargs) for _ in range(3)]
    assert envs.single_observation_space == singles[0].observation_space
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


def test_states_are_converted_with_the_instruction_of_their_task():
    """Two environments with different tasks swap their states."""
    envs: Any = gym.make_vec(
        "LiberoVLA-goal-v0",
        num_envs=2,
        workers=1,
        **LIBERO | {"vla": TellingVLA(), "rl_token": None},
    )
    before, _ = envs.reset(seed=0, options={"task_id": np.array([2, 8])})
    states = envs.get_state()
    envs.step(before["vla_action"])
    envs.vla.batches.clear()
    swapped = envs.set_state(states[::-1])
    assert_same(swapped, {key: value[::-1] for key, value in before.items()})
    only_first = envs.set_state(states[:1], [0])
    expected = {key: np.stack([value[0], value[0]]) for key, value in before.items()}
    assert_same(only_first, expected)
    assert envs.vla.batches == [2, 1]
    assert_same(envs.set_state(states[::-1], [1, 0]), before)
    assert only_first in envs.observation_space
    assert (before["rl_token"][0] != before["rl_token"][1]).any()
    envs.close()


def test_states_with_a_history_below():
    """The wrappers in layers: states are those of the layer below, and of its history."""
    envs: Any = VectorFrozenVLAObservation(
        VectorHistory(LiberoVectorEnv(2, "goal", workers=1, copy=False, **LIBERO), 2),
        TellingVLA(),
        rl_token=None,
    )
    envs.reset(seed=0)
    obs, *_ = envs.step(envs.action_space.sample())
    states = envs.get_state()
    then, *_ = envs.step(actions := envs.action_space.sample())
    swapped = envs.set_state(states[::-1])
    assert_same(swapped, {key: value[::-1] for key, value in obs.items()})
    again, *_ = envs.step(actions[::-1])
    assert_same(again, {key: value[::-1] for key, value in then.items()})
    assert again["history_mask"].all() and again in envs.observation_space
    envs.close()


def test_make_vec_refuses_what_the_single_environment_refuses():
    with pytest.raises(ConfigError, match="the VLA's horizon is 8.* must be in 1..8, got 9"):
        gym.make_vec("LiberoVLA-goal-v0", num_envs=2, chunk_len=9)
    with pytest.raises(ConfigError, match="cameras"):
        gym.make_vec("LiberoVLA-goal-v0", num_envs=1, workers=0, cameras=())
    with pytest.raises(ConfigError, match=r"wrappers\.vector"):
        gym.make_vec("LiberoVLA-goal-v0", num_envs=1, env_factory=lambda _: PictureEnv())
