"""Terms of rewards: added up over pieces, one mean for each log, in TD3 and on-policy training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from on_policy_toys import tiny_policy, toy_rollout
from resume_target import TINY, make_toy_player
from toy_env import InPieces, ToyReach, in_process
from toy_token_env import ToyTokenEnv

import vla_gym_trainers.td3.train as td3
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.targets import rollout_metrics
from vla_gym_trainers.report.data import read_rows
from vla_gym_trainers.rollout.chunks import ChunkEnvs
from vla_gym_trainers.rollout.reward_terms import reward_metrics
from vla_gym_trainers.runs.sb3_vec_env import sb3_vec_env
from vla_gym_trainers.td3.config import TD3RunConfig


class Paid(gym.Wrapper):
    """Rewards with two terms: the task's, and a tenth of the step's number."""

    count = 0

    def reset(self, **kwargs: Any) -> Any:
        self.count = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.count += 1
        paid = {"task": reward, "novelty": 0.1 * self.count}
        return obs, sum(paid.values()), terminated, truncated, info | {"reward_terms": paid}

    def get_state(self) -> Any:
        return self.count, self.env.get_wrapper_attr("get_state")()

    def set_state(self, state: Any) -> Any:
        self.count, inner = state
        return self.env.get_wrapper_attr("set_state")(inner)


def vector(env: Any, num_envs: int = 2) -> LiberoVectorEnv:
    return in_process(lambda i: Paid(env(i)), num_envs)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_chunk_has_the_terms_of_all_that_it_executed(pieces: bool) -> None:
    """Episodes of 24 control steps in six chunks of four; of 22 in eleven pieces of two."""
    envs = ChunkEnvs(vector(lambda _: InPieces() if pieces else ToyReach()))
    obs, everyone = envs.reset(seed=0), np.arange(2)
    seen: list[list[float]] = [[], []]
    ended = np.zeros(2, bool)
    while not ended.all():
        running, step = envs.begin(np.zeros_like(obs["vla_action"]), everyone), None
        while step is None:
            step = running.recv()
        for i in np.flatnonzero(~ended):
            terms = step.infos[i]["reward_terms"]
            assert terms["task"] == 0.0
            seen[i].append(terms["novelty"])
        ended |= step.dones
    numbers = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11,)]
    expected = [0.1 * sum(n) for n in numbers] if pieces else [0.1 * n for n in range(1, 7)]
    for row in seen:
        assert row == pytest.approx(expected)


class Faulty(Paid):
    """The second chunk of an episode has a term that is no number."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.count == 2:
            result[-1]["reward_terms"]["novelty"] = np.nan
        return result


@pytest.mark.parametrize("kind", [Paid, Faulty])
def test_a_rollout_logs_their_means_without_nan(kind: type[Paid]) -> None:
    policy = tiny_policy()
    envs = in_process(lambda i: kind(ToyTokenEnv(i)), 4)
    collector, rollout = RolloutCollector(envs), toy_rollout(policy=policy)
    for seed in (7, 8):
        collector.collect(policy, rollout, seed=seed)
        metrics = rollout_metrics(rollout)
        lengths = rollout.data["valid"].sum(1).tolist()
        numbers = [k for n in lengths for k in range(1, int(n) + 1) if kind is Paid or k != 2]
        novelty = [0.1 * k for k in numbers]
        assert len(rollout.reward_terms["rollout/reward_novelty"]) == len(novelty), (
            "of this rollout alone"
        )
        assert metrics["rollout/reward_novelty"] == pytest.approx(np.mean(novelty))
        assert metrics["rollout/reward_task"] == pytest.approx(
            metrics["rollout/success"] * metrics["rollout/episodes"] / metrics["rollout/chunks"]
        )
    envs.close()
    assert not any(key.startswith("rollout/reward_") for key in rollout_metrics(toy_rollout()))


def test_td3_logs_their_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(td3, "make_vec", lambda _: sb3_vec_env(vector(lambda _: ToyReach())))
    monkeypatch.setattr(td3, "make_player", make_toy_player)
    td3.train_td3(TD3RunConfig(**{**TINY, "eval_every": 0}, run_dir=tmp_path))
    rows = read_rows(tmp_path / "metrics.jsonl")
    for name, low, high in (("novelty", 0.2, 0.5), ("task", 0.0, 0.3)):
        values = [row[key] for row in rows if (key := f"rollout/reward_{name}") in row]
        assert len(values) > 3 and low < np.mean(values) < high


def test_terms_of_a_chunk_with_nan_are_left_out() -> None:
    assert reward_metrics({"task": 1.0, "novelty": np.nan}) == {"rollout/reward_task": 1.0}
