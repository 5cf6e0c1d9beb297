"""Settings of TD3+BC, the algorithm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, Fraction, NonNegativeFloat, PositiveInt, Widths, check_fields
from vla_gym.suites.libero.spec import ACTION

Actor = Literal["residual", "plain"]
VLATrainable = Literal["lora", "full"]


@dataclass
class TD3Config:
    """Numbers of the algorithm; one timestep is one chunk."""

    # How the VLA and the RL token's encoder are trained beside actor and critics.
    vla_update_freq: Count = 0
    """Chunks, over all environments, between two gradient steps of VLA, encoder and actor together;
    0: the VLA stays frozen. Needs ahead 0."""
    vla_trainable: VLATrainable = "lora"
    """What of the VLA is trained: lora (adapters) or full."""
    vla_learning_rate: NonNegativeFloat = 1e-5
    """Adam's step size of the VLA."""
    encoder_learning_rate: NonNegativeFloat = 1e-5
    """Adam's step size of the RL token's encoder."""
    vla_batch_size: PositiveInt = 64
    """Transitions per gradient step of the VLA."""
    vla_micro_batch_size: PositiveInt = 16
    """Transitions that the VLA computes at once; the step is the same up to rounding."""
    anchor_weight: NonNegativeFloat = 1.0
    """Weight of the error with which the frozen decoder rebuilds the frozen VLA's hidden states
    from the trained token."""
    max_token_staleness: Count = 0
    """Stored tokens and chunks of the VLA that are older than so many of its gradient steps are
    computed anew when they are drawn."""
    lora_r: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: NonNegativeFloat = 16.0
    """Scale of the adapters, divided by the rank."""
    gradient_checkpointing: bool = False
    """Compute the VLA's layers again in the backward pass: less memory, more time."""

    # Actor, critics and replay.
    learning_rate: NonNegativeFloat = 3e-4
    """Adam's step size, all networks."""
    batch_size: PositiveInt = 256
    """Transitions per gradient step."""
    gamma: Fraction = 0.995
    """Discount per control step, in [0, 1]; give the environment the same one."""
    learning_starts: Count = 2000
    """Warm-up: chunks that play the VLA plus noise."""
    critic_warmup_steps: Count = 3000
    """Critic-only gradient steps after the warm-up; before them a plain actor is cloned to the
    VLA's chunks with as many."""
    buffer_size: PositiveInt = 100_000
    """Replay capacity in transitions: one a chunk, with stride up to C / stride."""
    balanced_replay: bool = True
    """With several tasks: draw as many transitions of each task as of any other, or by the weights
    of task_sampling."""
    task_sampling: Literal["uniform", "unsolved"] = "uniform"
    """Which task an episode plays, and a batch holds: each as often as any other, or those less
    often that are solved."""
    train_freq: PositiveInt = 8
    """Chunks per environment between two blocks of gradient steps."""
    utd_ratio: NonNegativeFloat = 2.0
    """Critic gradient steps per chunk (update-to-data ratio)."""
    ahead: Count = 1
    """Blocks of train_freq chunks per environment that collecting may be ahead of learning: 0 in
    turn; 1 at once, with the actor of one block before, and the same result whatever the timing;
    more: collecting goes on by itself with the newest actor, what is learned depends on timing."""
    groups: PositiveInt = 1
    """Groups of environments that take turns: with 2 the VLA works for one half while the other
    half simulates."""

    tau: Fraction = 0.01
    """Polyak coefficient of the targets per critic step."""
    policy_delay: PositiveInt = 2
    """Critic steps per actor step."""
    actor_ema: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The policy that is kept and evaluated is a running average of the actor's weights, which
    decays by this per actor step (0.999: over about the last thousand); 0: the newest weights.
    Needs a frozen VLA."""
    bc_weight: NonNegativeFloat = 1.0
    """beta: weight of the squared distance to the VLA's chunk (scaled units, summed)."""
    bc_beside_demos: Fraction = 0.1
    """Share of beta with which the VLA's chunk holds the policy in tasks with prior_demos; in the
    transitions of demonstrations all of it holds to what was demonstrated."""
    bc_half_life: Count = 0
    """Chunks after the warm-up in which beta halves, again and again; 0: it stays as it is."""
    bc_weight_end: NonNegativeFloat = 0.0
    """Where the halving of beta ends; 0: nowhere."""
    mc_weight: Fraction = 0.25
    """Share of Monte-Carlo returns in the critics' targets, in [0, 1]."""
    reference_dropout: Fraction = 0.5
    """Probability that the actor's network does not see the reference in training."""
    pessimism: NonNegativeFloat = 0.0
    """kappa: how much the actor doubts leaving the VLA where the critics disagree about it."""
    value_range: tuple[float, float] | None = (0.0, 1.0)
    """Reachable returns, which targets are clamped to; None disables the clamp."""
    noise_white: NonNegativeFloat = 0.01
    """Largest exploration noise per control step (1 = full translation)."""
    noise_chunk: NonNegativeFloat = 0.06
    """Largest exploration offset shared by all steps of a chunk; each episode draws its level."""
    noise_correlation: Fraction = 0.0
    """Of the offsets of successive chunks: 0 draws each anew, 1 keeps one for the whole episode."""
    target_policy_noise: NonNegativeFloat = 0.02
    """Target smoothing noise, in units of the action scale."""
    target_noise_clip: NonNegativeFloat = 0.05
    """Bound of the target smoothing noise, in the same units."""

    actor: Actor = "residual"
    """residual: a correction added to the VLA's chunk; plain: the whole chunk, as in the paper."""
    net_arch: Widths = (256, 256)
    """Hidden widths of all networks."""
    n_critics: Annotated[int, Meta(ge=2)] = 4
    """Number of critics, 2 or more; targets take the minimum."""
    bf16: bool = False
    """Critics multiply in bfloat16, but for their last layer, on CUDA and on processors that have
    the instructions (torch 2.13 can tell); elsewhere, where it may be slower, in float32."""
    residual_scale: NonNegativeFloat = 1.0
    """Largest correction of the VLA's action by a residual actor, in units of the action scale."""
    residual_basis: Count = 2
    """A residual actor corrects with this many smooth time functions per dimension; 0: each
    control step freely."""
    action_scale: tuple[float, ...] | None = None
    """Natural size of each number of an action; None: the run's suite's, without a run LIBERO's."""
    use_rl_token: bool = True
    """Actor and critics see the RL token; without it proprio alone (an ablation)."""
    use_task_id: bool = False
    """Actor and critics are told which task it is, too: where the RL tokens of two tasks are
    alike. The policy then plays these tasks alone, whatever the words."""
    use_reference: bool = True
    """The actor's network sees the VLA's chunk; a residual one corrects it in any case (an
    ablation)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise ConfigError(f"value_range: expected (lowest, highest), got {self.value_range}.")
        if self.action_scale is not None and not all(size > 0 for size in self.action_scale):
            raise ConfigError(f"action_scale: expected sizes above 0, got {self.action_scale}.")
        if self.actor == "plain" and self.critic_warmup_steps == 0:
            raise ConfigError(
                "A plain actor is cloned to the VLA for critic_warmup_steps: give some, or take "
                "the residual one, which begins there."
            )
        if self.bc_weight_end and not self.bc_half_life:
            raise ConfigError(
                f"bc_weight_end: expected 0 without bc_half_life, got {self.bc_weight_end:g}: give "
                "both, or neither."
            )
        if self.vla_update_freq and self.ahead:
            raise ConfigError(
                f"vla_update_freq {self.vla_update_freq} needs ahead 0, got {self.ahead}: the VLA "
                "that collects is the one that is trained, so the two take turns."
            )
        if self.vla_update_freq and self.actor_ema:
            raise ConfigError(
                f"actor_ema {self.actor_ema:g} keeps an average of actors, vla_update_freq the "
                "newest VLA, which they have not seen: leave one of the two out."
            )

    @classmethod
    def checked(cls, config: TD3Config | None, others: Mapping[str, Any]) -> TD3Config:
        """Return an algorithm's config, None's defaults; ``others`` are its other arguments.

        Raises:
            ConfigError: If it is no config, or one of its numbers is among the others.
        """
        if not isinstance(config, TD3Config | None):
            raise ConfigError(f"config must be a TD3Config, got {config!r:.80}.")
        if numbers := sorted(others.keys() & {field.name for field in fields(cls)}):
            raise ConfigError(
                f"The numbers of the algorithm stand in its config: TD3Config({numbers[0]}=...), "
                f"not TD3BC({numbers[0]}=...); got {', '.join(numbers)}."
            )
        return config or cls()

    def at(self, num_timesteps: int) -> TD3Config:
        """Return the numbers as they are after so many chunks, those of the warm-up included."""
        if not self.bc_half_life:
            return self
        halvings = max(0, num_timesteps - self.learning_starts) / self.bc_half_life
        end = min(self.bc_weight, self.bc_weight_end)
        return replace(self, bc_weight=max(end, self.bc_weight * 0.5**halvings))

    def check_gamma(self, info: Mapping[str, Any]) -> None:
        """Warn if the environments' gamma, which counts, is not this one."""
        steps = info.get("executed_steps", 0)
        if not steps or "discount" not in info:
            return
        theirs = info["discount"] ** (1 / steps)
        if not math.isclose(theirs, self.gamma, rel_tol=1e-5):
            warnings.warn(
                f"The environments discount by gamma={theirs:.5g}, which is used, not by the "
                f"config's {self.gamma:.5g}: give both the same.",
                stacklevel=4,
            )

    def scale_of(self, action_size: int) -> tuple[float, ...]:
        """Return the natural size of each number of an action.

        Raises:
            ConfigError: If they are not as many as an action has.
        """
        scale = ACTION.scales if self.action_scale is None else self.action_scale
        if len(scale) != action_size:
            raise ConfigError(
                f"Actions have {action_size} numbers, action_scale {len(scale)}: give one each."
            )
        return scale
