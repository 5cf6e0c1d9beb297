"""Settings of ``vla-gym-train explorer`` and ``adversarial``: PPO's, paid by a world model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, FractionBelow1, NonNegativeFloat, PositiveFloat, PositiveInt
from vla_gym.suites import get_task
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.policy_settings import PolicyKind, PolicySettings
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.settings import check_run, read_settings


@dataclass
class ExplorerConfig(PPOConfig):
    """F1's phase 2, the student: PPO of a VLA that sees the wrist alone, paid by a world model.

    The world model is frozen. Who acts is the VLA's action expert with adapters and a memory.
    """

    algorithm: ClassVar[str] = "explorer"
    presets: ClassVar[tuple[str, ...]] = ("f1_explorer", "f1_tiny_explorer")

    teacher: str | None = None
    """The world model: a run of vla-gym-train world-model (phase 1). It takes the place of
    world_model."""
    rewards: tuple[str, ...] = ("memory_divergence=0.5", "uncertainty=0.5")
    """Weights of the terms that it is paid by; terms: memory_divergence, uncertainty,
    prediction_error, coverage, task."""
    policy: PolicyKind = "gaussian"
    """How the VLA acts and is trained: gaussian, flow, own or tokens; gaussian alone has a memory,
    others need memory_size=0 and history=1."""
    hidden_cameras: tuple[str, ...] = ("agentview",)
    """Views that the explorer does not see; the VLA is shown black there."""
    chunk_len: PositiveInt | None = 4
    """Control steps executed a chunk, as many as a step of the world model has."""
    memory_size: Count = 128
    """Numbers of its recurrent memory; 0: none."""
    history: PositiveInt = 4
    """Last views that its memory takes in at each chunk, this one included."""
    lora_r: PositiveInt = 8
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Scale of the adapters, divided by the rank."""
    episodes_per_env: PositiveInt | None = 1
    """Whole episodes an environment in a rollout; None: rows of rollout_chunks."""
    eval_every: Count = 0
    """Control steps between greedy evaluations of the task's success on sampled layouts; 0: none.
    With some, the best of them is kept in place of the last explorer."""
    eval_states: Count | None = 0
    """Official states a task at the end, for the VLA, which sees all, and the explorer; None: all;
    0 skips it."""
    compare_episodes: Count = 1
    """Episodes a task of random actions, the VLA and the explorer at the end, on the same held-out
    layouts, of which the card tells rewards and state coverage; 0: none."""

    def __post_init__(self) -> None:
        """Check the ranges; see the base."""
        if self.world_model not in (None, self.teacher):
            raise ConfigError(
                f"The explorer's world model is its teacher: give --teacher {self.world_model}, "
                "and leave world_model out."
            )
        self.world_model = self.teacher
        super().__post_init__()
        if self.policy == "rl-token":  # it would see the world model's memory
            raise ConfigError(
                "An explorer is the VLA itself: take policy gaussian, flow, own or tokens, not "
                "rl-token."
            )

    def check_world_model(self) -> None:
        """Check the rewards; which world model gives them is known when a run begins."""
        if self.reward_weights() is None:
            raise ConfigError(
                "The explorer is paid by a world model: give rewards, such as uncertainty=1."
            )

    def resolved(self) -> ExplorerConfig:
        """Return the settings that a run begins with.

        Raises:
            ConfigError: If phase 1 is missing, or what is named is not its run.
        """
        if self.teacher is None:
            raise ConfigError(
                "Phase 2 needs phase 1: add --teacher RUN, of 'vla-gym-train world-model'."
            )
        is_model = (Path(self.teacher) / "model.safetensors").is_file()
        if not is_model and not self.teacher.startswith("class:"):
            check_run(Path(self.teacher), ("world-model", "adversarial"), "--teacher")
        return self


