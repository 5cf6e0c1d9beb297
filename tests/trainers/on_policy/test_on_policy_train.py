"""Whole runs on the toy: files, resuming bit for bit, phases, processes, learning."""

import os
import signal
from functools import partial

import pytest
import torch
from mini_vla import random_inputs
from on_policy_toys import tiny_vla, toy_factories
from run_logs import assert_goes_on, rows_of
from safetensors.torch import load_file
from test_on_policy_distributed import two_processes

from vla_gym.errors import ConfigError
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.loop import Loop, rollout_seed
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.train import train
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.settings import read_settings

SMALL = {
    "num_envs": 4,
    "workers": 0,
    "episodes_per_env": 1,
    "num_minibatches": 2,
    "lora_r": 4,
    "learning_rate": 1e-2,
    "eval_every": 0,
    "eval_envs": 2,
    "eval_layouts": 2,
    "progress": False,
}


#: With draws that win now and then, so that there is something to learn.
GAUSSIAN = {"policy": "gaussian", "sigma": 0.5, "noise_correlation": 0.8, "lora_dropout": 0.1}
REPLAY = {"value_epochs": 2, "value_replay": 2}


class Guide(MiniBackend):
    """Its own actions go where the instruction says; its token head knows nothing."""

    def infer(self, images, instructions, proprio):
        output = super().infer(images, instructions, proprio)
        for row, text in enumerate(instructions):
            output.actions[row, :, 0] = 0.8 if "right" in text else -0.8
            output.actions[row, :, 1:] = 0.1
        return output


def run(kind, folder, vla=None, toy=None, **changes):
    config = kind(**{**SMALL, "run_dir": folder, **changes})
    envs = toy_factories(config, **(toy or {}))
    return train(config, vla=vla or tiny_vla(), envs=envs)


def test_a_run_leaves_what_is_needed(tmp_path):
    vla = tiny_vla()
    before = {k: v.clone() for k, v in vla.model.state_dict().items()}
    result = run(GRPOConfig, tmp_path / "run", vla, group_size=2, total_steps=150, eval_every=100)
    folder = result.run_dir
    assert all(torch.equal(v, before[k]) for k, v in vla.model.state_dict().items())
    rows = rows_of(folder)
    learning = [row for row in rows if "rollout/env_steps" in row]
    assert len(learning) == result.card["results"]["training"]["rollouts"] >= 2
    steps = [row["step"] for row in learning]
    assert steps == sorted(steps) and steps[-1] >= 150 > steps[-2]
    assert steps[-1] == sum(row["rollout/env_steps"] for row in learning)
    assert all(any(f"rollout/success_task_{t}" in row for row in learning) for t in (0, 1))
    assert [row["step"] for row in rows if "eval/success" in row][0] == 0
    assert all(row["rollout/staleness"] == 0 for row in learning)
    assert list((folder / "tensorboard").iterdir()) and (folder / "adapters").is_dir()
    saved = read_settings(folder / "config.json", GRPOConfig)
    assert saved.total_steps == 150 and saved.trained_heads() == ("token_head",)
    # What is to be used is the best one, with its adapters merged.
    parts = make_networks(saved, vla)
    parts.policy.load_state_dict(load_file(folder / "best.safetensors"))
    plain = MiniBackend.from_pretrained(folder / "vla")
    inputs = random_inputs(3)
    merged, adapted = (vla.token_outputs(*inputs).logits for vla in (plain, parts.policy.vla))
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="--resume"):
        run(GRPOConfig, folder, vla, group_size=2, total_steps=150)
    with pytest.raises(ConfigError, match="learning_rate"):
        run(GRPOConfig, folder, vla, group_size=2, resume=folder, learning_rate=1.0)
    with pytest.raises(ConfigError, match="is of 'vla-gym-train grpo', not of 'ppo'"):
        run(PPOConfig, folder, vla, resume=folder)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GRPOConfig, {"group_size": 2, "kl_coef": 0.1, "learning_rate_end": 0.0, **GAUSSIAN}),
        (PPOConfig, {"ahead": 1, "warmup_steps": 60, "transition_steps": 150}),
        (PPOConfig, {"episodes_per_env": None, "rollout_chunks": 4, "eval_every": 100, **REPLAY}),
    ],
)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, kind, changes):
    changes = {"total_steps": 330, "checkpoint_every": 120, **changes}
    whole = assert_goes_on(partial(run, kind), tmp_path, **changes)
    assert sum(row.get("train/grad_norm", 0) > 0 for row in rows_of(whole)) >= 3


