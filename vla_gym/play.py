"""``vla-gym play``: any policy on any tasks, tiled into one video."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import tyro
from tqdm import tqdm

from vla_gym.checks import as_integer, parse_init_states
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.suites import Task, get_task
from vla_gym.variation import DomainVariation
from vla_gym.video import (
    Status,
    TileFrames,
    TilePainter,
    check_video_path,
    tiled_frames,
    write_video,
)

Who = Literal["expert", "vla", "random", "policy"]
LABELS: dict[Who, str] = {
    "expert": "scripted expert",
    "vla": "VLA",
    "random": "random actions",
    "policy": "trained policy",
}
# Most tiles of one video; more could not be made out.
MAX_TILES = 100


@dataclass(frozen=True)
class PlayConfig:
    """Play episodes and write one video: cameras, instruction, step, outcome.

    Every task is played from every state (or seed); more than one episode are tiled.
    """

    suite: str = "goal"
    """Suite name."""
    task_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--task-id"])] = (8,)
    """Tasks in the suite; see vla-gym tasks."""
    who: Who = "expert"
    """Who acts."""
    policy: Path | None = None
    """A run directory or .zip of vla-gym-train td3; needed for --who policy."""
    vla: str = "mini"
    """Name or directory of the frozen VLA."""
    chunk_len: int | None = None
    """Control steps the VLA executes per decision; default: its horizon. A policy has its own."""
    init_state_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--init-state-id"])] = (0,)
    """Official initial states, 0..49."""
    seeds: tuple[int, ...] = ()
    """Play layouts sampled with these seeds instead of official states."""
    cameras: Literal["both", "agentview", "wrist"] = "both"
    """What the video shows."""
    size: int | None = None
    """Pixels of a camera's side; default: 256 for up to four tiles, less for more."""
    max_steps: int | None = None
    """End an episode after so many control steps; default: the suite's limit."""
    assets: str = "lite"
    """Asset pack: lite, libero, auto (libero if it is there), or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    variation: str | None = None
    """How light, cameras, colours and clutter vary from tile to tile: mild or strong."""
    out: Path = Path("episode.mp4")
    """The video; .mp4 or .gif."""


@dataclass(frozen=True)
class Start:
    """Where an episode begins: an official state, or a layout sampled with a seed."""

    task: Task
    init_state_id: int | None
    seed: int

    @property
    def name(self) -> str:
        """What a caption and a result line call it."""
        where = f"seed {self.seed}" if self.init_state_id is None else f"state {self.init_state_id}"
        return f"{self.task.suite} {self.task.task_id}, {where}"


@dataclass(frozen=True)
class Outcome:
    """How an episode ended."""

    start: Start
    success: bool
    steps: int

    def __str__(self) -> str:
        """Return the result line."""
        end = "success" if self.success else "no success"
        return f"{self.start.name}: {end}, {self.steps} steps ({self.start.task.instruction})"


def main(config: PlayConfig) -> int:
    """Play as configured, write the video and a line an episode; return the exit status."""
    outcomes = []
    for outcome in play(config):
        outcomes.append(outcome)
        tqdm.write(str(outcome), file=sys.stdout)
    won = sum(outcome.success for outcome in outcomes)
    if len(outcomes) == 1:
        sys.stdout.write(f"{config.out}: {'success' if won else 'no success'}\n")
    else:
        sys.stdout.write(f"{config.out}: {won} of {len(outcomes)} succeeded\n")
    return 0


def play(
    config: PlayConfig, act: Callable[[Any], np.ndarray] | None = None, label: str | None = None
) -> Iterator[Outcome]:
    """Play all episodes, then write the video.

    Args:
        config: What to play.
        act: With ``who="policy"``, a function from an observation of ``LiberoVLA-*`` (a dict of
            unbatched arrays) to an action (C, 7), in place of the file ``config.policy``.
        label: What the caption calls who acts.

    Yields:
        The outcome of each episode as it ends; the video is there when all have been taken.

    Raises:
        ConfigError: If options contradict each other or the video cannot be written.
        UnknownTaskError: If a task does not exist, or has no expert to play it.
    """
    starts = list(_starts(config))
    _check(config, starts, act)
    players = _Players(config, act)
    cameras = ("agentview", "wrist") if config.cameras == "both" else (config.cameras,)
    size = config.size or (256 if len(starts) <= 4 else 192 if len(starts) <= 16 else 128)
    painter = TilePainter(size, len(cameras), [start.task.instruction for start in starts])
    tiles = []
    limit = sum(config.max_steps or start.task.max_control_steps for start in starts)
    # Shown in a terminal only.
    with tqdm(total=limit, unit="step", disable=None, leave=False) as bar:
        camera = Camera(painter, cameras, size, bar.update)
        try:
            for number, start in enumerate(starts, 1):
                bar.set_description(f"episode {number}/{len(starts)}")
                camera.begin(f"{label or LABELS[config.who]}   {start.name}")
                outcome = players.play(start, camera)
                limit -= camera.limit - outcome.steps
                bar.total = limit
                tiles.append(camera.frames)
                yield outcome
        finally:
            camera.close()
            players.close()
        frames = tiled_frames(tiles)
        length = max(len(tile) for tile in tiles)
        write_video(
            config.out, tqdm(frames, "video", length, unit="frame", disable=None, leave=False)
        )


def _starts(config: PlayConfig) -> Iterator[Start]:
    for task_id in config.task_ids:
        task = get_task(config.suite, task_id)
        if config.seeds:
            yield from (Start(task, None, as_integer(s, "seeds", 0)) for s in config.seeds)
        else:
            states = parse_init_states(config.init_state_ids)
            yield from (Start(task, int(state), 0) for state in states)


def _check(config: PlayConfig, starts: list[Start], act: Any) -> None:
    """Raise an error for options that cannot be."""
    if (config.policy is not None or act is not None) != (config.who == "policy"):
        raise ConfigError("--policy and --who policy belong together: give both or neither.")
    if not 1 <= len(starts) <= MAX_TILES:
        raise ConfigError(
            f"Expected 1..{MAX_TILES} episodes (tasks times states), got {len(starts)}."
        )
    if config.size is not None and (config.size % 2 or not 64 <= config.size <= 1024):
        raise ConfigError(f"size must be even and in 64..1024, got {config.size}.")
    if config.max_steps is not None:
        as_integer(config.max_steps, "max_steps", 1)
    DomainVariation.parse(config.variation)
    check_video_path(config.out)
    if config.who == "expert":
        from vla_gym.experts import EXPERT_TASKS

        for start in starts:
            known = EXPERT_TASKS.get(start.task.suite, ())
            if start.task.task_id not in known:
                raise UnknownTaskError(
                    f"No expert for task {start.task.task_id} of suite {start.task.suite!r}: "
                    "see 'vla-gym tasks', or choose --who vla or --who random."
                )


class Camera:
    """Takes a tile's frames: one at the reset and one a control step.

    Frames come from renderers of its own: what the policy observes is untouched.

    Attributes:
        frames: Frames of the present tile.
        limit: Its step limit.
    """

    def __init__(
        self,
        painter: TilePainter,
        cameras: Sequence[str],
        size: int,
        on_step: Callable[[], Any] = lambda: None,
    ) -> None:
        """Prepare; nothing is rendered yet.

        Args:
            painter: Draws the tiles.
            cameras: ``"agentview"``, ``"wrist"`` or both.
            size: Height and width of an image in pixels.
            on_step: Called after every frame but the first.
        """
        from vla_gym.scene_cache import SceneCache

        self._painter, self._cameras, self._size = painter, tuple(cameras), size
        self._on_step = on_step
        # The physics is not used: this cache only keeps renderers, a few scenes at a time.
        self._scenes = SceneCache(
            physics="fast", image_size=size, visual_profile=None, max_scenes=2
        )
        self.frames, self.limit, self._label = TileFrames(), 1, ""

    def begin(self, label: str) -> None:
        """Begin a tile."""
        self.frames, self._label = TileFrames(), label

    def take(self, env: Any, info: dict[str, Any], *, over: bool) -> None:
        """Add a frame of a ``LiberoEnv`` in its present state."""
        from vla_gym.observation import CAMERAS

        task = env.task_model.task
        self.limit = env.max_control_steps or task.max_control_steps
        images = np.empty((len(self._cameras), self._size, self._size, 3), np.uint8)
        self._scenes.render(env.sim, images, [CAMERAS[name] for name in self._cameras])
        success = bool(info["success"])
        status = Status(
            self._label, int(info["elapsed_steps"]), self.limit, success, over or success
        )
        self.frames.append(self._painter.draw(list(images), task.instruction, status))
        if status.step:
            self._on_step()

    def close(self) -> None:
        """Free the renderers."""
        self._scenes.close()


class _Filmed(gym.Wrapper[Any, np.ndarray, Any, np.ndarray]):
    """Directly around a ``LiberoEnv``, below ``ActionChunk``: films every control step."""

    def __init__(self, env: gym.Env[Any, np.ndarray], camera: Camera) -> None:
        super().__init__(env)
        self._camera = camera

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._camera.take(self.unwrapped, info, over=False)
        return obs, info

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._camera.take(self.unwrapped, info, over=terminated or truncated)
        return obs, reward, terminated, truncated, info


class _Players:
    """Plays episodes; the environment is kept while the task is the same."""

    def __init__(self, config: PlayConfig, act: Callable[[Any], np.ndarray] | None) -> None:
        """Load the VLA and the policy, if they play."""
        self._config, self._act = config, act
        self._env: gym.Env[Any, Any] | None = None
        self._task: Task | None = None
        self._chunk_len = config.chunk_len
        self._vla: Any = None
        if config.policy is not None:
            policy = load_trained_policy(config.policy)
            self._chunk_len = int(policy.action_space.shape[0])
            self._act = lambda obs: policy.predict(obs, deterministic=True)[0]
        if config.who in ("vla", "policy"):
            from vla_gym.vla import load

            self._vla = load(config.vla) if isinstance(config.vla, str) else config.vla

    def play(self, start: Start, camera: Camera) -> Outcome:
        """Play an episode to its end."""
        env = self._environment(start.task, camera)
        options = None if start.init_state_id is None else {"init_state_id": start.init_state_id}
        # With an official state, the seed decides nothing but how the scene looks.
        obs, info = env.reset(seed=start.seed or start.init_state_id or 0, options=options)
        choose = self._chooser(start, env)
        steps, over = 0, False
        while not over:
            obs, _, terminated, truncated, info = env.step(choose(obs))
            steps += int(info["executed_steps"])
            over = terminated or truncated
        return Outcome(start, bool(info["success"]), steps)

    def _chooser(self, start: Start, env: gym.Env[Any, Any]) -> Callable[[Any], np.ndarray]:
        """Return the function from observations to actions."""
        if self._config.who == "expert":
            from vla_gym.experts import make_expert

            expert = make_expert(env.unwrapped.sim)  # type: ignore[attr-defined]
            return lambda _: expert.act()
        if self._config.who == "random":
            rng = np.random.default_rng([start.seed, start.init_state_id or 0])
            return lambda _: rng.uniform(-1.0, 1.0, 7)
        return self._act or (lambda obs: np.array(obs["vla_action"]))

    def _environment(self, task: Task, camera: Camera) -> gym.Env[Any, Any]:
        if self._env is not None and self._task == task:
            return self._env
        self.close()
        from vla_gym.env import LiberoEnv

        config = self._config
        kwargs: dict[str, Any] = {"cameras": ()}
        if self._vla is not None:
            kwargs = {"image_size": self._vla.image_size}
        env: gym.Env[Any, Any] = _Filmed(
            LiberoEnv(
                task.suite,
                task_ids=task.task_id,
                assets=config.assets,
                physics=config.physics,
                max_control_steps=config.max_steps,
                variation=config.variation,
                **kwargs,
            ),
            camera,
        )
        if self._vla is not None:
            from vla_gym.wrappers import ActionChunk, FrozenVLAObservation

            chunk_len = self._chunk_len or self._vla.horizon
            env = FrozenVLAObservation(ActionChunk(env, chunk_len), vla=self._vla)
        self._env, self._task = env, task
        return env

    def close(self) -> None:
        """Free the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None


