"""History by frame index, and the vector History against the single one.

A stub's frame and action are functions of (seed, episode, step), which its ``proprio`` tells: so
what the history of an observation must be is worked out from that observation alone.
"""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from picture_env import PictureEnv
from stub_envs import ACTION_DIM, LIMIT, SUCCESS, Fault, StubEnv, stub_action, stub_image
from vector_reference import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    advance,
    assert_same,
    by_autoreset,
    by_mode,
    follow,
    follower,
    play_alike,
    reset_due,
    rows,
)

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.wrappers import ActionChunk, History
from vla_gym.wrappers.vector import History as VectorHistory

LENGTH = 3
#: Of envs 0 to 3; the last one again after that. Longer than what a history reaches back.
SCRIPTS = {
    0: {"script": [(9, SUCCESS), (3, LIMIT)]},
    1: {"script": [(1, LIMIT), (8, SUCCESS)]},
    2: {"script": [(2, SUCCESS), (5, LIMIT)]},
    3: {"script": [(4, LIMIT)]},
}
by_way = pytest.mark.parametrize("way", ["worker", "trainer"])
by_stride = pytest.mark.parametrize("stride", [1, 2])


def expected_history(
    seed: int, episode: int, step: int, stride: int = 1, length: int = LENGTH
) -> dict[str, np.ndarray]:
    past = [step - stride * (length - i) for i in range(length)]
    nothing = np.zeros(ACTION_DIM, np.float32)
    return {
        "image_history": np.stack([stub_image(seed, episode, max(k, 0)) for k in past]),
        "action_history": np.stack(
            [stub_action(seed, episode, k) if k >= 0 else nothing for k in past]
        ),
        "history_mask": np.array([k >= 0 for k in past], np.int8),
    }


def check(obs: dict[str, Any], stride: int = 1, length: int = LENGTH) -> tuple[int, int, int]:
    """Check one observation; return seed, episode and step."""
    seed, episode, step = (int(number) for number in obs["proprio"][:3])
    assert_same(obs["image"], stub_image(seed, episode, step))
    expected = expected_history(seed, episode, step, stride, length)
    assert_same({key: obs[key] for key in expected}, expected, f"{seed}, {episode}, {step}")
    return seed, episode, step


def remembering(stride: int = 1, length: int = LENGTH) -> Any:
    return partial(History, length=length, stride=stride, frames=("image",))


@pytest.fixture
def make(make_vec):
    """Make stub vector envs with a history, which is kept in the worker or by the trainer."""

    def make_either(way, num_envs, stubs=None, *, stride=1, length=LENGTH, **kwargs):
        if way == "worker":
            return make_vec(num_envs, stubs, env_wrappers=[remembering(stride, length)], **kwargs)
        envs = make_vec(num_envs, stubs, **kwargs)
        return VectorHistory(envs, length, stride, frames=("image",))

    return make_either


def history_follower(num_envs, seed, mode, per_env=None, *, stride=1, **kwargs):
    """Single wrappers, of which each row of a vector env must be one."""
    expected = follower(num_envs, seed, mode, per_env, **kwargs)
    for reference in expected.references:
        reference.env = remembering(stride)(reference.env)
    return expected


# Alignment


def test_table():
    """Written by hand: numbers of frames, and of the actions that followed them."""
    tables = {
        1: ["0000", "0000", "0001", "0012", "0123", "1234"],
        2: ["0000", "0000", "0000", "0001", "0002", "0013", "0024", "0135"],
    }
    known = {
        1: ["", "0", "01", "012", "0123", "1234"],
        2: ["", "", "0", "1", "02", "13", "024", "135"],
    }
    for stride, table in tables.items():
        env = remembering(stride, length=4)(StubEnv(script=[(20, LIMIT)]))
        obs, _ = env.reset(seed=6)
        for step, (frames, actions) in enumerate(zip(table, known[stride], strict=True)):
            shown = np.stack([stub_image(6, 0, int(k)) for k in frames])
            np.testing.assert_array_equal(obs["image_history"], shown)
            assert obs["history_mask"].sum() == len(actions)
            taken = [stub_action(6, 0, int(k)) for k in actions]
            zeros = [np.zeros(ACTION_DIM, np.float32)] * (4 - len(actions))
            np.testing.assert_array_equal(obs["action_history"], np.stack([*zeros, *taken]))
            obs, *_ = env.step(stub_action(6, 0, step))


@by_mode
@by_way
@by_stride
def test_every_autoreset_mode(make, way, mode, stride):
    envs = make(way, 4, SCRIPTS, stride=stride, autoreset_mode=mode)
    assert envs.metadata["autoreset_mode"] is mode
    single = remembering(stride)(StubEnv())
    assert envs.single_observation_space == single.observation_space
    expected = history_follower(4, 20, mode, SCRIPTS, stride=stride)
    # Env 0 is also reset in the middle of an episode.
    follow(envs, expected, 20, episodes=3, stagger=[0])
    assert envs.reset(seed=20)[0] in envs.observation_space


