"""Videos of episodes: both cameras side by side, with the instruction, the step and the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.env import LiberoEnv

FPS = 20  # control steps per second: videos play in real time
CAPTION_HEIGHT = 48  # pixels; with 256-pixel cameras all sides are multiples of 16, as H.264 wants
_GREEN, _WHITE, _RED = (90, 220, 120), (235, 235, 235), (240, 110, 100)


def compose_frame(
    images: Sequence[np.ndarray], lines: Sequence[tuple[str, tuple[int, int, int]]]
) -> np.ndarray:
    """Put camera images side by side over a caption.

    Args:
        images: (H, W, 3) uint8 each, all of one shape.
        lines: At most two caption lines, each (text, RGB colour).

    Returns:
        (H + CAPTION_HEIGHT, W * len(images), 3) uint8.
    """
    from PIL import Image, ImageDraw, ImageFont

    picture = np.concatenate(images, axis=1)
    caption = Image.new("RGB", (picture.shape[1], CAPTION_HEIGHT), (24, 24, 28))
    draw = ImageDraw.Draw(caption)
    font = ImageFont.load_default(size=16)
    for row, (text, colour) in enumerate(lines):
        draw.text((8, 4 + 21 * row), text, fill=colour, font=font)
    return np.concatenate([picture, np.asarray(caption)], axis=0)


class FrameRecorder(gym.Wrapper[Any, np.ndarray, Any, np.ndarray]):
    """Keep one captioned frame per ``step`` of a single-step LIBERO environment.

    Put it directly around :class:`vla_gym.env.LiberoEnv`, below ``ActionChunk``, so that every
    control step is seen. Frames come from a renderer of its own: what the policy observes is
    untouched.

    Attributes:
        frames: List of (size + CAPTION_HEIGHT, 2 * size, 3) uint8 since the last reset.
    """

    def __init__(self, env: gym.Env[Any, np.ndarray], *, label: str, size: int = 256) -> None:
        """Wrap ``env``.

        Args:
            env: A ``LiberoEnv`` or a wrapper of one.
            label: Who acts, shown in the caption.
            size: Height and width of each camera's image in pixels.
        """
        super().__init__(env)
        self.label, self.size = label, size
        self.frames: list[np.ndarray] = []
        self._renderer: Any = None
        self._scene_key = ""

    @property
    def libero_env(self) -> LiberoEnv:
        """The environment inside."""
        inner = self.env.unwrapped
        assert isinstance(inner, LiberoEnv)
        return inner

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode and forget the frames of the last one."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames = [self._frame(info, over=False)]
        return obs, info

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and keep a frame."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append(self._frame(info, over=terminated or truncated))
        return obs, reward, terminated, truncated, info

    def _frame(self, info: dict[str, Any], *, over: bool) -> np.ndarray:
        from vla_gym.sim import SceneRenderer

        model = self.libero_env.task_model
        if self._scene_key != model.scene_key:
            self._close_renderer()
            profile = "libero" if model.assets.name == "libero" else "fast"
            self._renderer = SceneRenderer(model, self.size, self.size, profile=profile)
            self._scene_key = model.scene_key
        images = np.empty((2, self.size, self.size, 3), np.uint8)
        self._renderer.render(self.libero_env.sim, images)
        outcome = "success" if info["success"] else "time limit" if over else ""
        status = f"{self.label}   step {info['elapsed_steps']}   {outcome}"
        colour = _GREEN if info["success"] else _RED if over else _WHITE
        return compose_frame(tuple(images), [(info["instruction"], _WHITE), (status, colour)])

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer, self._scene_key = None, ""

    def close(self) -> None:
        """Free the renderer and the environment."""
        self._close_renderer()
        super().close()


def write_video(
    path: str | Path, frames: Sequence[np.ndarray], *, fps: int = FPS, hold_seconds: float = 1.0
) -> Path:
    """Write frames as an H.264 mp4, holding the last one so that the outcome can be read.

    Args:
        path: File to write; its folder is made.
        frames: (H, W, 3) uint8 each.
        fps: Frames per second.
        hold_seconds: How long the last frame stays, in seconds.

    Returns:
        The path.
    """
    import imageio

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = [frames[-1]] * round(hold_seconds * fps)
    imageio.mimwrite(path, [*frames, *held], fps=fps, codec="libx264", quality=7)
    return path


def record_expert(
    path: str | Path, suite: str, task_id: int, *, init_state_id: int = 0, **env_kwargs: Any
) -> bool:
    """Record the scripted expert on one official state.

    Args:
        path: The mp4 file to write.
        suite: Suite name.
        task_id: A task with an expert (``vla_gym.experts.EXPERT_TASKS``).
        init_state_id: Official initial state, 0..49.
        **env_kwargs: Passed to :class:`vla_gym.env.LiberoEnv`.

    Returns:
        Whether the episode succeeded.
    """
    from vla_gym.experts import make_expert

    env = FrameRecorder(
        LiberoEnv(suite, task_ids=task_id, cameras=(), **env_kwargs), label="scripted expert"
    )
    try:
        _, info = env.reset(seed=0, options={"init_state_id": init_state_id})
        expert = make_expert(env.libero_env.sim)
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(expert.act())
            over = terminated or truncated
        write_video(path, env.frames)
        return bool(info["success"])
    finally:
        env.close()


def record_policy(
    path: str | Path,
    suite: str,
    task_id: int,
    *,
    policy: Any = None,
    vla: str | Any = "mini",
    chunk_len: int | None = None,
    label: str = "VLA",
    init_state_id: int = 0,
    **env_kwargs: Any,
) -> bool:
    """Record the frozen VLA, or a policy on top of it, on one official state.

    Args:
        path: The mp4 file to write.
        suite: Suite name.
        task_id: Index of the task.
        policy: None for the VLA's own actions, else a function from an observation of
            ``LiberoVLA-*`` (a dict of unbatched arrays) to an action (C, 7).
        vla: Name or directory of the VLA, or the model itself.
        chunk_len: Control steps per decision; default: the VLA's horizon.
        label: Who acts, shown in the caption.
        init_state_id: Official initial state, 0..49.
        **env_kwargs: Passed to :class:`vla_gym.env.LiberoEnv`.

    Returns:
        Whether the episode succeeded.
    """
    from vla_gym.vla import load
    from vla_gym.wrappers import ActionChunk, FrozenVLAObservation

    model = load(vla) if isinstance(vla, str) else vla
    env_kwargs.setdefault("image_size", model.image_size)
    recorder = FrameRecorder(LiberoEnv(suite, task_ids=task_id, **env_kwargs), label=label)
    env = FrozenVLAObservation(ActionChunk(recorder, chunk_len or model.horizon), vla=model)
    try:
        obs, info = env.reset(seed=0, options={"init_state_id": init_state_id})
        over = False
        while not over:
            action = obs["vla_action"] if policy is None else policy(obs)
            obs, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        write_video(path, recorder.frames)
        return bool(info["success"])
    finally:
        env.close()
