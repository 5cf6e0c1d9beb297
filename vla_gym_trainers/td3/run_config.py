"""What the settings of all trainings on RL tokens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vla_gym.errors import ConfigError
from vla_gym.suites import get_suite, get_task
from vla_gym_trainers.runs.settings import RunSettings


@dataclass
class RunConfig(RunSettings):
    """Environments, evaluation and what is left on disk."""

    resumable: ClassVar[tuple[str, ...]] = (
        *RunSettings.resumable,
        "total_timesteps",
        "workers",
        "eval_states",
        "checkpoint_every",
        "videos",
    )
    #: Settings with a smallest value.
    lowest: ClassVar[dict[str, int]] = {
        "num_envs": 1,
        "total_timesteps": 1,
        "eval_states": 0,
        "eval_every": 0,
        "guard_layouts": 0,
        "eval_layouts": 1,
        "videos": 0,
    }

    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] = (9,)
    """Tasks to train on; one policy for all of them."""
    vla: str = "mini"
    """The frozen VLA: mini, mini-few, <backend>:/path?option=value, or a folder."""
    rl_token: str = "auto"
    """Folder of the RL token's encoder (vla-gym-train rl-token); auto: the one that ships with the
    VLA, else as mean; mean: the mean of its hidden states."""
    chunk_len: int | None = None
    """Control steps executed per chunk; None executes the VLA's whole horizon."""
    assets: str = "lite"
    """Asset pack: lite, libero, or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    num_envs: int = 1
    """Environments at once."""
    workers: int | None = None
    """Worker processes of the environments; None: none for one environment, else one a core."""
    seed: int = 0
    """Seed of networks, noise, replay and layouts; take run seeds at least 10,000 apart."""
    device: str = "cpu"
    """Torch device of the learner."""
    rollout_device: str | None = None
    """Torch device of the VLA and of the actor that collects; None for the learner's."""

    total_timesteps: int = 20_000
    """Chunks to collect, warm-up included (one timestep is one chunk)."""

    eval_states: int | None = None
    """Official states per task at the end, for the VLA and the policy; None: all; 0 skips it."""
    eval_every: int = 0
    """Chunks between greedy evaluations on sampled layouts, which keep the best policy; 0: none."""
    eval_layouts: int = 20
    """Sampled layouts a task of these evaluations."""
    guard_layouts: int = 0
    """Sampled layouts a task on which the policy must not be worse than the VLA at the end: else
    the VLA plays that task; 0: no guard."""
    checkpoint_every: int = 5000
    """Chunks between checkpoints."""
    videos: int = 0
    """Official states a task to film at the end, the VLA and the policy on each."""
    torch_threads: int = 1
    """Threads of torch's matrix products; more than 1 rarely helps nets this small."""

    def __post_init__(self) -> None:
        for task_id in self.task_ids:
            get_task(self.suite, task_id)
        if not self.task_ids:
            raise ConfigError("task_ids is empty: give at least one task.")
        self.check_ranges(self.lowest)
        states = get_suite(self.suite).num_init_states
        if max(self.eval_states or 0, self.videos) > states:
            raise ConfigError(f"eval_states and videos must be at most {states}.")
