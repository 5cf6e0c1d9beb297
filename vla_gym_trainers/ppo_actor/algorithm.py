"""PPO on the RL-token actor: the on-policy alternative to TD3+BC on the same environments.

The policy draws the correction of the VLA's chunk, not the chunk: ``c ~ N(mu(x, a~), sigma^2)`` in
the actor's K time functions, ``a = clip(a~ + s * sum_k c_k phi_k)``. So it explores in motions that
last a whole chunk, and a log-probability has 7 K terms. At the start mu is 0: the VLA plus noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.advantages import gae, moments, standardize
from vla_gym_trainers.on_policy.losses import Ratio, ppo_loss, value_loss
from vla_gym_trainers.td3.networks import ACTION_DIM, CriticEnsemble, reference_chunk
from vla_gym_trainers.td3.policy import RLTokenPolicy


@dataclass(frozen=True)
class PPOSettings:
    """Numbers of the update; see Schulman et al. 2017.

    Attributes:
        learning_rate: Adam's, all networks.
        epochs: Passes over a rollout.
        batch_size: Chunks of a minibatch.
        gae_lambda: Lambda per chunk.
        clip: Range of the probability ratio.
        value_clip: Range in which a value may move per rollout; None for no clipping.
        bc_weight: ``beta`` on the squared correction ``||c||^2``, in units of the action scale.
        target_kl: An update ends when the estimated KL exceeds 1.5 times this; None: never.
        max_grad_norm: Gradients are scaled down to this norm.
        sigma: Standard deviation of the correction at the start, in units of the action scale.
        min_sigma: It never gets smaller.
    """

    learning_rate: float = 3e-4
    epochs: int = 5
    batch_size: int = 256
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float | None = None
    bc_weight: float = 0.0
    target_kl: float | None = 0.03
    max_grad_norm: float = 0.5
    sigma: float = 0.05
    min_sigma: float = 0.01

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ConfigError("epochs and batch_size must be at least 1.")
        if not 0.0 < self.min_sigma <= self.sigma:
            raise ConfigError(f"Expected 0 < min_sigma <= sigma, got {self.min_sigma}.")


class PPORollout(NamedTuple):
    """N environments x T chunks, in the order of time.

    Attributes:
        observations: Key -> [N, T, ...] what was acted on.
        next_observations: The same after the chunk, before any reset.
        corrections: [N, T, K, 7] what was drawn.
        log_probs: [N, T].
        rewards: [N, T].
        discounts: [N, T] gamma ** executed_steps.
        terminated: [N, T] bool: success.
        truncated: [N, T] bool: step limit.
        valid: [N, T] bool: False where a worker died or a number was not finite.
    """

    observations: dict[str, Tensor]
    next_observations: dict[str, Tensor]
    corrections: Tensor
    log_probs: Tensor
    rewards: Tensor
    discounts: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor


class PPOActor(nn.Module):
    """The actor of an :class:`RLTokenPolicy` as a Gaussian policy, with a value function.

    Attributes:
        policy: Its actor and normaliser are used; its critics are not.
        value: V(x), one output a task head.
        log_sigma: (7,) logarithm of sigma, per action dimension.
    """

    def __init__(self, policy: RLTokenPolicy, settings: PPOSettings, seed: int) -> None:
        """Begin at the VLA.

        Args:
            policy: Untrained or trained.
            settings: See :class:`PPOSettings`.
            seed: Of the draws and of the minibatches.
        """
        super().__init__()
        self.policy, self.settings = policy, settings
        state_dim = policy.normalizer.state_dim
        self.value = CriticEnsemble(state_dim, 0, policy.config.net_arch, 1)
        self.value.to(policy.device)
        start = torch.full((ACTION_DIM,), math.log(settings.sigma), device=policy.device)
        self.log_sigma = nn.Parameter(start)
        self.rng = torch.Generator(policy.device)
        self.rng.manual_seed(seed)
        self.optimizer = torch.optim.Adam(self.learned(), settings.learning_rate)

    def learned(self) -> list[nn.Parameter]:
        """Return what the optimiser changes."""
        return [*self.policy.actor.parameters(), *self.value.parameters(), self.log_sigma]

    @torch.no_grad()
    def draw(self, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Tensor, Tensor]:
        """Draw chunks for N observations.

        Returns:
            (N, C, 7) float32 chunks, (N, K, 7) corrections and (N,) log-probabilities.
        """
        tensors = {  # a number that is not finite must not reach the simulation
            key: value.nan_to_num(0.0, 0.0, 0.0) if value.is_floating_point() else value
            for key, value in self.tensors(observation).items()
        }
        mean = self._mean(tensors)
        noise = torch.randn(mean.shape, generator=self.rng, device=mean.device)
        correction = mean + self.log_sigma.exp() * noise
        chunk = self.policy.actor.chunk(correction, reference_chunk(tensors))
        chunks = chunk.unflatten(1, (-1, ACTION_DIM)).cpu().numpy()
        return chunks, correction, gaussian_log_prob(correction, mean, self.log_sigma)

    @torch.no_grad()
    def advantages(self, rollout: PPORollout) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, returns and values, each [N, T]; see ``on_policy.advantages.gae``."""
        values = self.values(rollout.observations)
        made = gae(
            rollout.rewards,
            values,
            self.values(rollout.next_observations),
            rollout.discounts,
            rollout.terminated,
            rollout.truncated,
            rollout.valid,
            self.settings.gae_lambda,
        )
        return made.advantages, made.returns, values

    def update(self, rollout: PPORollout, value_only: bool = False) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout: Collected with the present weights.
            value_only: Leave the actor as it is.

        Returns:
            Metrics, see docs/metrics.md.
        """
        advantages, returns, values = self.advantages(rollout)
        valid = rollout.valid
        scaled = standardize(advantages, valid, moments(advantages, valid))
        flat = {key: value[valid] for key, value in rollout.observations.items()}
        data = (rollout.corrections[valid], rollout.log_probs[valid], scaled[valid])
        targets = (values[valid], returns[valid])
        logged: dict[str, list[float]] = {}
        kl_stop = False
        for index in self._minibatches(int(valid.sum())):
            batch = {key: value[index] for key, value in flat.items()}
            parts = self._losses(batch, [part[index] for part in (*data, *targets)], value_only)
            limit = self.settings.target_kl
            kl_stop = limit is not None and float(parts["kl"]) > 1.5 * limit
            if kl_stop:
                break
            self.optimizer.zero_grad(set_to_none=True)
            parts["loss"].backward()
            nn.utils.clip_grad_norm_(self.learned(), self.settings.max_grad_norm)
            self.optimizer.step()
            self._bound_sigma()
            for key, value in parts.items():
                logged.setdefault(key, []).append(float(value.detach()))
        metrics = {f"train/{key}": float(np.mean(series)) for key, series in logged.items()}
        spread = returns[valid].var()
        unexplained = (returns - values)[valid].var() / spread.clamp(min=1e-8)
        return metrics | {
            "train/explained_variance": float(1.0 - unexplained),
            "train/sigma": float(self.log_sigma.detach().exp().mean()),
            "train/minibatches": float(len(logged.get("loss", ()))),
            "train/kl_stop": float(kl_stop),
        }

    def _losses(
        self, observation: dict[str, Tensor], data: list[Tensor], value_only: bool
    ) -> dict[str, Tensor]:
        correction, old_log_prob, advantage, old_value, returns = data
        count = float(len(correction))
        value = value_loss(
            self.values(observation), old_value, returns, count, self.settings.value_clip
        )
        zero = torch.zeros(())
        if value_only:
            return {"loss": value, "value_loss": value, "kl": zero}
        mean = self._mean(observation)
        log_ratio = gaussian_log_prob(correction, mean, self.log_sigma) - old_log_prob
        ratio = Ratio(log_ratio.clamp(-10.0, 10.0), torch.ones_like(log_ratio, dtype=torch.bool))
        clip = self.settings.clip
        surrogate = ppo_loss(ratio, advantage, count, clip, clip)
        distance = mean.square().sum(dim=(1, 2)).mean()
        return {
            "loss": surrogate.loss + value + self.settings.bc_weight * distance,
            "policy_loss": surrogate.loss,
            "value_loss": value,
            "kl": surrogate.kl / count,
            "clip_fraction": surrogate.clipped / count,
            "correction_rms": mean.square().mean().sqrt(),
        }

    def values(self, observation: dict[str, Tensor]) -> Tensor:
        """Return V of observations with any leading shape."""
        shape = observation["proprio"].shape[:-1]
        flat = {key: value.flatten(0, len(shape) - 1) for key, value in observation.items()}
        x = self.policy.normalizer(flat)
        values = self.value(x, x.new_zeros(len(x), 0))
        return values[:, 0].unflatten(0, shape)

    def _mean(self, observation: dict[str, Tensor]) -> Tensor:
        x, reference = self.policy.normalizer(observation), reference_chunk(observation)
        return self.policy.actor.coefficients(x, reference)

    def _minibatches(self, size: int) -> Iterator[Tensor]:
        """Yield indices: ``epochs`` permutations, cut into equal parts of about ``batch_size``."""
        parts = max(1, round(size / self.settings.batch_size))
        for _ in range(self.settings.epochs if size else 0):
            order = torch.randperm(size, generator=self.rng, device=self.log_sigma.device)
            yield from order.tensor_split(parts)

    @torch.no_grad()
    def _bound_sigma(self) -> None:
        self.log_sigma.clamp_(min=math.log(self.settings.min_sigma))

    def tensors(self, observation: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Return the keys that the networks read, as tensors of their own."""
        keys = ("rl_token", "proprio", "vla_action", "task_id")
        return {
            key: torch.tensor(np.asarray(observation[key]), device=self.log_sigma.device)
            for key in keys
            if key in observation
        }

    def learner_state(self) -> dict[str, Any]:
        """Return all but the policy, which is saved with its model."""
        return {
            "value": self.value.state_dict(),
            "log_sigma": self.log_sigma.detach().clone(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`learner_state` returned."""
        self.value.load_state_dict(state["value"])
        with torch.no_grad():
            self.log_sigma.copy_(state["log_sigma"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.set_state(state["rng"])


def gaussian_log_prob(value: Tensor, mean: Tensor, log_sigma: Tensor) -> Tensor:
    """``sum_j -(v_j - mu_j)^2 / (2 sigma_j^2) - log sigma_j - log(2 pi) / 2``.

    Args:
        value: (B, K, 7).
        mean: (B, K, 7).
        log_sigma: (7,).

    Returns:
        (B,).
    """
    z = (value - mean) / log_sigma.exp()
    return (-0.5 * z.square() - log_sigma - 0.5 * math.log(2.0 * math.pi)).sum(dim=(1, 2))