def test_asynchronous_rollouts_are_stale_by_one_update(tmp_path):
    result = run(PPOConfig, tmp_path / "run", total_steps=400, ahead=1, checkpoint_every=200)
    rows = [row for row in rows_of(result.run_dir) if "rollout/staleness" in row]
    ages = [row["rollout/staleness"] for row in rows]
    # The first one, and the one after the checkpoint, had nothing to be collected beside.
    first_after = next(i for i, row in enumerate(rows) if row["step"] >= 200) + 1
    assert [i for i, age in enumerate(ages) if age == 0] == [0, first_after]
    assert set(ages) == {0.0, 1.0}
    stale = result.card["results"]["training"]["staleness_chunks"]
    assert set(stale) == {"0", "1"}
    # Ratios are to the policy that acted: where it is older, they differ from 1.
    deviations = {age: [] for age in (0.0, 1.0)}
    for row in rows:
        if "train/ratio_deviation" in row:
            deviations[row["rollout/staleness"]].append(row["train/ratio_deviation"])
    assert min(deviations[1.0]) > 1e-3


@pytest.mark.parametrize("kind", [{"policy": "tokens", "temperature": 2.0}, {"policy": "flow"}])
@pytest.mark.parametrize("ahead", [0, 1])
def test_who_acts_learns_and_is_held_to_has_the_same_noise(tmp_path, ahead, kind):
    whole = {"epochs": 1, "num_minibatches": 1, "learning_rate": 1e-7, "kl_coef": 0.1}
    whole |= {"noise_end": 0.1, "total_steps": 300, "ahead": ahead}
    result = run(PPOConfig, tmp_path / "run", tiny_vla(flow_layers=1), **whole, **kind)
    rows = [row for row in rows_of(result.run_dir) if "train/entropy" in row]
    first, last = rows[0]["train/entropy"], rows[-1]["train/entropy"]
    assert last < first - 0.1 * abs(first)
    for row in rows:
        assert row["train/ratio_deviation"] < 1e-4 and row["train/reference_kl"] < 1e-4


def test_phases_from_a_fresh_head(tmp_path):
    """Warm-up reaches the teacher's success; the transition keeps it."""
    result = run(
        PPOConfig,
        tmp_path / "run",
        Guide(tiny_vla().model),
        toy={"goal": 0.5},
        trainable="full",
        fresh_heads=True,
        learning_rate=1e-4,
        cloning_learning_rate=5e-3,
        cloning_epochs=12,
        warmup_steps=150,
        transition_steps=150,
        total_steps=350,
        eval_every=150,
        eval_layouts=4,
        num_envs=8,
    )
    rows = rows_of(result.run_dir)
    evaluations = [row for row in rows if "eval/success" in row]
    assert all(row["eval/teacher_success"] == 1.0 for row in evaluations)
    assert all(row["eval/gap"] == row["eval/success"] - 1.0 for row in evaluations)
    after = [row["eval/success"] for row in evaluations if row["step"] >= 150]
    assert evaluations[0]["eval/success"] < 0.5 and min(after) >= 0.8 and after[0] >= 0.9
    learning = [row for row in rows if "phase/epsilon" in row]
    epsilons = [row["phase/epsilon"] for row in learning]
    assert epsilons[0] == 1.0 and epsilons[-1] == 0.0 and any(0 < e < 1 for e in epsilons)
    assert epsilons == sorted(epsilons, reverse=True)
    for row in learning:
        assert ("train/policy_loss" in row) == (row["phase/epsilon"] < 1.0)
        assert ("train/cloning_loss" in row) == (row["phase/cloning"] > 0.0)
        assert row["phase/epsilon"] < 1.0 or row["rollout/teacher_share"] == 1.0
    assert any(0 < row["rollout/teacher_share"] < 1 for row in learning)
    assert max(row.get("train/cloning_accuracy", 0) for row in learning) > 0.8


def test_learning_may_use_the_threads_of_environments_that_stand_still(tmp_path, monkeypatch):
    """Nothing is collected beside the update before a checkpoint and the last one."""
    seen, update = [], Learner.update

    def spy(*args):
        seen.append(torch.get_num_threads())
        return update(*args)

    monkeypatch.setattr(Learner, "update", spy)
    threads = torch.get_num_threads()
    run(GRPOConfig, tmp_path, group_size=2, total_steps=170, learn_threads=2, ahead=1)
    assert set(seen) == {1, 2} and len(seen) > 2
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


def test_a_stopped_run_ends_with_a_checkpoint(tmp_path, monkeypatch):
    """One that collects ahead; one that does not is a case of the same (test_run.py)."""
    show = Run.show
    rollouts = iter(range(99))

    def interrupt(self, *args):
        show(self, *args)
        if next(rollouts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "show", interrupt)
    changes = {"total_steps": 400, "checkpoint_every": 10_000, "ahead": 1}
    with pytest.raises(KeyboardInterrupt, match=f"vla-gym-train ppo --resume {tmp_path}"):
        run(PPOConfig, tmp_path, **changes)
    (checkpoint,) = (tmp_path / "checkpoints").glob("[0-9]*")
    steps = int(checkpoint.name)
    assert 0 < steps < 400 and not (tmp_path / "card.json").exists()
    monkeypatch.undo()
    card = run(PPOConfig, tmp_path, resume=tmp_path, **changes).card
    assert card["results"]["training"]["env_steps"] >= 400
    rows = [row["step"] for row in rows_of(tmp_path) if "rollout/env_steps" in row]
    assert rows == sorted(rows) and steps in rows and rows[-1] >= 400


