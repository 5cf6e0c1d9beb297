"""Settings of ``vla-gym-train ppo`` and ``vla-gym-train grpo``; defaults stand here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from vla_gym.errors import ConfigError
from vla_gym.outside import (
    Count,
    Fraction,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from vla_gym_trainers.on_policy.policy_settings import PolicySettings
from vla_gym_trainers.runs.settings import CheckpointSettings
from vla_gym_trainers.runs.tasks import TaskSettings
from vla_gym_trainers.world_model.rewards import WorldModelSettings

RatioLevel = Literal["factor", "chunk", "chunk-mean"]
Aggregation = Literal["tokens", "episodes"]
GroupBaseline = Literal["mean", "length"]


@dataclass
class OnPolicyConfig(WorldModelSettings, PolicySettings, TaskSettings, CheckpointSettings):
    """What PPO and GRPO share."""

    # Not checkpoint_every: all environments begin new episodes there.
    resumable: ClassVar[tuple[str, ...]] = (
        *CheckpointSettings.resumable,
        "total_steps",
        "workers",
        "hosts",
        "eval_states",
    )

    vla: str = "mini"
    """The VLA: mini, mini-few, mini-flow, <backend>:/path?option=value, or a folder."""
    device: str = "cpu"
    """Torch device of the VLA."""
    chunk_len: PositiveInt | None = None
    """Control steps executed a chunk; default: the VLA's horizon."""
    num_envs: PositiveInt = 16
    """Environments at once, in each process."""
    task_sampling: Literal["balanced", "uniform", "round_robin"] = "balanced"
    """Order of tasks; with uniform, processes play together what one with all environments does."""
    episodes_per_env: PositiveInt | None = 4
    """Whole episodes an environment in a rollout; None: rows of rollout_chunks (PPO alone)."""
    rollout_chunks: PositiveInt = 64
    """Chunks of a row if episodes_per_env is None."""
    group_size: PositiveInt = 1
    """Consecutive environments that play the same layouts."""
    seed: Count = 0
    """Seed of networks, draws and layouts."""

    total_steps: PositiveInt = 1_000_000
    """Control steps to play, in all processes together; what falls, by learning_rate_end and
    noise_end, is at its end there, so more of them at a resume raise it again."""
    ahead: Count = 0
    """Rollouts that are played ahead of the update: 0 plays and learns in turn; 1 plays the next
    one while this one is learnt from, stale by one update; more, by at most so many."""
    groups: PositiveInt = 1
    """Groups of environments that take turns: while one simulates, the VLA works for another."""

    gamma: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Discount per control step."""
    learning_rate: PositiveFloat = 1e-4
    """Adam's step size of all but the value head."""
    learning_rate_end: Fraction = 1.0
    """All learning rates fall linearly to this share of themselves at total_steps; 1: constant."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""
    num_minibatches: PositiveInt = 4
    """Gradient steps of a pass."""
    micro_batch_size: PositiveInt = 32
    """Chunks in memory at once; the result does not depend on it."""
    clip_low: OpenFraction = 0.2
    """Ratios may fall to 1 - this."""
    clip_high: PositiveFloat = 0.28
    """Ratios may grow to 1 + this."""
    ratio_level: RatioLevel = "factor"
    """One ratio for each factor of a sample (a token, a number of an action), or one a chunk: that
    of the whole sample, or the factors' geometric mean (chunk-mean)."""
    log_ratio_clamp: PositiveFloat = 10.0
    """Logarithms of ratios are cut beyond +- this."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the policy that RL began with, over all of its chunks."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    skip_factor: Annotated[float, Meta(gt=1.0)] | None = 10.0
    """Updates whose norm exceeds so many times the usual one are skipped; None: never."""
    target_kl: PositiveFloat | None = None
    """The update ends once the KL to the policy that acted exceeds 1.5 times this."""

    teacher_head: Literal["auto", "l1", "token"] = "auto"
    """Head of the frozen VLA that teaches and that validation compares with; auto: its regressed
    actions if it has them, else its most likely tokens."""
    teacher_noise: NonNegativeFloat = 0.0
    """Standard deviation of noise on the teacher's actions, as they are executed."""
    warmup_steps: Count = 0
    """Control steps during which the teacher acts and is cloned."""
    transition_steps: Count = 0
    """Control steps during which the student takes over, chunk by chunk."""
    cloning_coef: PositiveFloat = 1.0
    """Weight of the cross-entropy to the teacher's samples; falls to 0 in the transition."""
    cloning_epochs: PositiveInt = 4
    """Passes over a rollout in the warm-up."""
    cloning_minibatches: PositiveInt = 8
    """Gradient steps of such a pass."""
    cloning_learning_rate: PositiveFloat | None = None
    """Adam's step size in the warm-up; default: learning_rate."""

    eval_every: Count = 100_000
    """Control steps between greedy evaluations on sampled layouts, the first one at 0; 0: none."""
    eval_envs: PositiveInt = 8
    """Environments of these evaluations."""
    eval_layouts: PositiveInt = 8
    """Layouts a task of these evaluations."""
    eval_states: Count | None = None
    """Official states a task at the end, for start and policy; None: all; 0 skips it."""
    checkpoint_every: PositiveInt = 100_000
    """Control steps between checkpoints."""
    torch_threads: PositiveInt = 1
    """Threads of torch while environments play."""
    learn_threads: PositiveInt = 1
    """Threads of torch while a rollout is learnt from and none is collected."""

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()
        self.check_tasks()
        self.check_states(eval_states=self.eval_states)
        if self.num_envs % self.group_size:
            raise ConfigError(
                f"num_envs ({self.num_envs}) must be a multiple of group_size ({self.group_size})."
            )
        if self.ahead > 1 and self.workers == 0 and self.eval_every:
            raise ConfigError(
                f"With ahead={self.ahead} validation plays while a rollout is collected, which one "
                "process cannot draw at once: give workers, ahead=1 or eval_every=0."
            )
        self.check_policy()
        self.check_world_model()
        if self.world_model is not None and self.policy != "rl-token" and not self.rewards:
            raise ConfigError(
                f"policy {self.policy} does not see a world model's memory: give rewards, which it "
                "is paid by then, or leave world_model out."
            )
        self.check_memory(self.micro_batch_size)
        if self.episodes_per_env is None:
            self.check_rows(self.rollout_chunks)
        if self.policy != "tokens" and self.warmup_steps + self.transition_steps > 0:
            raise ConfigError(
                f"policy {self.policy} begins at the VLA: leave out warmup_steps and "
                "transition_steps."
            )
        fixed = self.policy == "flow" or (self.policy == "gaussian" and not self.learn_sigma)
        if fixed and self.entropy_coef:
            raise ConfigError(
                f"The entropy of policy {self.policy} is a constant, its noise being fixed: leave "
                "entropy_coef out."
            )

    def planned_steps(self) -> int:
        """Return the control steps of the whole run, for the progress bar."""
        return self.total_steps


