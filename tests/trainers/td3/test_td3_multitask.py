"""Several tasks: replay and loss give each its share; the guard."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_target import TINY
from td3_toys import td3_bc
from toy_env import CHUNK_LEN, ToyReach, in_process

from vla_gym.errors import ConfigError, WorkerError
from vla_gym.rollout.episodes import sampled_starts
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.networks import reference_chunk
from vla_gym_trainers.runs.sb3_vec_env import SB3VecEnv, sb3_vec_env
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.acting import ActingPolicy
from vla_gym_trainers.td3.checkpoint import load_checkpoint, save_checkpoint
from vla_gym_trainers.td3.config import TD3Config, TD3RunConfig
from vla_gym_trainers.td3.task_sampler import TaskSampler
from vla_gym_trainers.td3.train import build_model, guard_policy
from vla_gym_trainers.td3.updates import actor_step

#: Task 0: the reference misses by a constant that a policy can learn. Task 1: it hardly misses.
BIASES = {0: (0.05, -0.04, 0.03), 1: (0.0, 0.0, 0.0)}


class ToyTasks(ToyReach):
    """Each episode plays task 0 or 1, drawn by the environment's generator, and by weights."""

    task = 0
    weights: dict[int, float] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        sizes = [self.weights.get(task, 1.0) for task in (0, 1)]
        drawn = int(self.np_random.random() * sum(sizes) >= sizes[0])
        self._play((options or {}).get("task_id", drawn))
        return self._observe(), self._info(False, 0)

    def _play(self, task: int) -> None:
        self.task, self.bias = task, np.array(BIASES[task])

    def set_task_weights(self, weights: dict[int, float]) -> None:
        self.weights = weights

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "task": self.task}

    def set_state(self, state: dict[str, Any]) -> dict[str, Any]:
        self._play(state["task"])
        return super().set_state(state)

    def _observe(self) -> dict[str, Any]:
        return {**super()._observe(), "task_id": np.int64(self.task)}


def make_tasks(num_envs: int = 4) -> SB3VecEnv:
    return sb3_vec_env(in_process(lambda _: ToyTasks(), num_envs))  # type: ignore[return-value]


def batch_of(tasks: list[int]) -> dict[str, np.ndarray]:
    env = ToyReach()
    rows = [env.reset(seed=i)[0] | {"task_id": task} for i, task in enumerate(tasks)]
    return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}


def test_batches_hold_tasks_alike_and_the_loss_tells_them_apart(monkeypatch) -> None:
    seen = []

    def record(q: Any, groups: Any) -> Any:
        seen.append(groups)
        return q_divisor(q, groups)

    q_divisor = losses.q_divisor
    monkeypatch.setattr(losses, "q_divisor", record)
    with closing(make_tasks(2)) as env:
        model = build_model(TD3RunConfig(task_ids=(1, 0), **TINY), env).learn(128)
    tasks = model.replay_buffer.sample(64).observations["task_id"]
    assert int((tasks == 1).sum()) == 32
    assert seen and all(sorted(set(groups.tolist())) == [0, 1] for groups in seen)


def test_the_guard_plays_the_vla_where_the_policy_is_worse(tmp_path: Path) -> None:
    player = RunPlayer(in_process(lambda _: ToyTasks(), 4, "DISABLED"), CHUNK_LEN)
    with closing(make_tasks()) as env, closing(player):
        model = td3_bc(env)
        with torch.no_grad():  # as far as it can in one direction
            model.policy.actor.head.bias[:] = 9.0
        guard = guard_policy(model.policy, player, sampled_starts("toy", (0, 1), 8, 7))
        rows = guard["by_task"]
        assert [row["task_id"] for row in rows] == [0, 1]
        lost = [row["policy_successes"] < row["vla_successes"] for row in rows]
        worse = tuple(task for task in (0, 1) if lost[task])
        assert model.policy.guarded_tasks == worse
        assert 1 in worse
        assert [row["episodes"] for row in rows] == [8, 8]
        assert (guard["num_guarded"], guard["guarded_tasks"]) == (len(worse), list(worse))
        played = [row["plays"] for row in rows]
        assert played == ["vla" if t in worse else "policy" for t in (0, 1)]
    model.policy.guarded_tasks = (1,)
    model.policy.save(tmp_path / "model.safetensors")
    for player in (model, load_policy(tmp_path / "model.safetensors")):
        obs = batch_of([1, 0, 1])
        action = player.predict(obs)[0]
        np.testing.assert_array_equal(action[[0, 2]], obs["vla_action"][[0, 2]])
        one = {key: value[0] for key, value in obs.items()}
        np.testing.assert_array_equal(player.predict(one)[0], one["vla_action"])
        assert np.abs(action[1] - obs["vla_action"][1]).max() > 0.5


