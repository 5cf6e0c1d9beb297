"""Gradient steps of TD3+BC: one batch in, networks changed, metrics out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.buffers import ChunkReplayBuffer, ChunkReplaySamples
from vla_gym_trainers.td3.networks import reference_chunk
from vla_gym_trainers.td3.policy import RLTokenPolicy


@dataclass(frozen=True)
class UpdateSettings:
    """Numbers that the gradient steps depend on; see :class:`vla_gym_trainers.td3.algorithm.TD3BC`.

    Attributes:
        tau: Polyak coefficient per critic step.
        target_policy_noise: Sigma of target smoothing, in units of the action scale.
        target_noise_clip: Its bound, in the same units.
        bc_weight: ``beta``.
        mc_weight: Share of the Monte-Carlo return in the targets.
        value_range: Reachable returns, or None.
        reference_dropout: Probability that the actor's network does not see the reference.
        pessimism: ``kappa`` of :func:`vla_gym_trainers.td3.losses.pessimistic_value`.
        bf16: Run hidden layers in bfloat16.
    """

    tau: float
    target_policy_noise: float
    target_noise_clip: float
    bc_weight: float
    mc_weight: float
    value_range: tuple[float, float] | None
    reference_dropout: float
    pessimism: float
    bf16: bool


def critic_step(
    policy: RLTokenPolicy,
    batch: ChunkReplaySamples,
    settings: UpdateSettings,
    rng: torch.Generator,
) -> dict[str, float]:
    """Regress the critics to their targets once, and move the target critics.

    Args:
        policy: Networks and optimisers, changed in place.
        batch: B transitions.
        settings: See :class:`UpdateSettings`.
        rng: Generator of the smoothing noise.

    Returns:
        ``critic_loss``, ``q_mean`` (over batch and critics), ``target_mean``.
    """
    bf16 = settings.bf16
    x, next_x = policy.normalizer(batch.observations), policy.normalizer(batch.next_observations)
    head = policy.heads(batch.observations)  # an episode stays with its task
    with torch.no_grad():
        next_reference = reference_chunk(batch.next_observations)
        mean = policy.actor_target(next_x, next_reference, bf16=bf16, head=head)
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        next_action = losses.smoothed_target_action(
            mean,
            noise * settings.target_policy_noise * policy.chunk_scale,
            settings.target_noise_clip * policy.chunk_scale,
        )
        target = losses.td3_target(
            batch.rewards[:, 0],
            batch.dones[:, 0],
            batch.discounts[:, 0],
            policy.critic_target(next_x, next_action, bf16=bf16, head=head),
            batch.mc_returns[:, 0],
            settings.mc_weight,
            settings.value_range,
        )
    q = policy.critic(x, batch.actions, bf16=bf16, head=head)
    loss = losses.critic_loss(q, target)
    policy.critic_optimizer.zero_grad(set_to_none=True)
    loss.backward()
    policy.critic_optimizer.step()
    polyak(policy.critic, policy.critic_target, settings.tau)
    return {
        "critic_loss": loss.item(),
        "q_mean": q.detach().mean().item(),
        "target_mean": target.mean().item(),
    }


def actor_step(
    policy: RLTokenPolicy,
    observations: dict[str, Tensor],
    settings: UpdateSettings,
    rng: torch.Generator,
) -> dict[str, float]:
    """Move the actor up the mean of the critics, held to the reference.

    Args:
        policy: Networks and optimisers; only the actor changes.
        observations: Observations of B transitions.
        settings: See :class:`UpdateSettings`.
        rng: Generator of the reference dropout.

    Returns:
        ``actor_loss``, ``actor_q`` and ``reference_rms``: root mean square of the scaled distance
        to the reference per number of the chunk.
    """
    x, reference = policy.normalizer(observations), reference_chunk(observations)
    head = policy.heads(observations)
    draw = torch.rand((len(x), 1), generator=rng, device=x.device)
    keep = (draw >= settings.reference_dropout).float()
    action = policy.actor(x, reference, keep, settings.bf16, head)
    policy.critic.requires_grad_(False)  # the actor's loss must not fill critic gradients
    values = policy.critic(x, action, settings.bf16, head)
    if settings.pessimism > 0:
        with torch.no_grad():
            at_reference = policy.critic(x, reference, settings.bf16, head)
        q = losses.pessimistic_value(values, at_reference, settings.pessimism)
    else:
        q = values.mean(dim=1)
    loss = losses.actor_loss(
        q, action, reference, policy.chunk_scale, settings.bc_weight, groups=_tasks(observations)
    )
    policy.actor_optimizer.zero_grad(set_to_none=True)
    loss.loss.backward()
    policy.actor_optimizer.step()
    policy.critic.requires_grad_(True)
    return {
        "actor_loss": loss.loss.item(),
        "actor_q": values.detach().mean().item(),
        "reference_rms": (loss.bc_term / action.shape[1]).sqrt().item(),
    }


def td3_steps(
    policy: RLTokenPolicy,
    buffer: ChunkReplayBuffer,
    settings: UpdateSettings,
    rng: torch.Generator,
    *,
    steps: int,
    batch_size: int,
    policy_delay: int,
    first_update: int,
) -> dict[str, list[float]]:
    """Do ``steps`` critic steps, and an actor step after every ``policy_delay`` of all of them.

    Args:
        policy: Networks and optimisers, changed in place.
        buffer: Where batches come from.
        settings: See :class:`UpdateSettings`.
        rng: Generator of smoothing noise and reference dropout.
        steps: Critic steps.
        batch_size: Transitions a step.
        policy_delay: Critic steps per actor step.
        first_update: Critic steps done before.

    Returns:
        For each metric of :func:`critic_step` and :func:`actor_step` its values.
    """
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    for update in range(first_update + 1, first_update + steps + 1):
        batch = buffer.sample(batch_size)
        values = critic_step(policy, batch, settings, rng)
        if update % policy_delay == 0:
            values |= actor_step(policy, batch.observations, settings, rng)
            polyak(policy.actor, policy.actor_target, settings.tau * policy_delay)
        for name, value in values.items():
            metrics[name].append(value)
    return metrics


def fit_normalizer(policy: RLTokenPolicy, buffer: ChunkReplayBuffer) -> None:
    """Fit the input normaliser to all observations of a replay buffer."""
    size, data = buffer.size(), buffer.observations
    device = policy.device
    policy.normalizer.fit(
        torch.from_numpy(data["rl_token"][:size]).to(device),
        torch.from_numpy(data["proprio"][:size]).to(device),
    )


def check_ranges(
    utd_ratio: float,
    bc_weight: float,
    pessimism: float,
    mc_weight: float,
    reference_dropout: float,
    gamma: float,
) -> None:
    """Check numbers of :class:`vla_gym_trainers.td3.algorithm.TD3BC`.

    Raises:
        ConfigError: If one is out of range.
    """
    for name, value, low, high in (
        ("utd_ratio", utd_ratio, 0.0, float("inf")),
        ("bc_weight", bc_weight, 0.0, float("inf")),
        ("pessimism", pessimism, 0.0, float("inf")),
        ("mc_weight", mc_weight, 0.0, 1.0),
        ("reference_dropout", reference_dropout, 0.0, 1.0),
        ("gamma", gamma, 0.0, 1.0),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} must be in [{low}, {high}], got {value}.")


def _tasks(observations: dict[str, Tensor]) -> Tensor | None:
    tasks = observations.get("task_id")
    return None if tasks is None else tasks.reshape(-1)


@torch.no_grad()
def polyak(source: torch.nn.Module, target: torch.nn.Module, tau: float) -> None:
    """``target <- (1 - tau) * target + tau * source``, parameter by parameter."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)
