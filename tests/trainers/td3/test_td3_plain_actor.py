"""The paper's actor, which gives the whole chunk, beside the residual one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from td3_toys import td3_bc
from toy_env import CHUNK_LEN

from vla_gym_trainers import TD3BC
from vla_gym_trainers.networks import ChunkActor, reference_chunk


def make(**changes: Any) -> TD3BC:
    settings = {"learning_starts": 64, "batch_size": 32, "net_arch": (32,), "actor": "plain"}
    return td3_bc(seed=3, **{**settings, "critic_warmup_steps": 20, **changes})


def random_actor(plain: bool) -> ChunkActor:
    actor = ChunkActor(5, 4, (16,), torch.full((7,), 0.5), residual_basis=2, plain=plain)
    torch.nn.init.normal_(actor.head.weight)
    return actor


@pytest.mark.parametrize("plain", [True, False])
def test_a_hidden_reference_reaches_only_the_residual_actor(plain: bool) -> None:
    torch.manual_seed(0)
    actor, x = random_actor(plain), torch.randn(6, 5)
    one, other = (torch.rand(6, 28) - 0.5 for _ in range(2))
    hidden, seen = torch.zeros(6, 1), torch.ones(6, 1)
    assert actor(x, one, hidden).equal(actor(x, other, hidden)) is plain
    assert not actor(x, one, seen).equal(actor(x, other, seen))
    # m is an input too: a hidden reference is not a reference of zeros.
    assert not actor(x, torch.zeros_like(one), seen).equal(actor(x, one, hidden))


def test_a_plain_actor_gives_the_chunk_itself() -> None:
    actor, x, reference = random_actor(plain=True), torch.randn(6, 5), torch.rand(6, 28)
    f = actor.head(actor.body(torch.cat([x, reference, torch.ones(6, 1)], dim=1)))
    assert f.shape == (6, 28)  # every control step freely, whatever residual_basis is
    torch.testing.assert_close(actor(x, reference), torch.tanh(f), atol=0, rtol=0)


def reference_rms(model: TD3BC) -> tuple[float, float]:
    """Root mean square distance to the reference in the replay, seen and hidden, scaled units."""
    buffer, policy = model.replay_buffer, model.policy
    obs = {key: torch.from_numpy(buffer.observations[key][:60]) for key in buffer.observations}
    reference = reference_chunk(obs)
    with torch.no_grad():
        chunks = [
            policy.actor(policy.normalizer(obs), reference, torch.full((60, 1), keep))
            for keep in (1.0, 0.0)
        ]
    seen, hidden = ((c - reference) / policy.chunk_scale for c in chunks)
    return seen.square().mean().sqrt().item(), hidden.square().mean().sqrt().item()


def test_cloning_brings_the_actor_to_the_reference() -> None:
    before, after = (make(utd_ratio=0.0, critic_warmup_steps=steps) for steps in (1, 600))
    for model in (before, after):
        model.learn(72)
    assert after._critics_are_warm
    # Three seeds: from 0.61 (zero chunks) to 0.12-0.13 with the reference in sight, 0.17-0.18
    # without.
    for start, end in zip(reference_rms(before), reference_rms(after), strict=True):
        assert end < 0.4 * start
    actor, target = after.policy.actor.state_dict(), after.policy.actor_target.state_dict()
    assert all(actor[key].equal(target[key]) for key in actor)


def test_the_vla_acts_until_the_actor_is_cloned() -> None:
    """A block that is collected ahead of the cloning has no policy yet."""
    model = make(ahead=1, utd_ratio=0.0, noise_white=0.0, noise_chunk=0.0)
    model.learn(64 + 8 * 4)
    buffer = model.replay_buffer
    reference = buffer.observations["vla_action"].reshape(-1, CHUNK_LEN * 7)
    away = np.abs(buffer.actions - reference)[:96].max(axis=1)
    assert (away[:72] == 0.0).all()  # the ninth block acts before the first gradient step
    assert (away[80:] > 0.0).all()