def load_trained_policy(path: Path) -> Any:
    """Load a policy of ``vla-gym-train``.

    Raises:
        ConfigError: If the trainers' extra is not installed.
        WeightsError: If there is no such file or it cannot be read.
    """
    try:
        with redirect_stderr(StringIO()):  # the banner of the old gym, which SB3 picks up
            import stable_baselines3  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"A trained policy needs the trainers ({error}): pip install 'vla-gym[trainers]'"
        ) from error
    from vla_gym_trainers.evaluate import load_policy

    return load_policy(path)


def record_expert(
    path: str | Path, suite: str, task_id: int, *, init_state_id: int = 0, **options: Any
) -> bool:
    """Record the scripted expert on one official state.

    Args:
        path: The .mp4 or .gif to write.
        suite: Suite name.
        task_id: A task with an expert (``vla_gym.experts.EXPERT_TASKS``).
        init_state_id: Official initial state, 0..49.
        **options: Further fields of :class:`PlayConfig`.

    Returns:
        Whether the episode succeeded.
    """
    (outcome,) = play(
        PlayConfig(
            suite, (task_id,), "expert", init_state_ids=(init_state_id,), out=Path(path), **options
        )
    )
    return outcome.success


def record_policy(
    path: str | Path,
    suite: str,
    task_id: int,
    *,
    policy: Callable[[Any], np.ndarray] | None = None,
    label: str | None = None,
    init_state_id: int = 0,
    **options: Any,
) -> bool:
    """Record the frozen VLA, or a policy on top of it, on one official state.

    Args:
        path: The .mp4 or .gif to write.
        suite: Suite name.
        task_id: Index of the task.
        policy: None for the VLA's own actions, else a function from an observation of
            ``LiberoVLA-*`` (a dict of unbatched arrays) to an action (C, 7).
        label: What the caption calls who acts.
        init_state_id: Official initial state, 0..49.
        **options: Further fields of :class:`PlayConfig`; ``vla`` may also be the model itself.

    Returns:
        Whether the episode succeeded.
    """
    who: Who = "vla" if policy is None else "policy"
    config = PlayConfig(
        suite, (task_id,), who, init_state_ids=(init_state_id,), out=Path(path), **options
    )
    (outcome,) = play(config, policy, label)
    return outcome.success
