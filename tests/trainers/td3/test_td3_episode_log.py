"""Figures of training episodes."""

import pickle
from types import SimpleNamespace

import numpy as np
from td3_toys import td3_bc
from toy_env import ToyReach

from vla_gym_trainers.td3.callback import RunCallback
from vla_gym_trainers.td3.episode_log import EpisodeLog, lowest_window


def test_lowest_window_against_every_window():
    assert lowest_window([True, False], 3) is None
    # windows of 2: 1/2, 0/2, 1/2, 2/2
    assert lowest_window([True, False, False, True, True], 2) == 0.0
    draws = np.random.default_rng(0).random(300) < 0.6
    assert lowest_window(draws, 50) == min(draws[i : i + 50].mean() for i in range(251))


def test_rates_by_task_and_what_comes_back():
    log = EpisodeLog()
    assert log.summary()["warmup_success"] is log.recent_success() is None
    for task_id, success in ((3, True), (3, False), (7, False)):
        log.add(task_id, success, is_warm_up=True)
    for number in range(60):
        log.add(7, True, is_warm_up=False)
        if number == 47:
            assert log.recent_success() == 48 / 50, "the newest 50 of 51"
    summary = pickle.loads(pickle.dumps(log)).summary()
    assert summary == log.summary()
    assert (summary["warmup_episodes"], summary["warmup_success"]) == (3, 1 / 3)
    assert summary["success_by_100_episodes"] == [1.0]
    assert summary["lowest_success_1000"] is None
    assert summary["success_by_task"] == {
        "3": {"warmup_episodes": 2, "warmup_success": 0.5, "by_50_episodes": []},
        "7": {"warmup_episodes": 1, "warmup_success": 0.0, "by_50_episodes": [1.0, 1.0]},
    }


def test_what_the_vla_plays_in_the_actors_place_is_of_the_warm_up():
    """A block of 8 ends after chunk 64 and is learnt from; the next one has begun before that."""
    run = SimpleNamespace(
        checkpoint=None,
        is_late=False,
        stop=SimpleNamespace(is_made=False),
        is_checkpoint_due=lambda _: False,
        show=lambda *_: None,
    )
    callback = RunCallback(run)
    env = ToyReach(max_control_steps=4)  # an episode is one chunk
    td3_bc(env, learning_starts=64, gamma=0.98, ahead=1, train_freq=8).learn(144, callback)
    assert len(callback.episodes.warmup) == 80 and len(callback.episodes.trained) == 64
