"""Gradient steps of TD3+BC: one batch in, networks changed, metrics out."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vla_gym_trainers.networks import reference_chunk
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.td3.cuda_graph import GraphedStep, Step
from vla_gym_trainers.td3.policy import RLTokenPolicy
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.ring import ChunkReplaySamples


class GradientSteps:
    """:func:`critic_step` and :func:`actor_step` of one policy, on a GPU as CUDA graphs.

    What they do is hundreds of kernels of microseconds, which takes longer to launch than to
    compute. A graph keeps the settings and the learning rate that it was recorded with.
    """

    def __init__(
        self, policy: RLTokenPolicy, config: TD3Config, rng: torch.Generator, use_graphs: bool
    ) -> None:
        """Keep what all steps have in common; ``use_graphs`` needs a policy on a GPU."""
        self._policy, self._config, self._rng = policy, config, rng
        #: Does :func:`critic_step` with a batch.
        self.critic: Step = partial(critic_step, policy, config=config, rng=rng)
        self._actor: Step = partial(actor_step, policy, config=config, rng=rng)
        if use_graphs:
            for optimizer in (policy.critic_optimizer, policy.actor_optimizer):
                for group in optimizer.param_groups:
                    group["capturable"] = True
            self.critic = GraphedStep(self.critic, rng)
            self._actor = GraphedStep(self._actor, rng)

    def actor(self, batch: ChunkReplaySamples, bc_weight: float) -> dict[str, Tensor]:
        """Do :func:`actor_step`."""
        device = batch.actions.device
        return self._actor(batch, torch.full((), bc_weight, device=device, dtype=torch.float32))

    def warm_up(self, buffer: ChunkReplayBuffer, batch_size: int) -> None:
        """Fit the normaliser to the warm-up data, clone a plain actor, train the critics alone.

        The cloning comes first: the critics' targets are about the actor.
        """
        policy, config = self._policy, self._config
        size, data = buffer.size(), buffer.observations
        seen = {key: torch.from_numpy(data[key][:size]) for key in policy.normalizer.inputs}
        policy.normalizer.fit({key: value.to(policy.device) for key, value in seen.items()})
        if config.actor == "plain":
            for _ in range(config.critic_warmup_steps):
                clone_step(policy, buffer.sample(batch_size), config, self._rng)
            for follower in filter(None, (policy.actor_target, policy.actor_average)):
                follower.load_state_dict(policy.actor.state_dict())
        for _ in range(config.critic_warmup_steps):
            self.critic(buffer.sample(batch_size))


def critic_step(
    policy: RLTokenPolicy, batch: ChunkReplaySamples, config: TD3Config, rng: torch.Generator
) -> dict[str, Tensor]:
    """Regress the critics to their targets once, and move the target critics.

    The generator draws the smoothing noise.

    Returns:
        ``critic_loss``, ``q_mean`` (over batch and critics), ``target_mean``: scalars.
    """
    x, next_x = (
        policy.normalizer(batch.observations),
        policy.normalizer(batch.next_observations),
    )
    with torch.no_grad():
        mean = policy.actor_target(next_x, reference_chunk(batch.next_observations))
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        next_action = losses.smoothed_target_action(
            mean,
            noise * config.target_policy_noise * policy.chunk_scale,
            config.target_noise_clip * policy.chunk_scale,
        )
        target = losses.td3_target(
            batch.rewards[:, 0],
            batch.dones[:, 0],
            batch.discounts[:, 0],
            policy.critic_target(next_x, next_action),
            batch.mc_returns[:, 0],
            config.mc_weight,
            config.value_range,
        )
    q = policy.critic(x, batch.actions)
    loss = losses.critic_loss(q, target)
    policy.critic_optimizer.zero_grad(set_to_none=True)
    loss.backward()
    policy.critic_optimizer.step()
    polyak(policy.critic, policy.critic_target, config.tau)
    return {
        "critic_loss": loss.detach(),
        "q_mean": q.detach().mean(),
        "target_mean": target.mean(),
    }


def actor_step(
    policy: RLTokenPolicy,
    batch: ChunkReplaySamples,
    bc_weight: Tensor,
    config: TD3Config,
    rng: torch.Generator,
) -> dict[str, Tensor]:
    """Move the actor up the mean of the critics, held as :func:`held_to` says; and what follows it.

    Only the actor, its target and its average change. ``bc_weight`` is beta as it is now, that of
    ``config`` where it begins; the generator draws the reference dropout.

    Returns:
        Scalars ``actor_loss``, ``actor_q`` and ``reference_rms``: root mean square of the scaled
        distance to the reference per number of the chunk.
    """
    observations = batch.observations
    x, reference, action = act(policy, observations, config, rng)
    policy.critic.requires_grad_(False)  # the actor's loss must not fill critic gradients
    q, values = actor_values(policy, x, action, reference, config)
    near, share = held_to(batch, reference, config.bc_beside_demos)
    beta = bc_weight * share
    divisor = losses.q_divisor(q, tasks_of(observations))
    loss, distance = losses.actor_loss(q, action, near, policy.chunk_scale, beta, divisor)
    policy.actor_optimizer.zero_grad(set_to_none=True)
    loss.backward()
    policy.actor_optimizer.step()
    policy.critic.requires_grad_(True)
    polyak(policy.actor, policy.actor_target, config.tau * config.policy_delay)
    if policy.actor_average is not None:
        polyak(policy.actor, policy.actor_average, 1.0 - config.actor_ema)
    return {
        "actor_loss": loss.detach(),
        "actor_q": values.detach().mean(),
        "reference_rms": (distance / action.shape[1]).sqrt(),
    }


def clone_step(
    policy: RLTokenPolicy, batch: ChunkReplaySamples, config: TD3Config, rng: torch.Generator
) -> None:
    """Move the actor, not its target, towards the reference alone: its loss without Q.

    ``mean_b ||mu(x_b, m a~_b, m) - a~_b||^2`` in scaled units, but for what :func:`held_to` says of
    demonstrations.
    """
    _, reference, action = act(policy, batch.observations, config, rng)
    near, share = held_to(batch, reference, config.bc_beside_demos)
    loss = (share * losses.reference_distance(action, near, policy.chunk_scale)).mean()
    policy.actor_optimizer.zero_grad(set_to_none=True)
    loss.backward()
    policy.actor_optimizer.step()


def act(
    policy: RLTokenPolicy, observations: dict[str, Tensor], config: TD3Config, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the reference and the actor's chunk under reference dropout."""
    x, reference = policy.normalizer(observations), reference_chunk(observations)
    return x, reference, policy.actor(x, reference, kept_references(len(x), config, rng))


