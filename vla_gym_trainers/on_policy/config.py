"""Settings of ``vla-gym-train ppo`` and ``vla-gym-train grpo``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from vla_gym.errors import ConfigError
from vla_gym.suites import NUM_INIT_STATES, suite_tasks
from vla_gym.vla.lora import LoraSettings
from vla_gym_trainers.on_policy.losses import RatioLevel
from vla_gym_trainers.on_policy.phases import Schedule
from vla_gym_trainers.on_policy.settings import LearnerSettings
from vla_gym_trainers.on_policy.targets import Aggregation, EpisodeAdvantage, GroupBaseline
from vla_gym_trainers.on_policy.trainable import Trainable

#: What may differ when a run is resumed: nothing that the training so far depends on.
RESUMABLE = (
    "total_steps",
    "max_minutes",
    "workers",
    "eval_states",
    "keep_checkpoints",
    "progress",
    "run_dir",
)
_LOWEST = {
    "num_envs": 1,
    "total_steps": 1,
    "group_size": 1,
    "eval_every": 0,
    "eval_envs": 1,
    "eval_layouts": 1,
    "eval_states": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "torch_threads": 1,
    "learn_threads": 1,
}


@dataclass
class OnPolicyConfig:
    """What PPO and GRPO share."""

    algorithm: ClassVar[str] = ""

    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] | None = None
    """Tasks to train on; default: all of the suite."""
    vla: str = "mini"
    """The VLA: mini, mini-few, <backend>:/path?option=value, or a folder; it needs a token head."""
    device: str = "cpu"
    """Torch device of the VLA."""
    chunk_len: int | None = None
    """Control steps executed a chunk; default: the VLA's horizon."""
    assets: str = "lite"
    """Asset pack: lite, libero, or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    num_envs: int = 16
    """Environments at once, in each process."""
    workers: int | None = None
    """Worker processes of the environments; default: one a core; 0: none."""
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

    trainable: Trainable = "lora"
    """What is trained: lora (adapters), heads (the token head alone), full."""
    heads: tuple[str, ...] = ("token_head",)
    """Modules that trainable=heads trains and that fresh_heads renews."""
    fresh_heads: bool = False
    """Give the heads new random weights first (to be cloned in the warm-up)."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """Scale of the adapters, divided by the rank."""
    lora_exclude: tuple[str, ...] = ("action_head",)
    """Modules without adapters: heads that the loss does not reach. Unknown names are ignored."""
    temperature: float = 1.0
    """Of drawing tokens, and of their log-probabilities."""

    total_steps: int = 1_000_000
    """Control steps to play, in all processes together."""
    max_minutes: float | None = None
    """Stop after this wall time, if it comes first."""
    asynchronous: bool = False
    """Play the next rollout while learning from this one; stale by at most one update."""
    overlap: bool = False
    """Within a rollout: half of the environments simulate while the others are in the VLA. Faster;
    log-probabilities then differ in their last bits from run to run."""

    gamma: float = 1.0
    """Discount per control step."""
    learning_rate: float = 1e-4
    """Adam's step size of the VLA."""
    anneal_learning_rate: bool = False
    """Lower it linearly to 0 over total_steps (a resumed run with more of them: over those)."""
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
    ratio_level: RatioLevel = "token"
    """One ratio a token, or one a chunk."""
    entropy_coef: float = 0.0
    """Weight of the tokens' entropy."""
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
    """Weight of the cross-entropy to the teacher's tokens; falls to 0 in the transition."""
    cloning_epochs: int = 4
    """Passes over a rollout in the warm-up."""
    cloning_minibatches: int = 8
    """Gradient steps of such a pass."""
    cloning_learning_rate: float | None = None
    """Adam's step size in the warm-up; default: learning_rate."""
    hybrid: bool = False
    """Execute the teacher's actions (with teacher_noise) and reinforce their tokens."""

    eval_every: int = 100_000
    """Control steps between greedy evaluations on sampled layouts, the first one at 0; 0: none."""
    eval_envs: int = 8
    """Environments of these evaluations."""
    eval_layouts: int = 8
    """Layouts a task of these evaluations."""
    eval_states: int = NUM_INIT_STATES
    """Official states a task at the end, for the start and the trained policy; 0 skips it."""
    checkpoint_every: int = 100_000
    """Control steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay."""
    run_dir: Path | None = None
    """Run directory; default runs/<algorithm>-<suite>-<time>."""
    torch_threads: int = 1
    """Threads of torch while environments play."""
    learn_threads: int = 1
    """Threads of torch while a rollout is learnt from and none is collected."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a value is out of range, or two contradict each other.
        """
        for name, low in _LOWEST.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}.")
        if self.eval_states > NUM_INIT_STATES:
            raise ConfigError(f"eval_states must be at most {NUM_INIT_STATES}.")
        if self.num_envs % self.group_size:
            raise ConfigError(
                f"num_envs ({self.num_envs}) must be a multiple of group_size ({self.group_size})."
            )
        if not 0.0 < self.gamma <= 1.0:
            raise ConfigError(f"gamma must be in (0, 1], got {self.gamma}.")
        if self.hybrid and self.schedule().needs_teacher:
            raise ConfigError("hybrid has no warm-up and no transition: the teacher always acts.")
        self.learner()

    def learner(self) -> LearnerSettings:
        """Return the learner's settings."""
        names = {field.name for field in dataclasses.fields(LearnerSettings)}
        own = {field.name for field in dataclasses.fields(self)}
        return LearnerSettings(**{name: getattr(self, name) for name in names & own})

    def schedule(self) -> Schedule:
        """Return the phases."""
        names = [field.name for field in dataclasses.fields(Schedule)]
        return Schedule(**{name: getattr(self, name) for name in names})

    def learning_rate_at(self, steps: int) -> float:
        """Return the step size of an update whose rollout began after so many control steps."""
        left = 1.0 - steps / self.total_steps if self.anneal_learning_rate else 1.0
        return self.learning_rate * max(left, 0.0)

    def lora(self, modules: set[str]) -> LoraSettings:
        """Return the adapters' settings for a network with these modules."""
        exclude = tuple(name for name in self.lora_exclude if name in modules)
        return LoraSettings(r=self.lora_r, alpha=self.lora_alpha, exclude=exclude)

    def tasks(self) -> tuple[int, ...]:
        """Return the tasks that are trained on."""
        if self.task_ids is not None:
            return self.task_ids
        return tuple(task.task_id for task in suite_tasks(self.suite))


