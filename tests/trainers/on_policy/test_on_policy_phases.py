"""Phases: the teacher hands over to the student; dual validation."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from on_policy_toys import keys_of, tiny_policy, tiny_vla, toy_envs

from vla_gym.rollout.episodes import sampled_starts
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.phases import MixedActor, VLATeacher, phase_at
from vla_gym_trainers.on_policy.validation import Validation


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    seen = {c: rng.integers(0, 255, (40, 64, 64, 3), np.uint8) for c in ("agentview", "wrist")}
    seen["proprio"] = rng.normal(size=(40, 8)).astype(np.float32)
    return seen, ["go to the right", "go to the left"] * 20


def raw(inputs):
    """The same as a VLA takes it."""
    seen, texts = inputs
    return {c: seen[c] for c in ("agentview", "wrist")}, texts, seen["proprio"]


def test_the_schedule():
    phases = {"warmup_steps": 100, "transition_steps": 200, "cloning_coef": 0.5}
    config = PPOConfig(**phases, cloning_epochs=7, value_warmup_steps=400)
    first = phase_at(config, 99)
    assert (first.name, first.epsilon, first.rl) == ("warmup", 1.0, False)
    assert (first.cloning, first.epochs) == (0.5, 7)
    middle = phase_at(config, 200)
    assert (middle.name, middle.epsilon, middle.rl) == ("transition", 0.5, True)
    assert middle.cloning == 0.25 and middle.epochs is None
    assert phase_at(config, 100).epsilon == 1.0
    value = phase_at(config, 300)
    assert (value.name, value.epsilon, value.rl, value.value) == ("value", 0.0, False, True)
    last = phase_at(config, 400)
    assert (last.name, last.epsilon, last.cloning, last.rl) == ("rl", 0.0, 0.0, True)
    assert phase_at(GRPOConfig(), 0).name == "rl" and last.rate_share == 1.0
    falling = PPOConfig(**phases, learning_rate_end=0.2, total_steps=1000)
    shares = [phase_at(falling, steps).rate_share for steps in (0, 50, 500, 1000, 1200)]
    assert shares == pytest.approx([1.0, 0.96, 0.6, 0.2, 0.2])
    assert phase_at(falling, 500).noise_share is None
    quieter = GRPOConfig(policy="gaussian", noise_end=0.25, total_steps=1000)
    shares = [phase_at(quieter, steps).noise_share for steps in (0, 500, 1000, 1200)]
    assert shares == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_teachers_of_both_heads(inputs):
    vla = tiny_vla()
    regressed, tokens = VLATeacher(vla), VLATeacher(vla, "token")
    torch.testing.assert_close(regressed(*inputs).actions, vla.infer(*raw(inputs)).actions)
    greedy = vla.act_tokens(*raw(inputs), 0.0)[0]
    assert torch.equal(tokens(*inputs).sample, greedy)
    assert torch.equal(tokens(*inputs).actions, vla.tokens_to_actions(greedy))
    assert vla.head == "l1"
    # A bin is 2 / 255 wide: the nearest token is off by half of that at most.
    taught = regressed(*inputs)
    back = vla.tokens_to_actions(taught.sample)
    assert (back - taught.actions).abs().max() <= 1 / 255 + 1e-6


def test_epsilon_decides_who_plays(inputs):
    policy, teacher = tiny_policy(value=True), VLATeacher(tiny_vla())
    keys = keys_of(40)
    own, taught = policy.act(*inputs, keys), teacher(*inputs)
    shares = {}
    for epsilon in (0.0, 0.5, 1.0):
        act = MixedActor(policy, teacher, epsilon).act(*inputs, keys)
        shares[epsilon] = act.by_teacher.float().mean().item()
        for i, by_teacher in enumerate(act.by_teacher.tolist()):
            source = taught if by_teacher else own
            assert torch.equal(act.actions[i], source.actions[i])
            assert torch.equal(act.sample[i], source.sample[i])
            assert torch.equal(act.log_probs[i], own.log_probs[i] * (not by_teacher))
        assert torch.equal(act.teacher_sample, taught.sample)
    # 40 draws at 1/2: four standard deviations are 0.32.
    assert shares[0.0] == 0.0 and shares[1.0] == 1.0 and abs(shares[0.5] - 0.5) < 0.32
    half = MixedActor(policy, teacher, 0.5)
    few = {k: v[7:9] for k, v in inputs[0].items()}, inputs[1][7:9]
    assert torch.equal(
        half.act(*few, keys[7:9]).by_teacher, half.act(*inputs, keys).by_teacher[7:9]
    )


def test_noise_is_on_the_teachers_executed_actions_alone(inputs):
    policy, teacher = tiny_policy(), VLATeacher(tiny_vla())
    keys = keys_of(40)
    act = MixedActor(policy, teacher, 1.0, noise=0.1).act(*inputs, keys)
    taught = teacher(*inputs)
    difference = act.actions - taught.actions
    assert not difference[..., 6].any()
    inside = taught.actions[..., :6].abs() < 0.5
    assert difference[..., :6][inside].std().item() == pytest.approx(0.1, rel=0.1)
    assert torch.equal(act.teacher_sample, taught.sample)


def moving(direction):
    """To the right (1) it wins task 0 wherever it is, never task 1; to the left (-1) task 1."""

    def act(observation, texts):
        assert observation["wrist"].shape == (len(texts), 64, 64, 3)
        assert len(observation["proprio"]) == len(texts)
        actions = torch.zeros(len(texts), 8, 7)
        actions[..., 0] = direction
        return SimpleNamespace(actions=actions)

    return act


def test_student_and_teacher_play_the_same_starts():
    starts, policy, taught = sampled_starts("toy", (0, 1), 4, 50), tiny_policy(), moving(1.0)
    policy.act = moving(-1.0)
    with closing(toy_envs(2, autoreset_mode="DISABLED")) as envs:
        validation = Validation(envs, policy, taught, starts=starts, every=100)
        assert validation.is_due(0)
        metrics, is_best = validation.evaluate(0)
        assert is_best and not validation.is_due(99) and validation.is_due(100)
        _, is_best = validation.evaluate(350)
        assert not is_best and not validation.is_due(399) and validation.is_due(400)
    assert metrics["eval/success"] == metrics["eval/teacher_success"] == 0.5
    assert metrics["eval/success_task_0"] == 0.0 and metrics["eval/success_task_1"] == 1.0
    assert metrics["eval/gap"] == 0.0 and metrics["eval/best"] == 0.5
    assert metrics["eval/episodes"] == 8  # both tasks, four each
    assert metrics["eval/student_only"] + metrics["eval/teacher_only"] == 8
    assert metrics["eval/student_only"] > 0 and metrics["eval/teacher_only"] > 0
    other = Validation(None, policy, taught, starts=starts, every=100)
    other.restore(validation.state())
    assert other.state() == validation.state() and other.history == [(0, 0.5), (350, 0.5)]
