"""Saving, restoring and seeking episodes of the single environment."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
from trees import assert_same

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.state import EnvState
from vla_gym.errors import ConfigError

STOVE, BOWL = 7, 8
CHUNK = 3


def make(**kwargs) -> LiberoEnv:
    defaults = {"task_ids": [STOVE, BOWL], "chunk_len": CHUNK, "gamma": 0.9, "cameras": ()}
    return LiberoEnv("goal", **{**defaults, **kwargs})


def chunks(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (count, CHUNK, 7)).astype(np.float32)


def play(env: LiberoEnv, count: int, seed: int = 0) -> list:
    """Step; at an episode's end, reset and go on."""
    results: list = []
    for action in chunks(count, seed):
        results.append(env.step(action))
        if results[-1][2] or results[-1][3]:
            results.append(env.reset())
    return results


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_control_steps": 20},
        {"max_control_steps": 20, "cameras": ("agentview", "wrist"), "image_size": 48},
        {"max_control_steps": 14, "physics": "exact"},
        {"max_control_steps": 14, "init_states": "official"},
        {"max_control_steps": 14, "task_sampling": "balanced", "env_index": 3, "group_size": 2},
    ],
    ids=["fast", "cameras", "exact", "official", "balanced"],
)
def test_a_restored_episode_goes_on_exactly_and_so_do_the_next_ones(kwargs) -> None:
    original, fresh, used = make(**kwargs), make(**kwargs), make(**kwargs)
    original.reset(seed=5)
    play(original, 3)
    last = original.step(chunks(1, seed=9)[0])[0]
    state = pickle.loads(pickle.dumps(original.get_state()))
    expected = play(original, 5, seed=1)
    assert sum(len(result) == 2 for result in expected) >= 1, "no episode ended"
    used.reset(seed=77, options={"task_id": 0})
    play(used, 1)
    for env in (fresh, used, original):
        assert_same(env.set_state(state), last)
        assert_same(play(env, 5, seed=1), expected)
    for env in (original, fresh, used):
        env.close()


def test_a_restored_episode_succeeds_as_the_original_does() -> None:
    from vla_gym.experts import make_expert

    env, other = make(chunk_len=None), make(chunk_len=None)
    env.reset(seed=0, options={"task_id": STOVE, "init_state_id": 0})
    expert, results, states, actions = make_expert(env.sim), [], [], []
    while not (results and results[-1][2]):
        states.append(env.get_state())
        actions.append(expert.act().astype(np.float32))
        results.append(env.step(actions[-1]))
    assert results[-1][1] == 1.0 and results[-1][4]["success"]
    for back in (30, 1):
        other.set_state(states[-back])
        assert_same([other.step(action) for action in actions[-back:]], results[-back:])
        with pytest.raises(gym.error.ResetNeeded):
            other.step(actions[-1])


def test_inside_a_finished_episode_a_reset_is_needed_still() -> None:
    env, other = make(max_control_steps=CHUNK), make(max_control_steps=CHUNK)
    env.reset(seed=3)
    last, _, _, truncated, _ = env.step(chunks(1)[0])
    assert truncated
    state = env.get_state()
    assert state.needs_reset
    other.reset(seed=0)
    assert_same(other.set_state(state), last)
    for each in (env, other):
        with pytest.raises(gym.error.ResetNeeded):
            each.step(chunks(1)[0])
    assert_same(other.reset(), env.reset())


def test_the_next_episodes_are_the_original_ones_whatever_the_environments_number() -> None:
    """A state brings the number along; a seed ends that."""
    kwargs = {"task_ids": [0, STOVE, BOWL], "task_sampling": "balanced", "group_size": 2}
    original, other = make(env_index=0, **kwargs), make(env_index=5, **kwargs)
    original.reset(seed=0)
    other.set_state(original.get_state())
    for _ in range(3):
        assert_same(other.reset(), original.reset())
    assert other.next_episode == original.next_episode == (0, 4, 0)
    again = make(env_index=5, **kwargs)
    assert_same(other.reset(seed=20), again.reset(seed=20))
    assert_same(other.reset(), again.reset())


