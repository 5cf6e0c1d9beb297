"""Options of a flow-matching policy, its noise among them.

The hidden states depend on the noise, so the noise must not depend on chance, on the other rows of
the batch or on how often the policy was called. Three ways to have that:

- ``"fixed"``, the default: one draw for the seed, the same for every row and call; a typical point
  of the distribution that the policy was trained on.
- ``"zeros"``: the middle of that distribution, which no training sample was ever that close to.
- ``"observation"``: a draw for the seed and the row's own images, instruction and proprioception,
  so that rows and steps have noise as different as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_gym.errors import ConfigError

NOISES = ("fixed", "zeros", "observation")


@dataclass(frozen=True)
class FlowOptions:
    """A caller's choices.

    Attributes:
        noise: ``"fixed"``, ``"zeros"`` or ``"observation"``, see the module.
        seed: Of the noise.
        num_steps: Denoising steps; None for the checkpoint's.
        image_size: Side in pixels of the renders; None for that of the training data.
    """

    noise: str = "fixed"
    seed: int = 0
    num_steps: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If one is out of range.
        """
        if self.noise not in NOISES:
            raise ConfigError(f"Expected noise in {NOISES}, got {self.noise!r}.")
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"Expected num_steps >= 1, got {self.num_steps}.")
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"Expected image_size >= 1, got {self.image_size}.")