def test_what_is_solved_is_played_less() -> None:
    sampler = TaskSampler()
    assert sampler.weights() == {}
    for task_id, won, lost in ((0, 28, 0), (1, 9, 9), (2, 0, 8), (3, 30, 70)):
        for success in [False] * lost + [True] * won:
            ends: list[dict[str, Any]] = [{"is_success": success}, {}, {"is_success": True}]
            ends[2]["worker_restarted"] = True
            sampler.add(np.array([[task_id]] * 3), np.array([True, False, True]), ends)
    # p = 29/30, 1/2, 1/10 and, of the newest 30 episodes alone, 31/32; 0.1 + 0.9 * 4 p (1 - p),
    # below a half 1
    expected = {0: 0.216, 1: 1.0, 2: 1.0, 3: 0.1 + 3.6 * 31 / 1024}
    assert sampler.weights() == pytest.approx(expected)
    inside = [{"is_success": True, "demo_steps": 7}] * 8
    sampler.add(np.full(8, 2), np.ones(8, bool), inside)
    assert sampler.weights() == pytest.approx(expected | {2: 1.0 + 0.424})
    with pytest.raises(ConfigError, match="is_success where an episode ends, got success: add it"):
        sampler.add(np.zeros(1, int), np.ones(1, bool), [{"success": True}])


def test_weights_of_tasks_are_told_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = {**TINY, "task_ids": (1, 0), "ahead": 1, "train_freq": 4}
    settings |= {"task_sampling": "unsolved", "bc_half_life": 40, "actor_ema": 0.9}
    config = TD3RunConfig(**settings)
    with closing(make_tasks(2)) as env:
        told = record_weights(env)
        whole = build_model(config, env).learn(160)
    assert told[0] == {} and all(set(w) == {0, 1} for w in told[8:])
    assert len({tuple(w.items()) for w in told}) > 5
    # Batches are drawn by the same weights.
    assert whole.replay_buffer.task_weights == whole.task_sampler.weights()
    with closing(make_tasks(2)) as first, closing(make_tasks(2)) as second:
        before, after = record_weights(first), record_weights(second)
        save_checkpoint(tmp_path, build_model(config, first).learn(80), {})
        again, _ = load_checkpoint(tmp_path, second)
        again.learn(80, reset_num_timesteps=False)
    assert again.num_timesteps == whole.num_timesteps == 160
    assert before + after == told
    for key, value in whole.policy.state_dict().items():
        torch.testing.assert_close(again.policy.state_dict()[key], value, rtol=0, atol=0)


def record_weights(env: Any) -> list[dict[int, float]]:
    """Return the list that fills with the weights that environments are told."""
    told: list[dict[int, float]] = []
    method = env.env_method

    def env_method(name: str, *arguments: Any, **kwargs: Any) -> Any:
        if name == "set_task_weights":
            told.append(*arguments)
        return method(name, *arguments, **kwargs)

    env.env_method = env_method
    return told


