"""What every frozen VLA backend offers to the environment and the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def check_output(vla: Any, output: Any, count: int) -> VLAOutput:
    """Return what a VLA made of ``count`` observations after a check of its shapes.

    Raises:
        ConfigError: If they are not what its attributes say: rows would be repeated or left out.
    """
    import torch

    wanted = (count, vla.num_hidden_tokens, vla.hidden_size), (count, vla.horizon, vla.action_size)
    parts = getattr(output, "hidden", None), getattr(output, "actions", None)
    if (found := tuple(tuple(p.shape) for p in parts if isinstance(p, torch.Tensor))) != wanted:
        raise ConfigError(
            f"The VLA {vla.name!r} must return a VLAOutput of tensors of shapes {wanted} (hidden, "
            f"actions), as its attributes say; got {type(output).__name__} with tensors {found}."
        )
    checked: VLAOutput = output
    return checked


class TokenOutput(NamedTuple):
    """What a token head makes of one forward pass, with gradients where parameters have them.

    Attributes:
        hidden: (B, M, H) states of the action queries; the first one is what values are read off.
        logits: (B, C, 7, 256) over the action bins alone, before any temperature.
    """

    hidden: torch.Tensor
    logits: torch.Tensor


class ActionOutput(NamedTuple):
    """What a regression head makes of one forward pass, with gradients.

    Attributes:
        hidden: (B, M, H) as :class:`TokenOutput`'s.
        actions: (B, C, 7) in the policy's own units, before clipping and the gripper's switch.
    """

    hidden: torch.Tensor
    actions: torch.Tensor


class FlowOutput(NamedTuple):
    """What a flow-matching policy makes of a batch of observations, with gradients.

    Attributes:
        velocity: Takes points (B, C, A) of the paths ``(1 - t) noise + t action`` and t in [0, 1);
            returns hidden states (B, M, H) and velocities (B, C, A), the expected
            ``action - noise``.
        start: (B, C, A) float32 noise that acting greedily starts from.
    """

    velocity: Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    start: torch.Tensor

    def integrate(self, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Follow the flow by Euler's steps.

        Returns:
            Hidden states at the last step, and actions (B, C, A) in the policy's own units.
        """
        x, hidden = self.start, self.start
        for step in range(num_steps):
            hidden, velocity = self.velocity(x, step / num_steps)
            x = x + velocity / num_steps
        return hidden, x