@by_mode
@by_way
def test_a_killed_worker(make, once, way, mode):
    """The lost step leaves the observation and its history as they were."""
    faults = [once("SIGKILL", episode=e, step=s) for e, s in ((0, 6), (1, 1), (2, 2))]
    envs = make(way, 4, {**SCRIPTS, 0: {**SCRIPTS[0], "faults": faults}}, autoreset_mode=mode)
    expected = history_follower(4, 20, mode, SCRIPTS)
    expected.check_reset(envs.reset(seed=20))
    with pytest.warns(WorkerRestartWarning, match="SIGKILL"):
        for _ in range(20):
            reset_due(envs, expected)
            reached = once.reached()
            result = envs.step(expected.actions())
            expected.check_step(result, lost=[0, 1] if once.reached() > reached else [])
    assert once.reached() == 3 and expected.lost[0] == 3
    # Between two commands: all episodes of the worker are lost.
    reset_due(envs, expected)
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        advance(envs, expected, 1, lost=[2, 3])
    advance(envs, expected, 8)


@by_way
@by_autoreset
def test_rows_out_of_step(make, way, mode):
    """Each environment is sent on by itself, and is not always among the first."""
    envs = make(way, 4, {**SCRIPTS, 3: {"delay": 0.003, **SCRIPTS[3]}}, autoreset_mode=mode)
    envs.reset_send(seed=40)
    finals, seen = 0, [set() for _ in range(4)]
    for turn in range(90):
        obs, _, _, _, infos = envs.recv(1 + turn % 3, timeout=30)
        ids = infos["env_id"]
        actions = []
        for row, i in enumerate(ids.tolist()):
            seed, episode, step = check(rows(obs, row))
            assert seed == 40 + i
            seen[i].add((episode, step))
            actions.append(stub_action(seed, episode, step))
            if "final_obs" in infos and infos["_final_obs"][row]:
                _, ended, last = check(infos["final_obs"][row])
                assert ended == episode - 1 and last > 0
                finals += 1
        sent = np.stack(actions)
        envs.send(sent, ids)
        sent[:] = 7.0  # the caller's own again
        if turn % 20 == 10:
            envs.recv(timeout=30)
            envs.reset_send([2, 0])
            obs, *_, infos = envs.recv(env_ids=[0], timeout=30)
            assert check(rows(obs, 0))[2] == 0 and infos["env_id"].tolist() == [0]
            envs.recv(timeout=30)
            obs, _ = envs.reset(options={"reset_mask": np.array([True, False, False, True])})
            begun = [check(rows(obs, i))[2] for i in range(4)]
            assert begun[0] == begun[2] == begun[3] == 0
            envs.send(np.stack([stub_action(*check(rows(obs, i))) for i in range(4)]), range(4))
    assert (finals > 3) == (mode == SAME_STEP) and all(len(steps) > 8 for steps in seen)
    envs.recv(timeout=30)
    obs, _ = envs.reset(seed=40)
    for _ in range(6):
        sent = np.stack([stub_action(*check(rows(obs, i))) for i in range(4)])
        envs.step_async(sent)
        sent[:] = 7.0
        obs, *_ = envs.step_wait(timeout=30)
    assert obs in envs.observation_space


def test_chunks_that_ended_early():
    """Three control steps an episode, chunks of two: the second one executes a single row."""
    chunk = np.arange(1, 2 * ACTION_DIM + 1).reshape(2, ACTION_DIM).astype(np.float32) / 10
    env = remembering()(ActionChunk(StubEnv(script=[(3, LIMIT)]), 2))
    env.reset(seed=0)
    obs, *_ = env.step(chunk)
    np.testing.assert_array_equal(obs["action_history"][-1], chunk)
    chunk[0, 0] = 9.0  # beyond the bounds, where the simulator clips
    obs, _, _, truncated, info = env.step(chunk)
    assert truncated and info["executed_steps"] == 1 and env.observation_space.contains(obs)
    cut = np.stack([np.array([1.0, *chunk[0, 1:]], np.float32), np.zeros(ACTION_DIM, np.float32)])
    np.testing.assert_array_equal(obs["action_history"][-1], cut)
    np.testing.assert_array_equal(obs["history_mask"], [0, 1, 1])
    np.testing.assert_array_equal(obs["image_history"][-1], stub_image(0, 0, 2))