def test_seek_reaches_any_episode_and_leaves_the_present_one_alone() -> None:
    env, other = make(), make()
    expected = [env.reset(seed=4 if episode == 0 else None) for episode in range(4)]
    assert other.next_episode is None
    for episode in (3, 0, 2):
        other.seek(4, np.int64(episode))
        assert other.next_episode == (4, episode, 0)
        assert_same(other.reset(), expected[episode])
    assert_same(other.reset(), expected[3])

    env.reset(seed=4)
    straight = play(env, 3)
    env.reset(seed=4)
    env.step(chunks(3)[0])
    env.seek(8, 1)
    assert_same([env.step(action) for action in chunks(3)[1:]], straight[1:])
    env.seek(8, 1)
    assert_same(env.reset(seed=4), expected[0])


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -1), (0.5, 0), (0, True), (0, 0, -1)])
def test_wrong_seeks(arguments) -> None:
    with pytest.raises(ConfigError):
        make().seek(*arguments)
    with pytest.raises(ConfigError, match="at least 3"):
        make(env_index=3, group_size=4).reset(seed=2)


class SmallestDraw:
    def integers(self, _high: int) -> int:
        return 0


def test_an_unseeded_environment_is_saved_with_the_seed_it_drew() -> None:
    env, other = make(env_index=3, group_size=4), make(env_index=3, group_size=4)
    env.np_random = SmallestDraw()
    env.reset()
    assert env.next_episode == (3, 1, 3)
    other.set_state(env.get_state())
    assert_same(env.reset(), other.reset())


def test_wrong_states_change_nothing() -> None:
    env, exact = make(), make(physics="exact")
    with pytest.raises(gym.error.ResetNeeded):
        env.get_state()
    env.reset(seed=0)
    state = env.get_state()
    assert isinstance(state, EnvState) and state.elapsed_steps == 0 and state.seed == 0
    expected = play(env, 2)
    env.set_state(state)
    with pytest.raises(ConfigError, match="physics"):
        exact.set_state(state)
    exact.reset(seed=0)
    for wrong in (None, state.snapshot, exact.get_state()):
        with pytest.raises(ConfigError):
            env.set_state(wrong)
    assert_same(play(env, 2), expected)
    short = make(max_control_steps=2)
    with pytest.raises(ConfigError, match="6 control steps into its episode, which ends after 2"):
        short.set_state(env.get_state())


@pytest.mark.libero_assets
def test_a_state_of_another_asset_pack_is_refused() -> None:
    lite, libero = make(), make(assets="libero")
    lite.reset(seed=0)
    with pytest.raises(ConfigError, match="lite"):
        libero.set_state(lite.get_state())
    assert libero.next_episode is None


def test_images_may_be_drawn_into_arrays_of_the_callers() -> None:
    kwargs = {"cameras": ("wrist", "agentview"), "image_size": 40}
    plain, direct = make(**kwargs), make(**kwargs)
    arrays = {camera: np.zeros((40, 40, 3), np.uint8) for camera in ("agentview", "wrist")}
    direct.image_out = arrays
    plays = (lambda env: env.reset(seed=2)[0], lambda env: env.step(chunks(1)[0])[0])
    for play_on in plays:
        shown = play_on(direct)
        assert_same(shown, play_on(plain))
        assert all(shown[camera] is array for camera, array in arrays.items())
    with pytest.raises(ConfigError, match="image_out must name"):
        direct.image_out = {"wrist": arrays["wrist"]}
    constant = np.broadcast_to(np.zeros(3, np.uint8), (40, 40, 3))  # nobody can write to it
    for wrong in (np.zeros((40, 40), np.uint8), np.zeros((40, 40, 3)), constant):
        direct.image_out = {**arrays, "wrist": wrong}
        with pytest.raises(ConfigError, match="uint8"):
            direct.reset()
    for env in (plain, direct):
        env.close()
