"""Settings of ``vla-gym-train ppo-actor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vla_gym.errors import ConfigError
from vla_gym_trainers.ppo_actor.algorithm import PPOSettings
from vla_gym_trainers.td3.run_config import RunConfig


@dataclass
class PPOActorConfig(RunConfig):
    """Train PPO on the RL-token actor, on the environments of ``td3``."""

    algorithm: ClassVar[str] = "ppo-actor"
    lowest: ClassVar[dict[str, int]] = {**RunConfig.lowest, "rollout_chunks": 2}

    num_envs: int = 8
    """Environments at once."""
    gamma: float = 0.995
    """Discount per control step."""
    learning_rate: float = 3e-4
    """Adam's step size, all networks."""
    batch_size: int = 256
    """Chunks of a minibatch."""
    net_arch: tuple[int, ...] = (256, 256)
    """Hidden widths of all networks."""
    residual_scale: float = 1.0
    """Largest correction of the VLA's action."""
    residual_basis: int = 2
    """Correct with this many smooth time functions per dimension; 0: each control step freely."""
    rollout_chunks: int = 1024
    """Chunks of a rollout, over all environments."""
    value_rollouts: int = 2
    """First rollouts from which the value function alone learns, on the VLA plus noise."""
    epochs: int = 5
    """Passes over a rollout."""
    gae_lambda: float = 0.95
    """Lambda of the advantages, per chunk."""
    clip: float = 0.2
    """Range of the probability ratio."""
    value_clip: float | None = None
    """Range in which a value may move per rollout; None: any."""
    bc_weight: float = 0.0
    """Weight of the squared correction of the VLA's chunk (scaled units, summed)."""
    target_kl: float | None = 0.03
    """An update ends when the KL estimate exceeds 1.5 times this; None: never."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    sigma: float = 0.05
    """Standard deviation of the correction at the start (1 = full translation); it is learned."""
    min_sigma: float = 0.01
    """Smallest standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_chunks < 2 * self.num_envs:
            raise ConfigError("rollout_chunks must be at least twice the number of environments.")
        self.settings()

    def settings(self) -> PPOSettings:
        """Return the numbers of the update."""
        names = PPOSettings.__dataclass_fields__
        return PPOSettings(**{name: getattr(self, name) for name in names})
