"""PPO on the RL-token actor: the Gaussian over corrections of the frozen VLA's chunk."""

from functools import partial

import numpy as np
import pytest
import torch
from on_policy_toys import keys_of, moved, tiny_vla, toy_envs
from run_logs import assert_goes_on, rows_of
from safetensors.torch import load_file
from test_on_policy_train import run
from world_model_toys import OneView

from vla_gym.errors import WeightsError
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.rl_token_actor import RLTokenActor
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.validation import PolicyPlayer

SMALL = {
    "policy": "rl-token",
    "rl_token": "mean",
    "net_arch": (16,),
    "episodes_per_env": None,
    "rollout_chunks": 16,
    "ratio_level": "chunk",
    "micro_batch_size": 64,
    "value_clip": None,
}


def networks_of(vla=None, kind=PPOConfig, **changes):
    return make_networks(kind(**{**SMALL, "chunk_len": 4, **changes}), vla or tiny_vla())


def observed(policy, envs):
    obs, infos = envs.reset(seed=1)
    texts = infos["instruction"].tolist()
    return policy.observe(obs, texts), texts


@pytest.fixture
def envs():
    envs = toy_envs(4)
    yield envs
    envs.close()


def test_it_begins_at_the_vla_with_smooth_noise(envs):
    vla = tiny_vla()
    policy = networks_of(vla, residual_basis=1, sigma=0.1).policy
    observation, texts = observed(policy, envs)
    assert observation["rl_token"].shape == (4, vla.hidden_size)
    greedy = policy.act(observation, texts)
    np.testing.assert_array_equal(greedy.actions, observation["vla_action"])
    assert not greedy.values.any() and not greedy.sample.any()
    observation["vla_action"][:] = 0.0
    many = {key: np.repeat(value[:1], 400, axis=0) for key, value in observation.items()}
    act = policy.act(many, texts * 100, keys_of(400))
    chunks = act.actions.numpy()
    assert chunks.shape == (400, 4, 7)
    np.testing.assert_allclose(chunks, np.broadcast_to(chunks[:, :1], chunks.shape), atol=1e-6)
    # sigma 0.1 in units of the action scale: 0.1 for translations, 0.03 for rotations
    np.testing.assert_allclose(chunks[:, 0, :6].std(axis=0), [0.1] * 3 + [0.03] * 3, rtol=0.2)
    seen, _ = policy.distribution(many, texts * 100)
    assert torch.equal(seen.log_prob(act.sample), act.log_probs) and not seen.mode().any()
    assert policy.factor_mask(torch.tensor([1, 4])).all()  # a coefficient moves the whole chunk


def collected(policy, envs, seed=3):
    return RolloutCollector(envs).collect(policy, Rollout(policy, 4, 8, None), seed=seed)


def test_numbers_that_are_not_finite_are_not_learnt_from(envs):
    policy = networks_of().policy
    observe, calls = policy.observe, []

    def faulty(*args):
        rows = observe(*args)
        calls.append(None)
        if len(calls) == 3:  # what comes of the second chunk and is seen before the third
            rows["proprio"][1] = np.nan
        return rows

    policy.observe = faulty
    data = collected(policy, envs).data
    assert data["valid"][1].tolist() == [True, False, False, *[True] * 5]
    assert data["valid"][[0, 2, 3]].all() and data["proprio"].isfinite().all()


def test_the_value_learns_alone_and_the_first_ratios_are_one(envs):
    config = PPOConfig(**{**SMALL, "num_minibatches": 1, "sigma": 0.011})
    policy = networks_of().policy
    learner, rollout = Learner(policy, config), collected(policy, envs)
    policy.begin(rollout.data, ProcessGroup())
    rows = rollout.data["rl_token"][rollout.data["valid"]]
    mean = policy.actor.normalizer.mean[: rows.shape[1]]
    torch.testing.assert_close(mean, rows.mean(dim=0), atol=1e-5, rtol=1e-4)
    torch.manual_seed(0)
    advantages, returns = torch.randn(4, 8), torch.rand(4, 8)
    keep, before = rollout.data["valid"], policy.state_dict()
    metrics = learner.update(rollout, advantages, keep, returns, Phase("value", rl=False))
    assert "train/policy_loss" not in metrics and metrics["train/value_loss"] > 0
    names = moved(policy, before)
    assert names and all(name.startswith("value_head.") for name in names)
    metrics = learner.update(rollout, advantages, keep, returns)
    assert abs(metrics["train/kl"]) < 1e-6 and metrics["train/updates"] == 1
    assert policy.actor.actor.head.weight.abs().max() > 0
    for _ in range(40):
        learner.update(rollout, advantages, keep, returns)
    assert policy.actor.log_std.min() >= np.log(config.min_sigma) - 1e-6


def test_a_vla_of_one_view_is_shown_that_one(envs):
    policy = networks_of(OneView()).policy
    observed(policy, envs)  # its infer wants no other
    assert PolicyPlayer(policy.act, policy, 4).cameras == ("agentview",)


def test_copies_share_what_is_frozen(envs):
    policy = networks_of().policy
    policy.encoder, mean = torch.nn.Linear(2, 2), policy.encoder
    twin = policy.copy()
    assert twin.actor.actor.basis is policy.actor.actor.basis
    assert twin.vla is not policy.vla and twin.vla.model.queries is policy.vla.model.queries
    assert twin.encoder is not policy.encoder and twin.encoder.weight is policy.encoder.weight
    policy.encoder = twin.encoder = mean
    inputs = observed(policy, envs)
    policy.begin(collected(policy, envs).data, ProcessGroup())
    torch.nn.init.normal_(policy.actor.actor.head.weight)
    torch.nn.init.normal_(policy.value_head.head.fc2.weight)
    mine = policy.act(*inputs)
    assert not torch.equal(twin.act(*inputs).sample, mine.sample)
    twin.load_state_dict(policy.state_dict())
    assert torch.equal(twin.act(*inputs).sample, mine.sample)
    assert torch.equal(twin.act(*inputs).values, mine.values)


def test_a_run_resumes_bit_for_bit_and_its_policy_loads(tmp_path):
    changes = {**SMALL, "ahead": 1, "checkpoint_every": 240, "value_warmup_steps": 200}
    changes |= {"eval_every": 300, "sigma": 0.3}
    whole = assert_goes_on(partial(run, PPOConfig), tmp_path, total_steps=900, **changes)
    assert load_file(whole / "last.safetensors")["actor.actor.head.weight"].abs().max() > 0
    rows = rows_of(whole)
    assert rows[0]["eval/gap"] == 0.0  # it begins at the VLA
    assert "train/policy_loss" not in rows[1] and "train/policy_loss" in rows[-2]
    actor = load_policy(tmp_path / "whole")
    assert isinstance(actor, RLTokenActor)
    features = {key: box.sample() for key, box in actor.observation_space.items()}
    chunk, _ = actor.predict(features)
    assert chunk.shape == (8, 7)
    (tmp_path / "whole" / "rl_token_actor.safetensors").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="Cannot read weights"):
        load_policy(tmp_path / "whole")
