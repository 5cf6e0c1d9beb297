"""vla-gym eval: what is played, by whom; the same for any number of environments and workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from td3_toys import save_policy

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.scene_cache import load_task
from vla_gym.errors import ConfigError
from vla_gym.experts import make_expert
from vla_gym.experts.registry import _BUILDERS
from vla_gym.rl_token import load_rl_token
from vla_gym.rollout import (
    Episode,
    ExpertPolicy,
    Info,
    Policy,
    RandomPolicy,
    Start,
    make_envs,
    play,
    rollout,
)
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.rollout.workers import ExpertActs, WatchGoals
from vla_gym.suites import get_task
from vla_gym.suites.libero import evaluate_goal
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.paraphrases import paraphrases
from vla_gym_trainers.evaluation.command import run_eval
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.trained import load_trained

pytestmark = pytest.mark.usefixtures("warm_server")

# Two instructions of different length, states that succeed soon and ones that do not.
STARTS = [Start("goal", task, state) for task in (0, 8) for state in (0, 1)]


def played(policy: Policy, starts: Sequence[Start] = STARTS, **settings: Any) -> list[Episode]:
    episodes = list(play(policy, starts, **settings))
    assert sorted(e.start for e in episodes) == sorted(starts)  # each once
    return sorted(episodes, key=lambda e: e.start)


def test_episodes_do_not_depend_on_environments_and_workers() -> None:
    policy = VLAPolicy("mini-few", batch_size=4)
    starts = [Start("goal", 0, 2), *(Start("goal", 8, state) for state in (1, 2, 3))]
    settings: dict[str, Any] = {"max_control_steps": 104}
    one = played(policy, starts, num_envs=1, workers=0, **settings)
    assert played(policy, starts, num_envs=5, workers=2, **settings) == one
    assert {e.success for e in one} == {True, False}, "choose states that tell more"
    assert len({e.length for e in one}) >= 3


def test_what_draws_is_known_before_the_first_episode_ends() -> None:
    """Rows of results name it, and an evaluation may be stopped after any of them."""
    facts: dict[str, Any] = {}
    settings: dict[str, Any] = {"num_envs": 2, "workers": 0, "max_control_steps": 4}
    episodes = play(VLAPolicy("mini-few"), STARTS[:2], facts=facts, **settings)
    seen = [(facts.get("gl_renderer"), facts.get("visual_profile")) for _ in episodes]
    assert len(seen) == 2 and all(renderer and profile for renderer, profile in seen)


def observations(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (rows, 128, 128, 3)
    images = {k: rng.integers(0, 256, shape).astype(np.uint8) for k in ("agentview", "wrist")}
    proprio = rng.normal(0.0, 0.3, (rows, 8)).astype(np.float32)
    return {**images, "proprio": proprio, "task_id": np.zeros(rows, np.int64)}


def infos(tasks: Sequence[int]) -> list[Info]:
    return [
        Info(
            env_id=row,
            suite="goal",
            task_id=task,
            init_state_id=row,
            seed=0,
            instruction=get_task("goal", task).instruction,
            elapsed_steps=8 * row,
        )
        for row, task in enumerate(tasks)
    ]


@pytest.mark.parametrize("head", ["l1", "token", "sampled"])
def test_a_chunk_depends_on_its_own_row_alone(head: str) -> None:
    if head == "sampled":
        policy = VLAPolicy("mini", head="token", temperature=1.0, seed=3)
    else:
        policy = VLAPolicy("mini", head=head, batch_size=4)
    obs, told = observations(7), infos([0, 8, 8, 3, 0, 8, 6])
    together = policy.act(obs, told)
    assert together.shape == (7, 8, 7) and np.abs(together).max() <= 1.0
    for rows in ([6, 5, 4, 3, 2, 1, 0], [0], [1], [3, 1], [5, 2, 1, 6]):
        again = policy.act({k: v[rows] for k, v in obs.items()}, [told[row] for row in rows])
        np.testing.assert_array_equal(again, together[rows])
    if head == "sampled":
        other = VLAPolicy("mini", head="token", temperature=1.0, seed=4).act(obs, told)
        assert (other != together).any()
        assert "T=1" in policy.name and policy.identity["seed"] == 3


@pytest.mark.parametrize("vla", [3, SimpleNamespace(name="mine", horizon=8)])
def test_what_is_no_vla_plays_nothing(vla: Any) -> None:
    with pytest.raises(ConfigError, match="derived from vla_gym.vla.FrozenVLA; got"):
        VLAPolicy(vla)


@pytest.mark.parametrize(
    "wrong", [{"phrasing": "held_out"}, {"temperature": -1.0}, {"seed": -1}, {"batch_size": 0}]
)
def test_options_that_a_vla_policy_would_ignore_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        VLAPolicy("mini", **wrong)


def test_held_out_words_reach_the_vla() -> None:
    policy = VLAPolicy("mini", phrasing="held-out")
    assert policy.identity["phrasing"] == "held-out" and "held-out" in policy.name
    obs, told = observations(2), infos([8, 7])
    said = [paraphrases(info["instruction"], held_out=True)[0] for info in told]
    assert said == ["take the bowl and place it on the plate", "turn the stove on"]
    by_hand = [{**info, "instruction": text} for info, text in zip(told, said, strict=True)]
    expected = VLAPolicy("mini").act(obs, by_hand)
    np.testing.assert_array_equal(policy.act(obs, told), expected)
    assert (VLAPolicy("mini").act(obs, told) != expected).any()
    assert told[0]["instruction"] == "put the bowl on the plate"


def test_functions_of_every_control_step_change_nothing() -> None:
    make = partial(LiberoEnv, "goal", chunk_len=8, image_size=64)
    steps: list[int] = []
    rng = np.random.default_rng(1)
    with make() as plain, make() as watched:
        watched.on_control_step.append(lambda _, info: steps.append(info["elapsed_steps"]))
        results = [e.reset(options={"task_id": 7, "init_state_id": 4}) for e in (plain, watched)]
        for _ in range(5):
            (want, _), (got, _) = results
            for key in want:
                np.testing.assert_array_equal(got[key], want[key])
            action = rng.uniform(-1, 1, (8, 7)).astype(np.float32)
            first, second = (e.step(action) for e in (plain, watched))
            assert first[1:] == second[1:]
            results = [(step[0], step[4]) for step in (first, second)]
        assert steps == list(range(41))
        watched.replace_action = lambda row: 0 * row
        watched.step(action)
        assert steps[-1] == 48


def test_the_expert_plays_as_by_hand() -> None:
    env = LiberoEnv("goal", cameras=())
    by_hand = []
    for start in STARTS[2:]:
        env.reset(options={"task_id": start.task_id, "init_state_id": start.init_state_id})
        expert, over = make_expert(env.sim), False
        while not over:
            _, _, terminated, truncated, info = env.step(expert.act())
            over = terminated or truncated
        by_hand.append((info["success"], info["elapsed_steps"]))
    env.close()
    episodes = played(ExpertPolicy(chunk_len=5), STARTS[2:], workers=0)
    assert [(e.success, e.length) for e in episodes] == by_hand


def test_starts_may_come_one_by_one() -> None:
    """The next one may depend on what has ended; None means: ask again then."""
    policy = RandomPolicy(seed=2)
    left, running = [Start("goal", 1, -1, seed) for seed in (9, 4, 9)], []

    def one_at_a_time() -> Start | None:
        if running or not left:
            return None
        running.append(left.pop(0))
        return running[0]

    settings: dict[str, Any] = {"num_envs": 2, "workers": 0, "max_control_steps": 16}
    seen = []
    with closing(make_envs("goal", [1], policy, **settings)) as envs:
        for episode in rollout(envs, policy, one_at_a_time):
            seen.append(episode)
            running.remove(episode.start)
    assert [episode.start.seed for episode in seen] == [9, 4, 9]
    assert seen[0] == seen[2] and seen[0].length == 16
    with closing(LiberoVectorEnv(1, "goal", workers=0)) as own:
        with pytest.raises(ConfigError, match="autoreset_mode='DISABLED', got NEXT_STEP"):
            next(rollout(own, policy, []))


def test_the_goal_that_comes_first_is_noticed() -> None:
    """Told to put the bowl on the cabinet (4), it puts it on the plate (8)."""
    inner = LiberoEnv("goal", cameras=(), chunk_len=8, max_control_steps=150)
    env = WatchGoals(ExpertActs(inner))
    env.reset(options={"task_id": 4, "init_state_id": 1})
    other = _BUILDERS["goal"][8](inner.sim)
    inner.replace_action = lambda _: other.act()
    over = False
    while not over:
        _, _, terminated, over, info = env.step(np.zeros((8, 7), np.float32))
        assert not terminated and ("achieved" in info) == over
    assert info["achieved"] == 8 and 0 < info["achieved_step"] < 150

    # What holds when an episode begins does not count in it.
    watch = WatchGoals(inner)
    assert evaluate_goal(load_task(get_task("goal", 8), "lite").goal, inner.sim.data)
    for step in (0, 1):
        watch.watch(inner, {"elapsed_steps": step, "task_id": 4})
    assert watch._first == (-1, -1)
    env.close()


def test_a_trained_policy_plays_from_its_run_directory_and_knows_its_vla_and_rl_token(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    load_rl_token("mini-few").save_pretrained(token)
    obs, told = observations(3), infos([8, 0, 8])
    # An untrained actor starts at the VLA's chunk, but for the rounding of the action's scaling.
    expected, names = VLAPolicy("mini-few", chunk_len=4).act(obs, told), {}
    for name, text, dim in (("own", str(token), 256), ("mean", "mean", 192), ("new", "auto", 256)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"vla": "mini-few", "rl_token": text}))
        save_policy(run, chunk_len=4, token_dim=dim)
        # The file knows them too, as it lies beside the configuration.
        policy = load_trained(run / "policy.safetensors")
        assert policy.identity == load_trained(run).identity
        assert policy.chunk_len == 4 and policy.identity["vla"]["name"] == "mini-few"
        names[name] = policy.identity["rl_token"]["name"]
        chunks = policy.act(obs, told)
        np.testing.assert_allclose(chunks, expected, atol=1e-5)
        alone = policy.act({key: value[2:] for key, value in obs.items()}, told[2:])
        np.testing.assert_array_equal(alone[0], chunks[2])
    assert names == {"own": "token", "mean": "mean", "new": "mini-few-rl-token"}
    with pytest.raises(ConfigError, match="--rl-token \\(now auto\\)"):
        load_trained(tmp_path / "mean", rl_token="auto")


def test_the_device_is_an_option(tmp_path: Path) -> None:
    out = tmp_path / "card"
    config = EvalConfig(
        task_ids=(7,), episodes=1, workers=0, device="cpu:0", out=out, progress=False
    )
    assert run_eval(config)["protocol"]["device"] == "cpu:0"
