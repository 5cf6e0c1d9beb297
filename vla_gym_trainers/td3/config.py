"""Settings of a run of ``vla-gym-train td3``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, Fraction, PositiveInt
from vla_gym.suites import get_suite
from vla_gym_trainers.runs.settings import CheckpointSettings
from vla_gym_trainers.runs.tasks import TaskSettings
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.world_model.rewards import WorldModelSettings


@dataclass
class TD3RunConfig(TD3Config, WorldModelSettings, TaskSettings, CheckpointSettings):
    """Train TD3+BC on sampled layouts and evaluate on official states."""

    algorithm: ClassVar[str] = "td3"
    resumable: ClassVar[tuple[str, ...]] = (
        *CheckpointSettings.resumable,
        "total_timesteps",
        "workers",
        "hosts",
        "eval_states",
        "checkpoint_every",
        "videos",
    )

    task_ids: Annotated[
        tuple[int, ...] | None,
        tyro.conf.arg(help_behavior_hint="(default: 9, with --bddl-path all)"),
    ] = None
    """Tasks to train on; one policy for all of them."""
    vla: str = "mini"
    """The frozen VLA: mini, mini-few, mini-flow, <backend>:/path?option=value, or a folder."""
    rl_token: str = "auto"
    """Folder of the RL token's encoder (vla-gym-train rl-token); auto: the one that ships with the
    VLA, else as mean; mean: the mean of its hidden states."""
    chunk_len: PositiveInt | None = None
    """Control steps executed per chunk; None executes the VLA's whole horizon."""
    num_envs: PositiveInt = 1
    """Environments at once."""
    seed: Count = 0
    """Seed of networks, noise, replay and layouts; take run seeds at least 10,000 apart."""
    device: str = "cpu"
    """Torch device of the learner."""
    rollout_device: str | None = None
    """Torch device of the VLA and of the actor that collects; None for the learner's."""

    explore_with: Path | None = None
    """Run of vla-gym-train explorer or adversarial whose chunks, without further noise, are played
    in the warm-up in place of the VLA's; what success is does not change."""
    explore_share: Fraction = 1.0
    """Share of the environments that it plays in, the first ones."""

    prior_demos: Path | None = None
    """Demonstrations of the tasks (a folder or file of vla-gym demos): half of each batch is drawn
    from them."""
    demo_starts: Fraction = 0.0
    """Share of the training episodes, of tasks with prior_demos, that begin at a random moment of
    one of them. Statistics leave these episodes out."""

    total_timesteps: PositiveInt = 20_000
    """Chunks to collect, warm-up included (one timestep is one chunk)."""

    eval_states: Count | None = None
    """Official states per task at the end, for the VLA and the policy; None: all; 0 skips it."""
    eval_every: Count = 0
    """Chunks between greedy evaluations on sampled layouts, which keep the best policy; 0: none."""
    eval_layouts: PositiveInt = 20
    """Sampled layouts a task of these evaluations."""
    guard_layouts: Count = 0
    """Sampled layouts a task on which the policy must not be worse than the VLA at the end: else
    the VLA plays that task; 0: no guard."""
    checkpoint_every: PositiveInt = 5000
    """Chunks between checkpoints."""
    videos: Count = 0
    """Official states a task to film at the end, the VLA and the policy on each."""
    torch_threads: PositiveInt = 1
    """Threads of torch's matrix products; more than 1 rarely helps nets this small."""
    stride: Count = 0
    """Learn also from transitions that begin every so many control steps inside a chunk (the frames
    there are rendered and shown to the VLA); it divides the chunk length; 0: whole chunks only."""

    def __post_init__(self) -> None:
        if self.task_ids is None and self.bddl_path is None:
            self.task_ids = (9,)
        TaskSettings.__post_init__(self)
        self.task_ids = self.tasks()
        super().__post_init__()
        self.check_tasks()
        self.check_states(eval_states=self.eval_states, videos=self.videos)
        if self.explore_with is not None and (self.stride or self.hosts):
            raise ConfigError(
                "explore_with plays whole chunks on this machine, got stride "
                f"{self.stride} and hosts {self.hosts}: leave them out."
            )
        if self.explore_share != 1.0 and self.explore_with is None:
            raise ConfigError(
                f"explore_share: expected 1 without explore_with, got {self.explore_share:g}: give "
                "both, or neither."
            )
        names = ("hosts", "explore_with", "world_model", "guard_layouts")
        others = [name for name in names if getattr(self, name)]
        if self.vla_update_freq and others:
            raise ConfigError(
                "vla_update_freq trains the VLA of this process, which alone looks and plays in "
                f"all environments: leave out {' and '.join(others)}, or it."
            )
        if self.prior_demos is not None and (self.vla_update_freq or self.hosts or self.rewards):
            raise ConfigError(
                "prior_demos are shown once to a frozen VLA of this process, and success pays 1, "
                f"got vla_update_freq {self.vla_update_freq}, hosts {self.hosts} and rewards "
                f"{' '.join(self.rewards) or None}: leave prior_demos out, or these."
            )
        if self.demo_starts and (self.prior_demos is None or self.variation is not None):
            raise ConfigError(
                f"demo_starts {self.demo_starts:g} begins inside prior_demos, in scenes that look "
                "as they are: give prior_demos, and no variation."
            )
        self.check_world_model()
        if self.pays_for_more and self.value_range == (0.0, 1.0):
            raise ConfigError(
                f"value_range (0, 1) holds the task's returns, rewards {' '.join(self.rewards)} "
                "come to others: give another one, or None."
            )
        if self.stride and self.world_model is not None:
            raise ConfigError(
                "With a stride the world model's memory would see each piece of a chunk in "
                "training, and whole chunks when the policy is evaluated: leave one of the two out."
            )
        if self.learning_starts >= self.total_timesteps:
            raise ConfigError(
                f"total_timesteps ({self.total_timesteps}) must exceed learning_starts "
                f"({self.learning_starts}): nothing would be learned."
            )

    def of_algorithm(self) -> TD3Config:
        """Return the algorithm's part."""
        values = {f.name: getattr(self, f.name) for f in fields(TD3Config)}
        values["action_scale"] = self.action_scale or get_suite(self.suite).action.scales
        return TD3Config(**values)
