"""Settings of ``vla-gym-train ppo`` and ``vla-gym-train grpo``; defaults stand here alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

from vla_gym.errors import ConfigError
from vla_gym.suites import get_suite
from vla_gym_trainers.on_policy.policy_settings import PolicySettings
from vla_gym_trainers.runs.settings import CheckpointSettings
from vla_gym_trainers.runs.tasks import TaskSettings
from vla_gym_trainers.world_model.settings import WorldModelSettings

RatioLevel = Literal["factor", "chunk", "chunk-mean"]
Aggregation = Literal["tokens", "episodes"]
GroupBaseline = Literal["mean", "length"]

#: Settings that are at least so much.
_AT_LEAST_1 = (
    *("num_envs", "total_steps", "rollout_chunks", "group_size", "groups", "value_replay"),
    *("epochs", "num_minibatches", "micro_batch_size", "cloning_epochs", "cloning_minibatches"),
    *("eval_envs", "eval_layouts", "torch_threads", "learn_threads", "residual_basis"),
    *("lora_r", "stochastic_steps", "bptt_length", "history"),
)
_AT_LEAST_0 = (
    *("ahead", "eval_every", "eval_states", "value_epochs"),
    *("warmup_steps", "transition_steps", "value_warmup_steps", "memory_size"),
)
#: Settings that are positive and finite, or None where None is allowed.
_POSITIVE = (
    *("learning_rate", "cloning_learning_rate", "clip_low", "clip_high", "max_grad_norm"),
    *("cloning_coef", "temperature", "value_clip", "target_kl", "residual_scale"),
    *("sigma", "min_sigma", "flow_noise", "log_ratio_clamp", "advantage_clamp"),
)
#: Settings that are finite and not negative.
_NOT_NEGATIVE = ("entropy_coef", "kl_coef", "teacher_noise", "value_coef", "value_learning_rate")


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

    #: Settings that are gone, at the value at which a run may go on without them.
    retired: ClassVar[dict[str, object]] = {"hybrid": False}

    vla: str = "mini"
    """The VLA: mini, mini-few, mini-flow, <backend>:/path?option=value, or a folder."""
    device: str = "cpu"
    """Torch device of the VLA."""
    chunk_len: int | None = None
    """Control steps executed a chunk; default: the VLA's horizon."""
    num_envs: int = 16
    """Environments at once, in each process."""
    task_sampling: Literal["balanced", "uniform", "round_robin"] = "balanced"
    """Order of tasks; with uniform, processes play together what one with all environments does."""
    episodes_per_env: int | None = 4
    """Whole episodes an environment in a rollout; None: rows of rollout_chunks (PPO alone)."""
    rollout_chunks: int = 64
    """Chunks of a row if episodes_per_env is None."""
    group_size: int = 1
    """Consecutive environments that play the same layouts."""
    seed: int = 0
    """Seed of networks, draws and layouts."""

    total_steps: int = 1_000_000
    """Control steps to play, in all processes together."""
    ahead: int = 0
    """Rollouts that are played ahead of the update: 0 plays and learns in turn; 1 plays the next
    one while this one is learnt from, stale by one update; more, by at most so many."""
    groups: int = 1
    """Groups of environments that take turns: while one simulates, the VLA works for another."""

    gamma: float = 1.0
    """Discount per control step."""
    learning_rate: float = 1e-4
    """Adam's step size of all but the value head."""
    epochs: int = 1
    """Passes over a rollout."""
    num_minibatches: int = 4
    """Gradient steps of a pass."""
    micro_batch_size: int = 32
    """Chunks in memory at once; the result does not depend on it."""
    clip_low: float = 0.2
    """Ratios may fall to 1 - this."""
    clip_high: float = 0.28
    """Ratios may grow to 1 + this."""
    ratio_level: RatioLevel = "factor"
    """One ratio for each factor of a sample (a token, a number of an action), or one a chunk: that
    of the whole sample, or the factors' geometric mean (chunk-mean)."""
    log_ratio_clamp: float = 10.0
    """Logarithms of ratios are cut beyond +- this."""
    advantage_clamp: float | None = None
    """Advantages are cut beyond +- this; None: never."""
    entropy_coef: float = 0.0
    """Weight of the entropy."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the policy that RL began with, over all of its chunks."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    skip_factor: float | None = 10.0
    """Updates whose norm exceeds so many times the usual one are skipped; None: never."""
    target_kl: float | None = None
    """The update ends once the KL to the policy that acted exceeds 1.5 times this."""

    teacher_head: Literal["auto", "l1", "token"] = "auto"
    """Head of the frozen VLA that teaches and that validation compares with; auto: its regressed
    actions if it has them, else its most likely tokens."""
    teacher_noise: float = 0.0
    """Standard deviation of noise on the teacher's actions, as they are executed."""
    warmup_steps: int = 0
    """Control steps during which the teacher acts and is cloned."""
    transition_steps: int = 0
    """Control steps during which the student takes over, chunk by chunk."""
    cloning_coef: float = 1.0
    """Weight of the cross-entropy to the teacher's samples; falls to 0 in the transition."""
    cloning_epochs: int = 4
    """Passes over a rollout in the warm-up."""
    cloning_minibatches: int = 8
    """Gradient steps of such a pass."""
    cloning_learning_rate: float | None = None
    """Adam's step size in the warm-up; default: learning_rate."""

    eval_every: int = 100_000
    """Control steps between greedy evaluations on sampled layouts, the first one at 0; 0: none."""
    eval_envs: int = 8
    """Environments of these evaluations."""
    eval_layouts: int = 8
    """Layouts a task of these evaluations."""
    eval_states: int | None = None
    """Official states a task at the end, for start and policy; None: all; 0 skips it."""
    checkpoint_every: int = 100_000
    """Control steps between checkpoints."""
    torch_threads: int = 1
    """Threads of torch while environments play."""
    learn_threads: int = 1
    """Threads of torch while a rollout is learnt from and none is collected."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a value is out of range, or two contradict each other.
        """
        lowest = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)
        self.check_ranges({k: low for k, low in lowest.items() if hasattr(self, k)})
        _check_ranges(self)
        self.check_tasks()
        if (self.eval_states or 0) > (states := get_suite(self.suite).num_init_states):
            raise ConfigError(f"eval_states must be at most {states}.")
        if self.num_envs % self.group_size:
            raise ConfigError(
                f"num_envs ({self.num_envs}) must be a multiple of group_size ({self.group_size})."
            )
        if not 0.0 < self.gamma <= 1.0:
            raise ConfigError(f"gamma must be in (0, 1], got {self.gamma}.")
        if self.clip_low >= 1.0:
            raise ConfigError(f"clip_low must be below 1, got {self.clip_low}.")
        if self.skip_factor is not None and self.skip_factor <= 1.0:
            raise ConfigError(f"skip_factor must exceed 1, got {self.skip_factor}.")
        self.check_policy()
        self.check_world_model()
        if self.world_model is not None and self.policy != "rl-token" and not self.rewards:
            raise ConfigError(
                f"policy {self.policy} does not see a world model's memory: give rewards, which it "
                "is paid by then, or leave world_model out."
            )
        self.check_memory(self.policy, self.micro_batch_size)
        if self.episodes_per_env is None:
            self.check_rows(self.rollout_chunks)
        if self.policy != "tokens" and self.warmup_steps + self.transition_steps > 0:
            raise ConfigError(
                f"policy {self.policy} begins at the VLA: leave out warmup_steps and "
                "transition_steps."
            )
        if self.policy == "flow" and self.entropy_coef:
            raise ConfigError("A flow's entropy is a constant: leave entropy_coef out.")