@runtime_checkable
class FrozenVLA(Protocol):
    """A vision-language-action policy whose weights do not change.

    A backend owns its image orientation, preprocessing, prompt, normalisation and gripper
    convention: callers pass upright renders and get environment actions. Row i of a batch must
    not depend on the other rows. Who derives from this class has the attributes with a default;
    :func:`vla_gym.vla.load` gives them to others.

    Attributes:
        name: What messages, tables and result cards call it.
        horizon: Number C of actions in a chunk.
        num_hidden_tokens: Number M of hidden states per observation.
        hidden_size: Size H of a hidden state.
        image_size: Height and width in pixels of the renders that the backend expects.
        cameras: Names of the cameras that it sees; default: LIBERO's.
        action_size: Numbers of an action; default: LIBERO's 7.
        proprio_size: Numbers of the proprioception; default: LIBERO's 8.
        input_size: Side in pixels that it shrinks renders to by averaging whole blocks, None if it
            does not. Renders that were shrunk so already give the same result, bit for bit, so who
            keeps or sends them shrinks them first.
        heads: Names of what it can act with: ``"l1"`` (regressed actions), ``"token"``, ``"flow"``.
        head: Which of them ``infer`` acts with.
    """

    name: str
    horizon: int
    num_hidden_tokens: int
    hidden_size: int
    image_size: int
    cameras: tuple[str, ...] = CAMERAS
    action_size: int = ACTION_SIZE
    proprio_size: int = PROPRIO_SIZE
    input_size: int | None = None
    heads: tuple[str, ...] = ("l1",)
    head: str = "l1"

    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one action chunk per row.

        Args:
            images: Keys ``agentview`` and ``wrist``, each (B, H, W, 3) uint8, upright.
            instructions: B instructions in plain language.
            proprio: (B, 8) float32: end-effector position (m), axis-angle (rad), finger joints
                (m).

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit; so do the other methods that
                take observations.
        """


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
        """Draw one chunk of tokens per row; the observations are as for ``infer``.

        ``temperature`` divides the logits; 0 takes the most likely tokens, whose log-probabilities
        are then those of temperature 1. ``generator``, on the CPU, is the source of the draws;
        None: torch's global one.

        Returns:
            tokens (B, C, 7) int64 in 0..255 and log_probs (B, C, 7) float32, without gradients.
        """

    def token_log_probs(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        tokens: torch.Tensor,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return the log-probabilities (B, C, 7) of tokens (B, C, 7), with gradients."""

    def tokens_to_actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., C, 7) float32 in [-1, 1]."""


class TrainableNetwork(FrozenVLA, Protocol):
    """A VLA whose network PPO and GRPO can train."""

    @property
    def model(self) -> torch.nn.Module:
        """The network; its parameters are the ones that are trained."""


@runtime_checkable
class TrainableTokenVLA(TokenVLA, TrainableNetwork, Protocol):
    """Is trained by its token head: values, entropies and a teacher need these."""

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once, with gradients where its parameters have them."""

    def actions_to_tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the nearest tokens (..., C, 7) int64 of the environment's actions."""


@runtime_checkable
class TrainableActionVLA(TrainableNetwork, Protocol):
    """Is trained by a normal distribution around the actions that its head regresses."""

    def action_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> ActionOutput:
        """Run the network once, with gradients where its parameters have them."""

    def to_env(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., 7) float32 in [-1, 1] of the policy's own."""


@runtime_checkable
class TrainableFlowVLA(TrainableNetwork, Protocol):
    """Is trained by noise in its denoising steps.

    Attributes:
        num_steps: Denoising steps.
    """

    num_steps: int

    def flow_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> FlowOutput:
        """Look at observations, with gradients where the network's parameters have them."""

    def flow_to_env(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (B, C, 7) in [-1, 1] of a flow's end (B, C, A)."""


class Distribution(Protocol):
    """What a policy would do with B observations.

    A sample is what it draws for one chunk: tokens, actions, a chain of denoising steps. A sample
    has FACTORS, independent parts with a log-probability each; ``(B, *factors)`` is the shape of
    log-probabilities and entropies.
    """

    def draw(self, keys: np.ndarray) -> torch.Tensor:
        """Return samples (B, ...); row i is a function of ``keys[i]`` and its own observation."""

    def mode(self) -> torch.Tensor:
        """Return the most likely samples (B, ...)."""

    def log_prob(self, sample: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (B, *factors)."""

    def entropy(self) -> torch.Tensor:
        """Return entropies (B, *factors) in nats."""


@runtime_checkable
class TrainableVLA(TrainableNetwork, Protocol):
    """A VLA with a distribution of its own over action samples, whatever it is.

    The trainers see the three kinds above as this as well; a class of the caller's own
    (``class:package.module:Class:/path``) is trained by it with ``--policy own``.

    Attributes:
        sample_shape: Of one sample.
        sample_dtype: Of a sample.
        factors: Shape of one row of log-probabilities. If it ends in (C, N), those of control steps
            that were never executed are left out.
    """

    sample_shape: tuple[int, ...]
    sample_dtype: torch.dtype
    factors: tuple[int, ...]

    def distribution(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> tuple[Distribution, torch.Tensor]:
        """Return the distribution, with gradients, and the value features (B, H)."""

    def sample_to_env(self, sample: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (B, C, 7) in [-1, 1] of samples (B, ...)."""