def test_a_request_to_one_of_two_processes_stops_both(tmp_path):
    class Stopped(Loop):
        def train(self):
            self.run.stop.is_made = self.group.rank == 1
            super().train()

    def job():
        config = GRPOConfig(**{**SMALL, "group_size": 2, "num_envs": 2, "run_dir": tmp_path / "x"})
        try:
            train(config, vla=tiny_vla(), envs=toy_factories(config), kind=Stopped)
        except KeyboardInterrupt:
            return "stopped"
        return "went on"

    assert two_processes(tmp_path, job, joins=True) == ["stopped", "stopped"]


def test_two_processes_run_as_one_with_all_environments(tmp_path):
    changes = {"group_size": 2, "total_steps": 120, "eval_every": 100, "checkpoint_every": 50}

    def job():
        return len(run(GRPOConfig, tmp_path / "two", **changes, num_envs=2).card)

    sizes = two_processes(tmp_path, job, joins=True)
    assert sizes[0] > 0 == sizes[1]
    run(GRPOConfig, tmp_path / "one", **changes)
    two, one = (load_file(tmp_path / x / "last.safetensors") for x in ("two", "one"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-2)
    for a, b in zip(rows_of(tmp_path / "two"), rows_of(tmp_path / "one"), strict=True):
        for key in ("step", "rollout/episodes", "rollout/success", "train/updates"):
            assert a.get(key) == b.get(key)


def test_success_grows(tmp_path):
    """One task: a random start succeeds now and then. PPO's does in test_on_policy_memory_runs."""
    result = run(
        GRPOConfig,
        tmp_path / "run",
        toy={"tasks": (0,), "goal": 0.3},
        num_envs=16,
        episodes_per_env=2,
        epochs=3,
        learning_rate=1e-2,
        micro_batch_size=128,
        total_steps=3000,
        group_size=8,
    )
    rates = [rate for _, rate in result.card["results"]["training"]["success"]]
    assert sum(rates[:2]) / 2 < 0.5 and sum(rates[-3:]) / 3 > 0.8


RL_TOKEN = {"policy": "rl-token"}


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (GRPOConfig, {"group_size": 1}, "at least 2, got 1"),
        (GRPOConfig, {"episodes_per_env": None}, "whole episodes"),
        (GRPOConfig, {"num_envs": 12}, "multiple"),
        (PPOConfig, {**RL_TOKEN, "warmup_steps": 5}, "begins at the VLA"),
        (
            PPOConfig,
            {**RL_TOKEN, "net_arch": (16, 0)},
            "net_arch: .* >= 1, got 0",
        ),
        (PPOConfig, {"ahead": 2, "workers": 0}, "cannot draw at once: give workers"),
        (PPOConfig, {"policy": "gaussian", "fresh_heads": True}, "only tokens have"),
        (PPOConfig, {"policy": "flow", "entropy_coef": 0.1}, "constant"),
        (
            PPOConfig,
            {**RL_TOKEN, "noise_correlation": 0.5},
            "noise_correlation is .* got policy rl-",
        ),
        (
            PPOConfig,
            {"policy": "gaussian", "sigma": float("nan")},
            "sigma holds a number that is not finite",
        ),
        (PPOConfig, {**RL_TOKEN, "min_sigma": 0.5}, "sigma .0.05., got 0.5: give"),
        (PPOConfig, {"sigma_learning_rate": 0.1}, "got policy tokens with learn_sigma True"),
        (PPOConfig, {"policy": "gaussian", "noise_end": 0.1}, "at most sigma . noise_end .0.005"),
        (PPOConfig, {**RL_TOKEN, "noise_end": 0.5}, "noise_end is for .* got policy rl-token"),
        (
            PPOConfig,
            {"policy": "gaussian", "learn_sigma": False, "noise_end": 0.5},
            "noise_end is for .* learn_sigma False",
        ),
        (PPOConfig, {"heads": ("token_head",)}, "what trainable=heads trains .* trainable=lora"),
    ],
)
def test_settings_are_checked(kind, wrong, words):
    with pytest.raises(ConfigError, match=words):
        kind(**wrong)


def test_seeds_of_rollouts_are_apart_and_stay_as_they_are():
    """Those of evaluations are larger; results on record were seeded so."""
    seeds = {rollout_seed(s, i) for s in (0, 10_000) for i in range(100)}
    assert len(seeds) == 200 and max(seeds) < 1_000_000_000
    assert [rollout_seed(0, i) for i in range(3)] == [288423920, 502430208, 201456128]