@dataclass
class PPOConfig(OnPolicyConfig):
    """Train the VLA's action tokens with PPO: GAE over chunks and a value head."""

    algorithm: ClassVar[str] = "ppo"

    gamma: float = 0.995
    """Discount per control step."""
    gae_lambda: float = 0.95
    """GAE's lambda per chunk."""
    standardize: bool = True
    """Standardise the advantages of a rollout."""
    value_learning_rate: float = 1e-3
    """Adam's step size of the value head."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = 0.2
    """Clip range of the values; None: none."""
    value_epochs: int = 0
    """Further passes of the value head alone, over queries and returns of the last rollouts."""
    value_replay: int = 8
    """So many of them."""
    value_through_trunk: bool = False
    """Whether the value loss also moves the VLA."""

    def __post_init__(self) -> None:
        """Check the ranges; see the base."""
        super().__post_init__()
        if not 0.0 <= self.gae_lambda <= 1.0:
            raise ConfigError(f"gae_lambda must be in [0, 1], got {self.gae_lambda}.")


@dataclass
class GRPOConfig(OnPolicyConfig):
    """Train the VLA's action tokens with GRPO: episodes against others of the same start."""

    algorithm: ClassVar[str] = "grpo"

    group_size: int = 8
    """Episodes of the same start."""
    advantage: EpisodeAdvantage = "group"
    """group: against the group's mean, in its standard deviations; group-unscaled: without the
    division; absolute: successes alone."""
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
        if self.advantage != "absolute" and self.group_size < 2:
            raise ConfigError("GRPO compares within groups: group_size must be at least 2.")
