"""Settings of TD3+BC: the algorithm's, and those of a run of ``vla-gym-train td3``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from msgspec import Meta

from vla_gym.envs.scene_cache import VisualProfile
from vla_gym.errors import ConfigError
from vla_gym.outside import Count, Fraction, NonNegativeFloat, PositiveInt, check_fields
from vla_gym.suites import get_suite
from vla_gym.suites.libero.spec import ACTION
from vla_gym_trainers.runs.settings import CheckpointSettings
from vla_gym_trainers.runs.tasks import TaskSettings
from vla_gym_trainers.world_model.settings import WorldModelSettings

Actor = Literal["residual", "plain"]
VLATrainable = Literal["lora", "full"]


@dataclass
class FineTuneConfig:
    """How the VLA and the RL token's encoder are trained beside actor and critics."""

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


@dataclass
class TD3Config(FineTuneConfig):
    """Numbers of the algorithm; one timestep is one chunk."""

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
    net_arch: tuple[int, ...] = (256, 256)
    """Hidden widths of all networks."""
    n_critics: Annotated[int, Meta(ge=2)] = 4
    """Number of critics, 2 or more; targets take the minimum."""
    bf16: bool = False
    """Critics multiply in bfloat16, but for their last layer: faster where the device has it."""
    residual_scale: float = 1.0
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
        if self.actor == "plain" and self.critic_warmup_steps == 0:
            raise ConfigError(
                "A plain actor is cloned to the VLA for critic_warmup_steps: give some, or take "
                "the residual one, which begins there."
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

    def at(self, num_timesteps: int) -> TD3Config:
        """Return the numbers as they are after so many chunks, those of the warm-up included."""
        if not self.bc_half_life:
            return self
        halvings = max(0, num_timesteps - self.learning_starts) / self.bc_half_life
        return replace(self, bc_weight=self.bc_weight * 0.5**halvings)

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
    seed: int = 0
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
    checkpoint_every: int = 5000
    """Chunks between checkpoints."""
    videos: Count = 0
    """Official states a task to film at the end, the VLA and the policy on each."""
    torch_threads: PositiveInt = 1
    """Threads of torch's matrix products; more than 1 rarely helps nets this small."""
    visual_profile: VisualProfile | None = None
    """How the frames of training are drawn: libero, as upstream draws them; fast, without
    anti-aliasing and reflections; coarse, large meshes with fewer triangles as well; None: libero
    on LIBERO's own assets. Evaluations keep None."""
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
        if self.vla_update_freq and self.hosts:
            raise ConfigError(
                "vla_update_freq trains the VLA of this process, and with hosts the frames are "
                "seen by others: leave one of the two out."
            )
        if self.vla_update_freq and (self.explore_with is not None or self.world_model is not None):
            raise ConfigError(
                "vla_update_freq trains the VLA that all environments look through, and nobody "
                "else may play or remember there: leave out explore_with and world_model, or it."
            )
        if self.vla_update_freq and self.guard_layouts:
            raise ConfigError(
                "guard_layouts hands tasks back to the frozen VLA, which a run with "
                "vla_update_freq does not play any more: leave one of the two out."
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