@dataclass
class PPOConfig(OnPolicyConfig):
    """PPO: GAE over chunks and a value head."""

    algorithm: ClassVar[str] = "ppo"

    gamma: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.995
    """Discount per control step."""
    gae_lambda: Fraction = 0.95
    """GAE's lambda per chunk."""
    value_learning_rate: NonNegativeFloat = 1e-3
    """Adam's step size of the value head."""
    value_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range of the values; None: none."""
    value_epochs: Count = 0
    """Further passes of the value head alone, over inputs and returns of the last rollouts."""
    value_replay: PositiveInt = 8
    """So many of them."""
    value_warmup_steps: Count = 0
    """Control steps from which the value head alone learns, before RL begins."""


@dataclass
class GRPOConfig(OnPolicyConfig):
    """GRPO: episodes against others of the same start."""

    algorithm: ClassVar[str] = "grpo"

    group_size: PositiveInt = 8
    """Episodes of the same start."""
    aggregation: Aggregation = "episodes"
    """What weighs the same in the loss: all episodes, or all tokens (long failures then weigh most;
    the baseline to go with it is length)."""
    baseline: GroupBaseline = "mean"
    """What is taken off in a group: its mean, or its mean weighted by the length of the episodes
    (with aggregation tokens the advantages then sum to 0: no drift by long failures)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes_per_env is None:
            raise ConfigError("GRPO plays whole episodes: give episodes_per_env.")
        if self.group_size < 2:
            raise ConfigError("GRPO compares within groups: group_size must be at least 2, got 1.")