def kept_references(count: int, config: TD3Config, rng: torch.Generator) -> Tensor:
    """Draw where the actor's network sees the reference: (count, 1), 0.0 or 1.0."""
    draw = torch.rand((count, 1), generator=rng, device=rng.device)
    return (draw >= config.reference_dropout).float()


def tasks_of(observations: dict[str, Tensor]) -> Tensor | None:
    """Return the task of each observation, (B,) int64; None if it is not observed."""
    tasks = observations.get("task_id")
    return None if tasks is None else tasks.reshape(-1)


def held_to(
    batch: ChunkReplaySamples, reference: Tensor, beside_demos: float
) -> tuple[Tensor, Tensor]:
    """Return what the cloning term draws the actor to, and how firmly.

    In transitions of demonstrations to what was demonstrated, elsewhere to the VLA's chunk; less
    firmly in tasks of which the batch has demonstrations, since these are given where the VLA
    fails.

    Args:
        batch: B transitions.
        reference: (B, A) the VLA's chunks.
        beside_demos: Share of beta for the VLA's chunks in tasks with demonstrations.

    Returns:
        (B, A) chunks, and (B,) shares of beta.
    """
    demos = ~batch.demonstrated[:, 0].isnan()
    tasks = tasks_of(batch.observations)
    same = torch.ones_like(demos)[:, None] if tasks is None else tasks[:, None] == tasks
    shown = (same & demos).any(dim=1)
    share = torch.where(shown & ~demos, beside_demos, 1.0)
    return torch.where(demos[:, None], batch.demonstrated, reference), share


def actor_values(
    policy: RLTokenPolicy, x: Tensor, action: Tensor, reference: Tensor, config: TD3Config
) -> tuple[Tensor, Tensor]:
    """Return what the actor climbs, (B,), and the critics' values of its chunks, (B, n)."""
    values = policy.critic(x, action)
    if not config.pessimism:
        return values.mean(dim=1), values
    with torch.no_grad():
        at_reference = policy.critic(x, reference)
    return losses.pessimistic_value(values, at_reference, config.pessimism), values


@torch.no_grad()
def polyak(source: torch.nn.Module, target: torch.nn.Module, tau: float) -> None:
    """``target <- (1 - tau) * target + tau * source``, parameter by parameter; tau at most 1."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), min(tau, 1.0))