@dataclass
class AdversarialConfig(ExplorerConfig):
    """F1's phase 3: the explorer seeks where the world model errs, which learns from its data.

    In turn, cycle by cycle. Who acts is the explorer of phase 2: its VLA and what PolicySettings
    has are those of its run.
    """

    algorithm: ClassVar[str] = "adversarial"
    presets: ClassVar[tuple[str, ...]] = ("f1_adversarial", "f1_tiny_adversarial")
    resumable: ClassVar[tuple[str, ...]] = (*ExplorerConfig.resumable, "total_iterations")

    explorer: Path | None = None
    """Run of vla-gym-train explorer (phase 2) whose explorer goes on."""
    teacher: str | None = None
    """Run of phase 1 whose world model goes on, and whose data it is reminded of; default: the
    explorer's teacher."""
    rewards: tuple[str, ...] = ("prediction_error=0.5",)
    """Weights of the terms that the explorer is paid by; see explorer."""
    total_iterations: PositiveInt = 100
    """Cycles: a rollout, the explorer's update, the world model's updates. total_steps may end the
    run before."""
    world_updates: Count = 5
    """Gradient steps of the world model a cycle; 0: it stays as it is."""
    world_batch_size: PositiveInt = 16
    """Windows of one of them."""
    world_bptt_length: PositiveInt = 8
    """Steps of a window, through which gradients flow."""
    world_learning_rate: PositiveFloat = 3e-4
    """AdamW's step size of the world model."""
    world_weight_decay: NonNegativeFloat = 0.05
    """Its weight decay."""
    replay_steps: PositiveInt = 100_000
    """Steps of the explorer that the world model learns from, the newest ones."""
    teacher_share: FractionBelow1 = 0.5
    """Share of the windows that are drawn from phase 1's data in place of the explorer's, so that
    the world model does not forget what it knew."""

    def __post_init__(self) -> None:
        """Check the ranges; see the base."""
        super().__post_init__()
        windows = round(self.world_batch_size * self.teacher_share)
        if self.teacher_share and not 0 < windows < self.world_batch_size:
            raise ConfigError(
                f"teacher_share {self.teacher_share} of world_batch_size {self.world_batch_size} "
                f"windows are {windows}: at least one must be phase 1's and one the explorer's, or "
                "give teacher_share=0."
            )
        if self.ahead or self.episodes_per_env is None:
            raise ConfigError(
                "Phase 3 takes turns over whole episodes: leave ahead at 0, and give "
                f"episodes_per_env, got {self.ahead} and {self.episodes_per_env}."
            )

    def resolved(self) -> ExplorerConfig:
        """Return the settings with those of the explorer's run for who acts.

        Raises:
            ConfigError: If phase 2 is missing, or what is named is not its run.
        """
        if self.explorer is None:
            raise ConfigError(
                "Phase 3 needs phase 2: add --explorer RUN, of 'vla-gym-train explorer'."
            )
        theirs: ExplorerConfig
        if self.auto_resume and self.run_dir is not None and RunDir(self.run_dir).checkpoints():
            # The run has them by now, and goes on when the explorer's is gone.
            theirs = read_settings(self.run_dir / "config.json", AdversarialConfig)
        else:
            check_run(self.explorer, ("explorer",), "--explorer")
            theirs = read_settings(self.explorer / "config.json", ExplorerConfig)
        names = [field.name for field in dataclasses.fields(PolicySettings)]
        kept = {name: getattr(theirs, name) for name in (*names, "vla", "chunk_len")}
        teacher = theirs.teacher if self.teacher is None else self.teacher
        for name, value in (("vla", theirs.vla), ("teacher", str(teacher))):
            if value.startswith("class:") and value != getattr(self, name):
                raise ConfigError(
                    f"{self.explorer} names a class to import as its {name}, {value}: only the "
                    f"command line may; if you trust it, add --{name} {value}."
                )
        mine = dataclasses.replace(self, world_model=None, teacher=None)
        found = dataclasses.replace(mine, teacher=teacher, **kept)
        return super(AdversarialConfig, found).resolved()

    def planned_steps(self) -> int:
        """Return the control steps of the whole run if every episode is as long as it can be."""
        assert self.episodes_per_env is not None
        limit = max(get_task(self.suite, i).max_control_steps for i in self.tasks())
        rollout = self.num_envs * self.episodes_per_env * limit
        return min(self.total_steps, self.total_iterations * rollout)
