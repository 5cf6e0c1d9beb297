"""A stateful VLA that plays episodes: the same for any number of environments and workers."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memory_vla import GRUVLA
from on_policy_toys import tiny_vla
from trees import assert_same

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.rollout import Episode, Start, make_envs, play, rollout
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.vla import load
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy

pytestmark = pytest.mark.usefixtures("warm_server")

# Two instructions, and more episodes than environments, so that each begins several.
STARTS = [Start("goal", task, state) for task in (0, 8) for state in range(2)]
SETTINGS: dict[str, Any] = {"max_control_steps": 24}


class Recording:
    """Writes down the chunks of every start, and how many frames its episode's state has seen."""

    envs: Any = None
    kill_at = -1
    calls = 0

    def act(self, observations, infos):
        self.calls += 1
        if self.calls == self.kill_at:
            os.kill(self.envs.worker_pids[0], signal.SIGKILL)
        chunks = super().act(observations, infos)
        for info, chunk in zip(infos, chunks, strict=True):
            seen = int(self._vla_memory.save(info["env_id"])["frames"])
            assert seen == 1 + info["elapsed_steps"] // self.chunk_len
            start = Start(info["suite"], info["task_id"], info["init_state_id"], info["seed"])
            self.played[start, seen] = chunk
        return chunks


class Recorded(Recording, VLAPolicy): ...


class RecordedActor(Recording, ActorPolicy): ...


def recorded(**kwargs: Any) -> Recorded:
    policy = Recorded(GRUVLA(load("mini")), **kwargs)
    policy.played = {}
    return policy


def played(policy: Any, **settings: Any) -> list[Episode]:
    return sorted(play(policy, STARTS, **SETTINGS, **settings), key=lambda e: e.start)


def test_chunks_do_not_depend_on_environments_and_workers():
    one, three = recorded(), recorded()
    episodes = played(one, num_envs=1, workers=0)
    assert played(three, num_envs=3, workers=2) == episodes and len(one.played) == 12
    assert_same(three.played, one.played)


def test_it_plays_as_by_hand_and_otherwise_than_without_a_state():
    policy = recorded(batch_size=1)
    [start] = STARTS[:1]
    list(play(policy, [start], num_envs=1, workers=0, **SETTINGS))
    envs = make_envs("goal", [0], policy, num_envs=1, workers=0, **SETTINGS)
    vla = policy.vla
    state, seen = vla.initial_state(1), 0
    obs, infos = envs.reset(options={"task_id": 0, "init_state_id": 0})
    over, moved = False, 0.0
    while not over:
        images = {camera: obs[camera] for camera in ("agentview", "wrist")}
        inputs = images, infos["instruction"].tolist(), obs["proprio"]
        output, state = vla.infer_with_state(*inputs, state)
        seen, chunk = seen + 1, output.actions.numpy()
        np.testing.assert_array_equal(policy.played[start, seen], chunk[0])
        moved = max(moved, np.abs(vla.infer(*inputs).actions.numpy() - chunk).max())
        obs, _, terminated, truncated, infos = envs.step(chunk)
        over = bool(terminated[0] or truncated[0])
    envs.close()
    assert seen == len(policy.played) and moved > 0.1


def test_an_episode_whose_worker_died_is_played_again_with_a_fresh_state():
    policy, alone = recorded(), recorded()
    policy.kill_at = 5
    envs = make_envs("goal", [0, 8], policy, num_envs=2, workers=1, **SETTINGS)
    with closing(envs) as policy.envs, pytest.warns(WorkerRestartWarning):
        episodes = sorted(rollout(envs, policy, STARTS), key=lambda e: e.start)
    assert sum(episode.replays for episode in episodes) >= 1
    expected = played(alone, num_envs=3, workers=0)
    assert [replace(episode, replays=0) for episode in episodes] == expected
    assert all(e.truncated and e.length == 24 and not e.success for e in expected)
    assert_same(policy.played, alone.played)


def test_a_policy_on_the_rl_token_sees_through_the_same_state():
    """Without a model of its own it plays the VLA's chunks."""
    policy = recorded()
    actor = RecordedActor(None, policy.vla, None, policy.chunk_len)
    actor.played = {}
    assert played(actor, num_envs=4, workers=0) == played(policy, num_envs=3, workers=0)
    assert_same(actor.played, policy.played)


def test_sampling_is_refused():
    class Sampling(GRUVLA):
        def act_tokens(self): ...

        def token_log_probs(self): ...

        def tokens_to_actions(self): ...

    with pytest.raises(ConfigError, match="has a state, and tokens are sampled without one"):
        VLAPolicy(Sampling(tiny_vla()), temperature=1.0)