@by_way
@by_mode
def test_chunks_in_every_autoreset_mode(make, way, mode):
    def chunked(i):
        return ActionChunk(StubEnv(i, **SCRIPTS[i]), 2)

    def chunk(seed, episode, step):
        return np.stack([stub_action(seed, episode, 2 * step + k) for k in (0, 1)])

    envs = make(way, 3, chunked, autoreset_mode=mode)
    expected = follower(3, 7, mode)
    for i, reference in enumerate(expected.references):
        reference.env = remembering()(chunked(i))
        reference.action = partial(chunk, 7 + i)
    follow(envs, expected, 7, episodes=3)


# States


@by_stride
def test_a_state_goes_on_bit_for_bit(stride):
    env = remembering(stride)(StubEnv(script=[(9, LIMIT)]))
    seen = check(env.reset(seed=3)[0])
    for _ in range(8):
        state = pickle.loads(pickle.dumps(env.get_state()))
        other = remembering(stride)(StubEnv(script=[(9, LIMIT)]))
        other.reset(seed=1)
        now = check(other.set_state(state), stride)
        assert now == seen
        obs, *_ = other.step(stub_action(*seen))
        expected, *_ = env.step(stub_action(*seen))
        assert_same(obs, expected)
        seen = check(obs, stride)
    again = env.set_state(state)
    assert check(again, stride) == now


@by_mode
@by_way
def test_states_of_a_vector(make, way, mode):
    """Env 1 goes on as env 0 was; those that ended are reset next, as they would have been."""
    envs = make(way, 4, autoreset_mode=mode)
    expected = history_follower(4, 60, mode)
    expected.check_reset(envs.reset(seed=60))
    advance(envs, expected, 2)
    states = pickle.loads(pickle.dumps(envs.get_state()))
    assert len(envs.get_state([2])) == 1
    names = ("episode", "count", "due", "last")
    marks = {name: list(getattr(expected, name)) for name in names}
    assert any(expected.due) == (mode != SAME_STEP)
    advance(envs, expected, 4)
    obs = envs.set_state(states)
    for name in names:
        getattr(expected, name)[:] = marks[name]
    for i in range(4):
        assert_same(rows(obs, i), expected.last[i], f"env {i}")
    advance(envs, expected, 4)
    obs = envs.set_state(states[:1], [1])
    expected.references[1] = expected.references[0]
    for name in names:
        getattr(expected, name)[1] = marks[name][0]
    for i in range(4):
        assert_same(rows(obs, i), expected.last[i], f"env {i} after env 1 was set")
    advance(envs, expected, 10)


@by_way
@pytest.mark.parametrize(("mode", "other"), [(NEXT_STEP, SAME_STEP), (DISABLED, NEXT_STEP)])
def test_a_state_whose_episode_is_over_goes_on_in_another_mode(make, way, mode, other):
    envs, goes_on = (make(way, 2, SCRIPTS, autoreset_mode=each) for each in (mode, other))
    for each in (envs, goes_on):
        each.reset(seed=60)
    envs.step(np.stack([stub_action(60 + i, 0, 0) for i in range(2)]))  # the end of env 1's
    obs = goes_on.set_state(envs.get_state())
    seen = []
    for _ in range(6):
        actions = np.stack([stub_action(*check(rows(obs, i))) for i in range(2)])
        obs, *_ = goes_on.step(actions)
        seen.append(check(rows(obs, 1))[1:])
    assert seen == [(1, step) for step in range(6)]


@by_way
@by_autoreset
def test_an_episode_that_an_error_ended(make, way, mode):
    """The next step resets the environment, of which nothing was said before."""
    faults = [Fault("error", step=3)]
    envs = make(way, 1, {0: {"faults": faults, **SCRIPTS[0]}}, autoreset_mode=mode)
    obs, _ = envs.reset(seed=5)
    seen = []
    for turn in range(6):
        actions = stub_action(*check(rows(obs, 0)))[None]
        if turn == 2:
            with pytest.raises(ConfigError, match="stub error"):
                envs.step(actions)
        obs, *_ = envs.step(actions)
        seen.append(check(rows(obs, 0))[1:])
    assert seen[:4] == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_states_that_do_not_fit_change_nothing(make):
    envs = make("trainer", 2, script=[(9, LIMIT)])
    longer = make("trainer", 2, script=[(9, LIMIT)], length=LENGTH + 1)
    single = remembering()(StubEnv())
    for env in (envs, longer, single):
        env.reset(seed=0)
    actions = np.zeros((2, ACTION_DIM), np.float32)
    for _ in range(LENGTH + 1):
        obs, *_ = envs.step(actions)
        longer.step(actions)
    good, bad = envs.get_state(), longer.get_state()
    with pytest.raises(ConfigError, match="the same History"):
        envs.set_state([good[0], bad[1]])
    with pytest.raises(ConfigError, match="a state of History"):
        envs.set_state([state.env for state in good])
    with pytest.raises(ConfigError, match="a state of History, got Other"):
        envs.set_state([replace(state, wrapper="Other") for state in good])
    with pytest.raises(ConfigError, match="1 states for 2"):
        envs.set_state(good[:1])
    with pytest.raises(ConfigError, match="a state of History"):
        single.set_state(single.env.get_state())
    assert_same(envs.set_state(good), obs)


