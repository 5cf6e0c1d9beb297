"""What every frozen VLA backend offers to the environment and the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch


#: LIBERO's cameras and robot, which every backend of this package was trained on. The cameras'
#: order is that of the camera axis wherever images of several are stacked.
CAMERAS = ("agentview", "wrist")
ACTION_SIZE, PROPRIO_SIZE = 7, 8
GRIPPER = 6  # index of the gripper in an action


class VLAOutput(NamedTuple):
    """Result of one batched forward pass.

    Attributes:
        hidden: (B, M, H) float32: last hidden states of the M action tokens.
        actions: (B, C, 7) float32 in the environment's units, [-1, 1]: translation, rotation,
            gripper (-1 opens, +1 closes).
    """

    hidden: torch.Tensor
    actions: torch.Tensor


class TokenOutput(NamedTuple):
    """What a token head makes of one forward pass, with gradients where parameters have them.

    Attributes:
        hidden: (B, M, H) states of the action queries; the first one is what values are read off.
        logits: (B, C, 7, 256) over the action bins alone, before any temperature.
    """

    hidden: torch.Tensor
    logits: torch.Tensor


@runtime_checkable
class FrozenVLA(Protocol):
    """A vision-language-action policy whose weights do not change.

    A backend owns its image orientation, preprocessing, prompt, normalisation and gripper
    convention: callers pass upright renders and get environment actions. Row i of a batch must
    not depend on the other rows. Who derives from this class has the attributes with a default.

    Attributes:
        name: Under which :func:`vla_gym.rl_token.load_rl_token` finds the RL token.
        horizon: Number C of actions in a chunk.
        num_hidden_tokens: Number M of hidden states per observation.
        hidden_size: Size H of a hidden state.
        image_size: Height and width in pixels of the renders that the backend expects.
        cameras: Names of the cameras that it sees; default: LIBERO's.
        action_size: Numbers of an action; default: LIBERO's 7.
        proprio_size: Numbers of the proprioception; default: LIBERO's 8.
    """

    name: str
    horizon: int
    num_hidden_tokens: int
    hidden_size: int
    image_size: int
    cameras: tuple[str, ...] = CAMERAS
    action_size: int = ACTION_SIZE
    proprio_size: int = PROPRIO_SIZE

    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one action chunk per row.

        Args:
            images: Keys ``agentview`` and ``wrist``, each (B, H, W, 3) uint8, upright.
            instructions: B instructions in plain language.
            proprio: (B, 8) float32: end-effector position (m), axis-angle (rad), finger joints
                (m).
        """
        ...


@runtime_checkable
class TokenVLA(FrozenVLA, Protocol):
    """A VLA with a token head: a distribution over 256 bins for every number of a chunk.

    Log-probabilities are of single tokens, over the 256 action bins alone, and of
    softmax(logits / temperature): the distribution that was sampled.
    """

    def act_tokens(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one chunk of tokens per row.

        Args:
            images: As for ``infer``.
            instructions: As for ``infer``.
            proprio: As for ``infer``.
            temperature: Divides the logits; 0 takes the most likely tokens, whose
                log-probabilities are then those of temperature 1.
            generator: Source of the draws, on the CPU; None: torch's global one.

        Returns:
            tokens (B, C, 7) int64 in 0..255 and log_probs (B, C, 7) float32, without gradients.
        """
        ...

    def token_log_probs(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        tokens: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return the log-probabilities (B, C, 7) of tokens (B, C, 7), with gradients."""
        ...

    def tokens_to_actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., C, 7) float32 in [-1, 1]."""
        ...


@runtime_checkable
class TrainableTokenVLA(TokenVLA, Protocol):
    """A TokenVLA that PPO and GRPO can train in full: values, entropies and a teacher need these.

    A backend may also have ``input_size``: the side in pixels that it shrinks renders to by
    averaging whole blocks. Renders that were shrunk so already give the same result, bit for bit,
    so a rollout stores them at that size.
    """

    @property
    def model(self) -> torch.nn.Module:
        """The network; its parameters are the ones that are trained."""

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once, with gradients where its parameters have them."""
        ...

    def actions_to_tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the nearest tokens (..., C, 7) int64 of the environment's actions."""
        ...
