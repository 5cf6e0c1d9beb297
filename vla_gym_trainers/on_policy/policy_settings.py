"""Settings of what acts and is trained by ``vla-gym-train ppo | grpo``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, FractionBelow1, OpenFraction, PositiveFloat, PositiveInt, Widths

Trainable = Literal["lora", "heads", "full"]
PolicyKind = Literal["tokens", "gaussian", "flow", "own", "rl-token"]

#: Heads of the package's backends, and the one that a policy's loss reaches.
_HEADS = ("action_head", "token_head", "flow_head")
_REACHED = {"tokens": "token_head", "gaussian": "action_head", "flow": "flow_head"}


@dataclass
class PolicySettings:
    """Who acts, with the settings of each kind of policy."""

    # Of the policies that are the VLA itself: all but rl-token.
    hidden_cameras: tuple[str, ...] = ()
    """gaussian, flow, own: views that the policy does not see; the VLA is shown black there."""
    trainable: Trainable = "lora"
    """What of the VLA is trained: lora (adapters), heads (some modules alone), full."""
    heads: tuple[str, ...] | None = None
    """Modules that trainable=heads trains and that fresh_heads renews; default: the embedded VLA's
    that the policy's loss reaches (token_head, action_head, flow_head)."""
    fresh_heads: bool = False
    """Give the heads new random weights first (to be cloned in the warm-up)."""
    lora_r: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """Scale of the adapters, divided by the rank."""
    lora_dropout: FractionBelow1 = 0.0
    """Dropout on the adapters' input while learning; the first ratios are then not exactly 1."""
    lora_targets: tuple[str, ...] = ()
    """Ends of the names of modules with adapters, such as q_proj v_proj; default: all linear."""
    lora_exclude: tuple[str, ...] | None = None
    """Modules without adapters; default: the heads that the policy's loss does not reach. Unknown
    names are ignored."""
    lora_train_whole: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass: less memory, about a third more time."""
    temperature: PositiveFloat = 1.0
    """tokens: of drawing, and of log-probabilities."""
    learn_sigma: bool = True
    """gaussian: whether the standard deviations are learned; sigma is where they begin."""
    sigma_learning_rate: PositiveFloat | None = None
    """gaussian: Adam's step size of their logarithms; default: learning_rate, by which they hardly
    move."""
    noise_correlation: FractionBelow1 = 0.0
    """tokens, gaussian, flow: of the noise of successive control steps of a chunk, 0 to below 1: 0
    trembles, 0.9 moves on in one direction."""
    noise_end: OpenFraction | None = None
    """tokens, gaussian, flow: share of the temperature, of the sigma that is not exceeded or of the
    flow's noise that is left at total_steps, to which it falls geometrically; default: they stay,
    and sigma has no upper bound."""
    flow_noise: PositiveFloat = 0.5
    """flow: level of the noise in the denoising steps."""
    stochastic_steps: PositiveInt | None = None
    """flow: the first so many denoising steps have noise; default: all."""
    flow_start: Literal["drawn", "fixed"] = "drawn"
    """flow: where the denoising starts while learning: at a noise that is drawn, or at the one at
    which acting greedily does, so that all that is explored can be learnt from."""

    # Of policy rl-token.
    rl_token: str = "auto"
    """rl-token: folder of the RL token's encoder; auto: the one that ships with the VLA, else as
    mean; mean: the mean of its hidden states."""
    net_arch: Widths = (256, 256)
    """rl-token: hidden widths of the network."""
    residual_scale: PositiveFloat = 1.0
    """rl-token: largest mean correction of the VLA's action, in units of the action scale."""
    residual_basis: PositiveInt = 2
    """rl-token: correct with this many smooth functions of time per action dimension."""
    sigma: PositiveFloat = 0.05
    """rl-token, gaussian: standard deviation of the correction, or of an action, at the start (1 =
    full translation; rotations have less)."""
    min_sigma: PositiveFloat = 0.01
    """rl-token, gaussian: smallest standard deviation; it is learned, per action dimension."""

    # Of policies with a recurrent memory, which are learnt from by sequences.
    memory_size: Count = 0
    """rl-token, gaussian: numbers of a recurrent memory (a GRU) of the episode; 0: none."""
    history: PositiveInt = 1
    """gaussian: last views that its memory takes in at each chunk, this one included."""
    sequential_training: bool = True
    """Learn from windows of successive chunks, through the memory of the chunks before in the
    window; else from single chunks, each with the memory that it starts from."""
    bptt_length: PositiveInt = 8
    """Chunks of a window: back-propagation through time is cut off before its first one."""
    memory_start: Literal["stored", "recomputed"] = "stored"
    """Memory that a window starts from: stored while playing, stale after the first gradient step;
    or recomputed before each step, by the policy as it is, from the episode's first chunk on."""
    # Of all.
    policy: PolicyKind = "tokens"
    """What acts and is trained: the VLA itself, by its tokens, by a normal distribution around the
    actions that it regresses (gaussian), by noise in its flow, or by a distribution of its own; or
    rl-token, a small network on the VLA's RL token that corrects the frozen VLA's chunks."""

    def check_policy(self) -> None:
        """Raise a ConfigError if the policy has no such setting, or one is out of range."""
        is_other, has_sigma = self.policy in ("tokens", "flow"), self.policy == "gaussian"
        is_learned = has_sigma and self.learn_sigma
        for name, fits, whose in (
            ("sigma_learning_rate", is_learned, "gaussian with learn_sigma"),
            ("noise_end", is_learned or is_other, "tokens, flow or gaussian with learn_sigma"),
            ("noise_correlation", is_other or has_sigma, "tokens, gaussian or flow"),
        ):
            if getattr(self, name) and not fits:
                raise ConfigError(
                    f"{name} is for policy {whose}, got policy {self.policy} with learn_sigma "
                    f"{self.learn_sigma}: leave it out."
                )
        least, of = self.sigma * (self.noise_end or 1.0), " * noise_end" if self.noise_end else ""
        if self.policy in ("gaussian", "rl-token") and self.min_sigma > least * (1.0 + 1e-9):
            raise ConfigError(
                f"min_sigma must be at most sigma{of} ({least:g}), got {self.min_sigma}: give a "
                "smaller min_sigma or a larger sigma."
            )
        if self.hidden_cameras and self.policy in ("tokens", "rl-token"):
            raise ConfigError(f"policy {self.policy} sees all cameras: give no hidden_cameras.")
        if self.policy != "tokens" and self.fresh_heads:
            raise ConfigError("fresh_heads are cloned in the warm-up, which only tokens have.")
        if self.heads is not None and self.trainable != "heads" and not self.fresh_heads:
            raise ConfigError(
                f"heads are what trainable=heads trains and fresh_heads renews, got trainable="
                f"{self.trainable}: give one of the two, or leave heads out (lora_train_whole "
                "names modules that are trained whole beside adapters)."
            )

    def check_memory(self, micro_batch_size: int) -> None:
        """Raise a ConfigError if the memory's sizes do not fit the policy or each other."""
        if self.memory_size and self.policy not in ("rl-token", "gaussian"):
            raise ConfigError(
                f"policy {self.policy} has no memory: give memory_size=0 and history=1, got "
                f"{self.memory_size} and {self.history}."
            )
        if self.history != 1 and (self.policy != "gaussian" or not self.memory_size):
            raise ConfigError(
                f"history is of the memory of policy gaussian, got policy {self.policy} with "
                f"memory_size {self.memory_size}: give history=1."
            )
        is_sequential = self.memory_size and self.sequential_training
        if is_sequential and micro_batch_size < self.bptt_length:
            raise ConfigError(
                f"micro_batch_size ({micro_batch_size}) must be at least bptt_length "
                f"({self.bptt_length}): a window is in memory as a whole."
            )

    def check_rows(self, num_chunks: int) -> None:
        """Raise a ConfigError if a window does not fit into a row of a rollout."""
        if self.memory_size and self.sequential_training and self.bptt_length > num_chunks:
            raise ConfigError(
                f"bptt_length must be at most {num_chunks}, the chunks of a row, got "
                f"{self.bptt_length}."
            )

    @property
    def needs_its_run(self) -> bool:
        """Whether who plays the policy needs more of its run than a VLA."""
        return self.policy == "rl-token" or bool(self.hidden_cameras or self.memory_size)

    def trained_heads(self) -> tuple[str, ...]:
        """Return the modules that trainable=heads trains; see ``heads``."""
        if self.heads is not None:
            return self.heads
        return (_REACHED[self.policy],) if self.policy in _REACHED else ()

    def heads_without_adapters(self) -> tuple[str, ...]:
        """Return the modules without adapters; see ``lora_exclude``."""
        if self.lora_exclude is not None:
            return self.lora_exclude
        reached = _REACHED.get(self.policy)
        return tuple(head for head in _HEADS if reached and head != reached)