@pytest.mark.parametrize("dies", [False, True])
def test_environments_play_by_the_weights(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """Task 1 has the weight 0; where a worker dies over it, tasks are drawn evenly."""
    monkeypatch.setattr(TaskSampler, "weights", lambda _: {1: 0.0})
    config = TD3RunConfig(task_ids=(1, 0), task_sampling="unsolved", **TINY)
    with closing(make_tasks(2)) as env:
        if dies:

            def env_method(*_: Any, **__: Any) -> None:
                raise WorkerError("it was killed")

            env.env_method = env_method  # type: ignore[method-assign]
        model = build_model(config, env).learn(64)
    assert set(model.replay_buffer.task_counts) == ({0, 1} if dies else {0})


@pytest.mark.parametrize("told", [False, True])
def test_networks_are_told_the_task(told: bool, tmp_path: Path) -> None:
    """All else alike, chunks and values of two tasks differ if use_task_id says which it is."""
    config = TD3RunConfig(task_ids=(1, 0), use_task_id=told, **TINY)
    with closing(make_tasks(2)) as env:
        model = build_model(config, env).learn(160)
    one = batch_of([0])
    obs = {key: np.concatenate([value, value]) for key, value in one.items()}
    obs["task_id"] = np.array([0, 1])
    model.policy.save(tmp_path / "model.safetensors")
    policy = load_policy(tmp_path / "model.safetensors")
    chunks = policy.predict(obs)[0]
    np.testing.assert_array_equal(chunks, model.predict(obs)[0])
    assert bool(np.abs(chunks[0] - chunks[1]).max() > 1e-4) is told
    np.testing.assert_array_equal(ActingPolicy(model.policy, "cpu").act(obs), chunks)
    seen = model.policy.obs_to_tensor(obs)[0]
    x = model.policy.normalizer(seen)
    values = model.policy.critic(x, reference_chunk(seen))
    assert bool((values[0] - values[1]).abs().max() > 1e-4) is told
    if told:
        num_tasks = model.policy.normalizer.num_tasks
        expected = np.sqrt(num_tasks) * np.eye(num_tasks)[[0, 1]]
        np.testing.assert_allclose(x[:, -num_tasks:].numpy(), expected, rtol=1e-6)
        with pytest.raises(ConfigError, match=f"which of {num_tasks} tasks it plays"):
            policy.predict({**obs, "task_id": np.array([0, num_tasks])})


@pytest.mark.parametrize("option", [{"task_sampling": "unsolved"}, {"use_task_id": True}])
def test_what_depends_on_tasks_needs_them(option: dict[str, Any]) -> None:
    env = ToyReach()
    del env.observation_space.spaces["task_id"]
    with pytest.raises(ConfigError, match="need to know an episode's task"):
        td3_bc(env, **option)


def test_beta_halves_after_the_warm_up() -> None:
    config = TD3Config(learning_starts=100, bc_weight=0.8, bc_half_life=50)
    betas = [config.at(chunks).bc_weight for chunks in (0, 100, 150, 175, 250)]
    assert betas == pytest.approx([0.8, 0.8, 0.4, 0.8 * 0.5**1.5, 0.1])
    ended = replace(config, bc_weight_end=0.3)
    assert [ended.at(chunks).bc_weight for chunks in (100, 150, 250)] == pytest.approx(
        [0.8, 0.4, 0.3]
    )
    assert replace(ended, bc_weight=0.2).at(250).bc_weight == 0.2
    assert TD3Config().at(10**6) == TD3Config()


def test_actor_steps_have_the_beta_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(policy: Any, batch: Any, bc_weight: Any, **rest: Any) -> dict[str, Any]:
        seen.append(bc_weight.item())
        return actor_step(policy, batch, bc_weight, **rest)

    monkeypatch.setattr("vla_gym_trainers.td3.updates.actor_step", record)
    td3_bc(critic_warmup_steps=0, bc_half_life=16, ahead=0, train_freq=8).learn(48)
    # 16 chunks of warm-up, then blocks of 8
    assert sorted(set(seen), reverse=True) == pytest.approx([2**-0.5, 0.5, 2**-1.5, 0.25])
