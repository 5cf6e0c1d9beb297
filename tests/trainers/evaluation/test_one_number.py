"""One policy has one number, whoever plays it: eval, validation, guard, final evaluation, films."""

from __future__ import annotations

from contextlib import closing

import gymnasium as gym
import pytest
import torch

from vla_gym.rollout import Episode, Start, play
from vla_gym.rollout.film import film
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym_trainers.evaluation.command import run_eval
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.trained import load_trained
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.closed_loop import BestModel
from vla_gym_trainers.td3.train import TD3RunConfig, build_model, guard_policy, make_player

OFFICIAL = [Start("goal", 8, 1)]
STARTS = [*OFFICIAL, Start("goal", 8, -1, 5)]


def outcomes(episodes: list[Episode]) -> dict[Start, tuple[bool, int]]:
    return {episode.start: (episode.success, episode.length) for episode in episodes}


@pytest.mark.slow
def test_every_caller_plays_the_same_episodes(tmp_path, monkeypatch):
    env = gym.make("vla_gym:LiberoVLA-goal-v0", task_ids=8, vla="mini")
    model = build_model(TD3RunConfig(net_arch=(16,), buffer_size=10), env)
    env.close()
    # So that it differs from the VLA.
    with torch.no_grad():
        model.policy.actor.head.bias.fill_(0.2)
    model.policy.save(tmp_path / "policy.safetensors")
    (tmp_path / "config.json").write_text('{"vla": "mini"}')
    trained = load_trained(tmp_path)
    wanted = outcomes(list(play(trained, STARTS, num_envs=2, workers=0)))
    vla = VLAPolicy("mini")
    of_vla = outcomes(list(play(vla, STARTS, num_envs=1, workers=0)))
    assert wanted != of_vla

    filmed = {}
    for episode, frames in film(trained, STARTS[1:], size=64):
        assert len(frames) == 1 + episode.length
        filmed |= outcomes([episode])
    assert filmed == {start: wanted[start] for start in STARTS[1:]}
    config = EvalConfig(policy=str(tmp_path), task_ids=(8,), episodes=2, workers=0, progress=False)
    row = run_eval(config)["results"]["episodes"][1]
    assert (row["success"], row["length"]) == wanted[OFFICIAL[0]]
    monkeypatch.setattr("vla_gym_trainers.td3.train.EVAL_ENVS", 2)
    run = TD3RunConfig(task_ids=(8,), vla="mini", workers=0, assets="lite")
    with closing(make_player(run)) as player:
        assert outcomes(player.play(model, STARTS)) == wanted
        assert outcomes(player.play(None, STARTS)) == of_vla
        final = player.evaluate(model, OFFICIAL)
        for who, played in (("policy", wanted), ("start", of_vla)):
            (row,) = final[who]["episodes"]
            assert (row["success"], row["length"]) == played[OFFICIAL[0]]
        guard = guard_policy(model.policy, player, STARTS)
        (row,) = guard["by_task"]
        assert row["policy_successes"] == sum(won for won, _ in wanted.values())
        assert row["vla_successes"] == sum(won for won, _ in of_vla.values())
        (tmp_path / "run").mkdir()
        best = BestModel(player, STARTS, RunDir(tmp_path / "run"), every=1)
        model.policy.guarded_tasks = ()
        best.begin(model, 1)
        metrics = best.poll(wait=True)
        best.close()
        won = [flag for flag, _ in wanted.values()]
        assert metrics["eval/success"] == sum(won) / len(won)
        assert metrics["eval/vla_success"] == sum(f for f, _ in of_vla.values()) / len(of_vla)
