"""What the networks of TD3+BC see: with and without the RL token and the VLA's chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from td3_toys import td3_bc
from toy_env import ToyReach

from vla_gym_trainers import TD3BC
from vla_gym_trainers.td3.acting import ActingPolicy
from vla_gym_trainers.td3.policy import RLTokenPolicy
from vla_gym_trainers.td3.updates import actor_step

Obs = dict[str, Any]


def make(**changes: Any) -> TD3BC:
    """Return a policy after some training, so that its correction is not zero."""
    return td3_bc(**changes).learn(64)


def correction(model: TD3BC, obs: Obs) -> np.ndarray:
    """Return the last control step's correction, where clipping has no part."""
    return model.predict(obs)[0] - obs["vla_action"]


def observations(key: str, seed: int = 0) -> tuple[Obs, Obs]:
    """Return an observation, and the same with another value of one key."""
    obs = ToyReach().reset(seed=seed)[0]
    obs["vla_action"] = 0.2 * np.ones_like(obs["vla_action"])
    other = obs[key] + np.random.default_rng(seed).uniform(-0.1, 0.1, obs[key].shape)
    return obs, {**obs, key: other.astype(np.float32)}


@pytest.mark.parametrize(
    ("option", "key"), [("use_rl_token", "rl_token"), ("use_reference", "vla_action")]
)
def test_what_is_left_out_has_no_influence(option: str, key: str) -> None:
    obs, other = observations(key)
    model = make()
    assert np.abs(correction(model, obs)).max() > 0.0
    assert np.abs(correction(model, other) - correction(model, obs)).max() > 1e-5

    blind = make(**{option: False})
    assert np.abs(correction(blind, obs)).max() > 0.0
    np.testing.assert_allclose(correction(blind, other), correction(blind, obs), atol=1e-6)
    if key == "rl_token":
        values = [
            blind.policy.critic(
                blind.policy.normalizer(blind.policy.obs_to_tensor(o)[0]),
                blind.policy.obs_to_tensor(obs)[0]["vla_action"].flatten(1),
            )
            for o in (obs, other)
        ]
        assert (values[0] == values[1]).all()


def test_pessimism_changes_what_the_actor_learns() -> None:
    plain, wary = (make(pessimism=p).policy.actor.head.weight.detach() for p in (0.0, 5.0))
    assert (wary - plain).abs().max() > 1e-4  # one seed gives the same (test_td3_learning.py)


@pytest.mark.parametrize("actor", ["residual", "plain"])
def test_what_is_kept_is_a_running_average(actor, tmp_path, monkeypatch):
    """It begins with the actor before its first step, and is played in evaluations alone."""
    newest: list[dict[str, torch.Tensor]] = []

    def record(policy: RLTokenPolicy, *arguments: Any, **options: Any) -> dict[str, Any]:
        before = policy.actor.state_dict()
        if not newest:
            newest.append({key: value.clone() for key, value in before.items()})
        metrics = actor_step(policy, *arguments, **options)
        newest.append({key: value.clone() for key, value in policy.actor.state_dict().items()})
        return metrics

    monkeypatch.setattr("vla_gym_trainers.td3.updates.actor_step", record)
    model = make(actor=actor, actor_ema=0.98, noise_correlation=0.4)
    assert model.exploration is not None and model.exploration.correlation == 0.4
    expected = newest[0]
    for weights in newest[1:]:
        expected = {key: 0.98 * mine + 0.02 * weights[key] for key, mine in expected.items()}
    assert len(newest) > 20 and model.policy.actor_average is not None
    torch.testing.assert_close(dict(model.policy.actor_average.state_dict()), expected)

    model.policy.save(tmp_path / "policy.safetensors")
    kept = RLTokenPolicy.load(tmp_path / "policy.safetensors")
    obs, _ = observations("proprio")
    chunk = model.predict(obs)[0]
    np.testing.assert_array_equal(kept.predict(obs)[0], chunk)
    acting = ActingPolicy(model.policy, "cpu")
    newest_chunk = acting.act({key: np.asarray(obs[key])[None] for key in obs})[0]
    assert np.abs(newest_chunk - chunk).max() > 1e-4
    kept.actor.load_state_dict(expected)
    kept.actor_average = None
    np.testing.assert_allclose(kept.predict(obs)[0], chunk, atol=1e-5)


def test_a_chunk_of_the_vla_that_is_not_finite_does_not_reach_the_simulation() -> None:
    seen = []

    class Blinded(ToyReach):
        def step(self, action: np.ndarray) -> Any:
            seen.append(action)
            obs, *rest = super().step(action)
            return {**obs, "vla_action": np.full_like(obs["vla_action"], np.nan)}, *rest

    td3_bc(env=Blinded(), learning_starts=100).learn(8)  # all of it warm-up
    assert len(seen) >= 8 and np.isfinite(seen).all()