def _check_ranges(config: OnPolicyConfig) -> None:
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            words = " or ".join(map(repr, get_args(hint)))
            raise ConfigError(f"Expected {name} {words}, got {getattr(config, name)!r}.")
    for name in _POSITIVE:
        value = getattr(config, name, None)
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"{name} must be positive, got {value}.")
    for name in _NOT_NEGATIVE:
        if not 0.0 <= getattr(config, name, 0.0) < math.inf:
            raise ConfigError(f"{name} must not be negative, got {getattr(config, name)}.")


@dataclass
class PPOConfig(OnPolicyConfig):
    """PPO: GAE over chunks and a value head."""

    algorithm: ClassVar[str] = "ppo"

    gamma: float = 0.995
    """Discount per control step."""
    gae_lambda: float = 0.95
    """GAE's lambda per chunk."""
    value_learning_rate: float = 1e-3
    """Adam's step size of the value head."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = 0.2
    """Clip range of the values; None: none."""
    value_epochs: int = 0
    """Further passes of the value head alone, over inputs and returns of the last rollouts."""
    value_replay: int = 8
    """So many of them."""
    value_warmup_steps: int = 0
    """Control steps from which the value head alone learns, before RL begins."""

    def __post_init__(self) -> None:
        """Check the ranges; see the base."""
        super().__post_init__()
        if not 0.0 <= self.gae_lambda <= 1.0:
            raise ConfigError(f"gae_lambda must be in [0, 1], got {self.gae_lambda}.")


@dataclass
class GRPOConfig(OnPolicyConfig):
    """GRPO: episodes against others of the same start."""

    algorithm: ClassVar[str] = "grpo"

    group_size: int = 8
    """Episodes of the same start."""
    aggregation: Aggregation = "episodes"
    """What weighs the same in the loss: all episodes, or all tokens (long failures then weigh most;
    the baseline to go with it is length)."""
    baseline: GroupBaseline = "mean"
    """What is taken off in a group: its mean, or its mean weighted by the length of the episodes
    (with aggregation tokens the advantages then sum to 0: no drift by long failures)."""

    def __post_init__(self) -> None:
        """Check the ranges; see the base."""
        super().__post_init__()
        if self.episodes_per_env is None:
            raise ConfigError("GRPO plays whole episodes: give episodes_per_env.")
        if self.group_size < 2:
            raise ConfigError("GRPO compares within groups: group_size must be at least 2.")
