"""Settings of trainers that use a world model: whose memory a policy sees, and which rewards."""

from __future__ import annotations

from dataclasses import dataclass

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.rewards import TASK, check_weights


@dataclass
class WorldModelSettings:
    """A world model beside the policy, and the rewards that it gives."""

    world_model: str | None = None
    """World model whose memory a policy on the RL token sees as well: a run of vla-gym-train
    world-model, or its model/ folder."""
    rewards: tuple[str, ...] = ()
    """Weights of the terms that training is paid by, such as task=1 uncertainty=0.1; terms: task,
    memory_divergence, uncertainty, prediction_error, coverage. Default: the task's reward alone."""

    def reward_weights(self) -> dict[str, float] | None:
        """Return the weights by term; None where the reward is the task's.

        Raises:
            ConfigError: If a term is unknown or given twice, or a weight is no number.
        """
        if not self.rewards:
            return None
        weights: dict[str, float] = {}
        for text in self.rewards:
            name, _, value = text.partition("=")
            try:
                number = float(value)
            except ValueError:
                raise ConfigError(
                    f"Expected rewards like task=1 uncertainty=0.1, got {text!r:.80}."
                ) from None
            if name in weights:
                raise ConfigError(f"rewards name the term {name!r} twice: give it one weight.")
            weights[name] = number
        return check_weights(weights)

    @property
    def pays_for_more(self) -> bool:
        """Whether training is paid for anything but the task, or for it otherwise than once."""
        weights = self.reward_weights() or {TASK: 1.0}
        return {name: weight for name, weight in weights.items() if weight} != {TASK: 1.0}

    def check_world_model(self) -> None:
        """Check the settings without loading anything.

        Raises:
            ConfigError: If rewards are wrong, or there is no world model that gives them.
        """
        if self.reward_weights() is not None and self.world_model is None:
            raise ConfigError(
                f"rewards ({' '.join(self.rewards)}) are given by a world model: add --world-model "
                "RUN, of vla-gym-train world-model."
            )
