"""Several tasks: heads on a shared trunk, the guard, policies of single tasks used as one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_target import TINY, make_toy_env, make_toy_vec
from toy_env import ToyReach
from toy_tasks import make_tasks

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers import TD3BC
from vla_gym_trainers.evaluation.evaluate import load_policy
from vla_gym_trainers.runs.guard import guard_policy
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.per_task import PerTaskPolicy, load_per_task
from vla_gym_trainers.td3.train import TD3Config, build_model, train_td3


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(env: Any = None, **policy_kwargs: Any) -> TD3BC:
    kwargs = {"net_arch": (16,), "precision": "fp32", **policy_kwargs}
    return TD3BC(
        "RLTokenPolicy",
        env or ToyReach(),
        learning_starts=16,
        critic_warmup_steps=0,
        batch_size=16,
        balanced_replay=True,
        policy_kwargs=kwargs,
        seed=1,
    )


def batch_of(tasks: list[int]) -> dict[str, np.ndarray]:
    env = ToyReach()
    rows = [env.reset(seed=i)[0] | {"task_id": task} for i, task in enumerate(tasks)]
    return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}


def worsen(model: TD3BC, head: int) -> None:
    """Let one head go as far as it can in one direction."""
    with torch.no_grad():
        model.policy.actor.head.bias.unflatten(0, (model.policy.actor.num_heads, -1))[head] = 9.0


def test_each_task_has_its_own_head() -> None:
    model, obs = make(task_heads=(3, 5)), batch_of([5, 3, 5])
    np.testing.assert_array_equal(model.predict(obs)[0], obs["vla_action"])
    worsen(model, 1)  # task 5's
    moved = np.abs(model.predict(obs)[0] - obs["vla_action"]).max(axis=(1, 2))
    assert moved[1] == 0.0
    assert (moved[[0, 2]] > 0.5).all()
    one = {key: value[0] for key, value in obs.items()}
    np.testing.assert_array_equal(model.predict(one)[0], model.predict(obs)[0][0])

    x, action = torch.randn(3, 20), torch.randn(3, 28)
    critic, heads = model.policy.critic, torch.tensor([1, 0, 1])
    apart = torch.stack([critic(x, action, head=torch.full((3,), h)) for h in (0, 1)])
    torch.testing.assert_close(critic(x, action, head=heads), apart[heads, torch.arange(3)])
    assert (apart[0] - apart[1]).abs().min() > 0


def test_a_task_teaches_its_own_head_alone() -> None:
    model = make(task_heads=(0, 1))  # ToyReach is task 0 throughout
    actor, critic = model.policy.actor, model.policy.critic
    before = critic.weights[-1].detach().clone()
    model.learn(48)
    rows = actor.head.weight.detach().unflatten(0, (2, -1))
    assert rows[0].abs().max() > 0
    assert rows[1].abs().max() == 0
    changed = (critic.weights[-1].detach() - before).abs().amax(dim=(0, 1))
    assert changed[0] > 0
    assert changed[1] == 0


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="heads for tasks"):
        make(task_heads=(3, 5)).predict(batch_of([3, 4]))
    for bad in ((3, 3), (10,), (-1,)):
        with pytest.raises(ConfigError, match="task_heads"):
            make(task_heads=bad)


def test_a_suite_policy_saves_its_heads_and_samples_tasks_alike(tmp_path: Path) -> None:
    with closing(make_tasks(2)) as env:
        config = TD3Config(task_ids=(1, 0), task_heads=True, **TINY)
        model = build_model(config, env)
        assert model.policy.settings["task_heads"] == (0, 1)
        model.learn(64)
        assert set(model.replay_buffer.task_counts) == {0, 1}
        tasks = model.replay_buffer.sample(64).observations["task_id"]
        assert int((tasks == 1).sum()) == 32
        model.save(tmp_path / "model.zip")
    worsen(model, 1)
    model.save(tmp_path / "worse.zip")
    obs = batch_of([0, 1])
    loaded = load_policy(tmp_path / "worse.zip")
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])


def test_the_actor_weighs_each_task_by_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(*args: Any, **kwargs: Any) -> losses.ActorLoss:
        seen.append(kwargs["groups"])
        return actor_loss(*args, **kwargs)

    actor_loss = losses.actor_loss
    monkeypatch.setattr(losses, "actor_loss", record)
    with closing(make_tasks(2)) as env:
        build_model(TD3Config(task_ids=(1, 0), **TINY), env).learn(160)
    assert seen
    assert all(sorted(set(groups.tolist())) == [0, 1] for groups in seen)


def test_the_guard_plays_the_vla_where_the_policy_is_worse(tmp_path: Path) -> None:
    with closing(make_tasks()) as env:
        model = make(env, task_heads=(0, 1))
        worsen(model, 1)
        guard = guard_policy(model, env, 4, seed=7)
        assert guard.guarded == model.guarded_tasks == (1,)
        assert sum(guard.episodes.values()) == 16
        assert guard.policy[0] == guard.vla[0]  # task 0's head is still the VLA
        assert guard.policy[1] < guard.vla[1]
        report = guard.report()
        assert (report["num_guarded"], report["guarded_tasks"]) == (1, [1])
        assert [row["plays"] for row in report["by_task"]] == ["policy", "vla"]
    model.save(tmp_path / "model.zip")
    worsen(model, 0)
    for player in (model, load_policy(tmp_path / "model.zip")):
        obs = batch_of([1, 0, 1])
        action = player.predict(obs)[0]
        np.testing.assert_array_equal(action[[0, 2]], obs["vla_action"][[0, 2]])
        one = {key: value[0] for key, value in obs.items()}
        np.testing.assert_array_equal(player.predict(one)[0], one["vla_action"])
    assert np.abs(model.predict(obs)[0][1] - obs["vla_action"][1]).max() > 0.5


def test_policies_of_tasks_play_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_td3_module, "make_vec", make_toy_vec)
    monkeypatch.setattr(train_td3_module, "make_env", make_toy_env)
    small = {"total_chunks": 80, "eval_every": 0, "eval_states": 3, "guard_layouts": 2}
    config = TD3Config(
        task_ids=(5, 2), per_task=True, run_dir=tmp_path / "run", **{**TINY, **small}
    )
    run = train_td3(config)
    assert [row["task_id"] for row in run.card["results"]["policy"]] == [2, 5]
    assert set(run.card["results"]["training"]) == {"2", "5"}
    assert len(run.card["results"]["guard"]["by_task"]) == 2
    joint = load_policy(run.run_dir)
    assert isinstance(joint, PerTaskPolicy)
    obs = batch_of([5, 2])
    single = load_policy(run.run_dir / "task_05").predict(obs)[0]
    np.testing.assert_allclose(joint.predict(obs)[0][0], single[0], atol=1e-6)
    one = {key: value[0] for key, value in obs.items()}
    np.testing.assert_allclose(joint.predict(one)[0], single[0], atol=1e-6)
    with pytest.raises(ConfigError, match="tasks"):
        joint.predict(batch_of([3]))
    with pytest.raises(ConfigError, match="holds a run"):
        train_td3(config)

    # Cut off after the first task: the second one begins, the first one is not touched.
    written = (tmp_path / "run/task_02/card.json").stat().st_mtime_ns
    (tmp_path / "run/card.json").unlink()
    for file in ("card.json", "config.json", "policy.zip"):
        (tmp_path / "run/task_05" / file).unlink()
    for folder in (tmp_path / "run/task_05/checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    resumed = train_td3_module.resume_td3(tmp_path / "run")
    assert (tmp_path / "run/task_02/card.json").stat().st_mtime_ns == written
    assert json.loads((tmp_path / "run/card.json").read_text())["results"].keys() == (
        resumed.card["results"].keys()
    )
    again = load_policy(tmp_path / "run/task_05").predict(obs)[0]
    np.testing.assert_array_equal(again, single)
    with pytest.raises(WeightsError, match="no policies"):
        load_per_task(tmp_path / "nowhere", load_policy)