# Whose arrays


def test_nothing_that_was_returned_changes(make):
    """Nor does what the caller writes there come back; over views of shared memory."""
    envs = make("trainer", 3, SCRIPTS, copy=False, autoreset_mode=SAME_STEP)
    obs, _ = envs.reset(seed=5)
    returned = []
    for _ in range(8):
        histories = {key: obs[key] for key in expected_history(0, 0, 0)}
        returned.append((histories, {key: value.copy() for key, value in histories.items()}))
        actions = np.stack([stub_action(*check(rows(obs, i))) for i in range(3)])
        obs, *_, infos = envs.step(actions)
        actions[:] = 7.0
        for final in infos.get("final_obs", ()):
            if final is not None:
                check(final)
                final["image_history"][:] = 77
    for now, then in returned:
        assert_same(now, then)
        for value in now.values():
            value[:] = 1
    actions = np.stack([stub_action(*check(rows(obs, i))) for i in range(3)])
    obs, *_ = envs.step(actions)
    for i in range(3):
        check(rows(obs, i))
    table = envs.env._table.columns
    assert not any(np.shares_memory(obs["image_history"], array) for array in table.values())


@by_autoreset
def test_gymnasiums_own_vector(mode):
    def stub(i):
        return StubEnv(i, **SCRIPTS[i])

    envs = VectorHistory(
        SyncVectorEnv([partial(stub, i) for i in range(3)], autoreset_mode=mode),
        LENGTH,
        frames=("image",),
    )
    wrapped = [lambda i=i: remembering()(stub(i)) for i in range(3)]
    expected = SyncVectorEnv(wrapped, autoreset_mode=mode)
    assert envs.observation_space == expected.observation_space
    assert len(list(play_alike(envs, expected, 5, steps=20))) == 20
    # What Gymnasium's cannot do, it cannot do with a history either.
    assert not any(hasattr(envs, name) for name in ("send", "reset_send", "get_state"))
    assert envs.get_attr("count") == expected.get_attr("count")


# LIBERO

LIBERO: dict[str, Any] = {"chunk_len": 4, "image_size": 32, "max_control_steps": 10}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_libero_passes_the_checker():
    env = History(LiberoEnv("goal", task_ids=8, **LIBERO), 2, frames=["wrist", "agentview"])
    check_env(env, skip_render_check=True)
    obs, _ = env.reset(seed=0)
    assert obs["agentview_history"].shape == (2, 32, 32, 3)
    assert obs["action_history"].shape == (2, 4, 7)
    env.close()


# Bad input


class Plain(PictureEnv):
    """No Dict."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.observation_space["proprio"]


class Discrete(PictureEnv):
    """No Box."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)


@pytest.mark.parametrize(
    ("env", "kwargs", "text"),
    [
        (PictureEnv, {"length": 0}, "length must be in 1..1024, got 0"),
        (PictureEnv, {"stride": 0}, "stride must be in 1..1024, got 0"),
        (PictureEnv, {"length": 1.5}, "length must be an integer, got 1.5"),
        (PictureEnv, {"frames": None}, "names of cameras, got None"),
        (PictureEnv, {"frames": ("hand",)}, "agentview, wrist.*got 'hand'"),
        (PictureEnv, {"frames": ("proprio",)}, "agentview, wrist.*got 'proprio'"),
        (PictureEnv, {"frames": ("wrist", "wrist")}, "different cameras, got .'wrist', 'wrist'"),
        (Plain, {}, "expects a Dict observation.*Box"),
        (Discrete, {}, r"expects a Box action space, got Discrete\(3\)"),
        (lambda: History(PictureEnv()), {"frames": ("agentview",)}, "History once"),
    ],
)
def test_bad_input_is_one_clear_error(env, kwargs, text):
    with pytest.raises(ConfigError, match=text):
        History(env(), **kwargs)
    with pytest.raises(ConfigError, match=text):
        VectorHistory(SyncVectorEnv([env]), **kwargs)


def test_frames_may_be_none_at_all_or_one_name():
    alone = History(PictureEnv(), frames=())
    assert "wrist_history" not in alone.observation_space.spaces
    assert "action_history" in alone.reset(seed=0)[0]
    assert "wrist_history" in History(PictureEnv(), frames="wrist").observation_space.spaces
