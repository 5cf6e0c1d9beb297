"""Settings of ``vla-gym-train td3``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3.policy import Precision
from vla_gym_trainers.td3.run_config import RunConfig


@dataclass
class TD3Config(RunConfig):
    """Train TD3+BC on sampled layouts and evaluate on official states."""

    algorithm: ClassVar[str] = "td3"
    lowest: ClassVar[dict[str, int]] = {**RunConfig.lowest, "max_ahead": 1, "stride": 0}

    learning_starts: int = 2000
    """Warm-up: chunks that play the VLA plus noise."""
    critic_warmup_steps: int = 3000
    """Critic-only gradient steps after the warm-up."""
    buffer_size: int = 100_000
    """Replay capacity in transitions: one a chunk, with stride up to C / stride."""
    stride: int = 0
    """Learn also from transitions that begin every so many control steps inside a chunk (the frames
    there are rendered and shown to the VLA); it divides the chunk length; 0: whole chunks only."""
    balanced_replay: bool = True
    """With several tasks: draw as many transitions of each task as of any other."""
    train_freq: int = 8
    """Chunks per environment between two blocks of gradient steps."""
    utd_ratio: float = 2.0
    """Critic gradient steps per chunk."""
    pipelined: bool = True
    """Learn in a second thread while collecting (same result whatever the timing)."""
    asynchronous: bool = False
    """Collect all the time in a second thread, evaluate in a third; use --no-pipelined with it."""
    max_ahead: int = 64
    """Chunks that an asynchronous collector may be ahead of the learner."""

    tau: float = 0.01
    """Polyak coefficient of the targets per critic step."""
    policy_delay: int = 2
    """Critic steps per actor step."""
    bc_weight: float = 1.0
    """beta: weight of the squared distance to the VLA's chunk (scaled units, summed)."""
    mc_weight: float = 0.25
    """Share of Monte-Carlo returns in the critics' targets."""
    reference_dropout: float = 0.5
    """Probability that the actor's network does not see the reference in training."""
    pessimism: float = 0.0
    """kappa: how much the actor doubts leaving the VLA where the critics disagree about it."""
    noise_white: float = 0.01
    """Largest exploration noise per control step (1 = full translation)."""
    noise_chunk: float = 0.06
    """Largest exploration offset shared by all steps of a chunk; each episode draws its level."""
    noise_correlation: float = 0.0
    """Of the offsets of successive chunks: 0 draws each anew, 1 keeps one for the whole episode."""
    target_policy_noise: float = 0.02
    """Target smoothing noise."""
    target_noise_clip: float = 0.05
    """Bound of the target smoothing noise."""
    use_rl_token: bool = True
    """Actor and critics see the RL token; without it proprio alone (an ablation)."""
    use_reference: bool = True
    """The actor's network sees the VLA's chunk, which it corrects in any case (an ablation)."""
    n_critics: int = 4
    """Number of critics (targets take the minimum)."""
    precision: Precision = "auto"
    """Hidden layers in training: bf16, fp32, or bf16 where the CPU has instructions for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipelined and self.asynchronous:
            raise ConfigError("pipelined and asynchronous exclude each other: choose one.")
        if self.learning_starts >= self.total_chunks:
            raise ConfigError(
                f"total_chunks ({self.total_chunks}) must exceed learning_starts "
                f"({self.learning_starts}): nothing would be learned."
            )
