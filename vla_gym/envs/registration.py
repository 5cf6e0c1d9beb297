"""Registers the environments with Gymnasium.

``Libero-<suite>-v0`` and ``LiberoVLA-<suite>-v0`` for every suite, those of installed plug-ins
included; ``Libero-v0`` and ``LiberoVLA-v0`` take ``suite=...``, one name or several.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import HumanRendering

from vla_gym.envs.checks import as_integer, check_keywords
from vla_gym.errors import ConfigError, RenderError
from vla_gym.suites import BddlPath, choose_suite, suite_names

if TYPE_CHECKING:
    from vla_gym.remote.shards import Hosts
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vector import LiberoVectorEnv
    from vla_gym.vla.base import FrozenVLA
    from vla_gym.wrappers.vector import FrozenVLAObservation as VectorFrozenVLAObservation
    from vla_gym.wrappers.vector import PlainSpaces as VectorPlainSpaces


Env = gym.Env[dict[str, Any], np.ndarray]


def register_envs() -> None:
    """Register every environment id; calling it again changes nothing.

    ``max_episode_steps`` is left out on purpose: Gymnasium's TimeLimit would count chunks, while
    LIBERO's limit counts control steps and is kept by the environment itself.
    """
    kinds = {
        "Libero": (
            "vla_gym.envs.registration:make_libero",
            "vla_gym.envs.registration:make_libero_vec",
        ),
        "LiberoVLA": (
            "vla_gym.envs.registration:make_libero_vla",
            "vla_gym.envs.registration:make_libero_vla_vec",
        ),
    }
    for suite in (None, *suite_names()):
        for kind, (entry_point, vector_entry_point) in kinds.items():
            env_id = f"{kind}-{suite}-v0" if suite else f"{kind}-v0"
            if env_id not in gym.registry:
                gym.register(
                    env_id,
                    entry_point=entry_point,
                    vector_entry_point=vector_entry_point,
                    kwargs={"suite": suite} if suite else {},
                )


def make_libero(
    suite: str | Sequence[str] | None = None,
    *,
    bddl_path: BddlPath | None = None,
    render_mode: str | None = None,
    **kwargs: Any,
) -> Env:
    """Build :class:`vla_gym.envs.libero.LiberoEnv`.

    Args:
        suite: Suite name, e.g. ``"goal"``, or several.
        bddl_path: In place of a suite, tasks of one's own: a BDDL file, a folder of them or a list
            of both; see :func:`vla_gym.suites.libero.own.own_suite`.
        render_mode: ``"human"`` adds Gymnasium's window, which shows every ``reset`` and ``step``.
        **kwargs: Of ``LiberoEnv``.

    Raises:
        ConfigError: If an argument is unknown or out of range.
        RenderError: If there is no display for the window.
    """
    from vla_gym.envs.libero import LiberoEnv

    check_keywords(kwargs, make_libero, LiberoEnv)
    env = LiberoEnv(choose_suite(suite, bddl_path), render_mode=_frames(render_mode), **kwargs)
    return HumanRendering(env) if render_mode == "human" else env


def _frames(render_mode: str | None) -> str | None:
    """Return the environment's own render mode; a window shows its ``"rgb_array"``."""
    if render_mode != "human":
        return render_mode
    names = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if sys.platform.startswith("linux") and not any(map(os.environ.get, names)):
        raise RenderError(
            "render_mode='human' needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set: "
            "use render_mode='rgb_array', record a video with 'vla-gym play', connect with "
            "'ssh -X', or run under 'xvfb-run -a'."
        )
    return "rgb_array"


def make_libero_vla(
    suite: str | Sequence[str] | None = None,
    *,
    bddl_path: BddlPath | None = None,
    vla: str | FrozenVLA = "mini",
    rl_token: str | RLTokenEncoder | None = "auto",
    chunk_len: int | None = None,
    device: str = "cpu",
    keep_images: bool = False,
    flat: bool = False,
    obs_keys: Sequence[str] | None = None,
    string_infos: bool = True,
    render_mode: str | None = None,
    **env_kwargs: Any,
) -> Env:
    """Build a LIBERO environment whose observation comes from a frozen VLA.

    Args:
        suite: Suite name, e.g. ``"goal"``, or several.
        bddl_path: See :func:`make_libero`.
        vla: Name or directory of a VLA, or an object that follows the ``FrozenVLA`` protocol.
        rl_token: See :class:`vla_gym.wrappers.FrozenVLAObservation`.
        chunk_len: Control steps executed per ``step``, 1 to the VLA's horizon (default: all of it).
        device: Torch device of the VLA and of the RL token where they are given by name.
        keep_images: Whether the camera images stay in the observation.
        flat: One float32 vector as observation, one as action; see
            :class:`vla_gym.wrappers.PlainSpaces`.
        obs_keys: The entries of the observation that are kept, in this order; None for all.
        string_infos: Whether infos may hold texts such as ``instruction``.
        render_mode: See :func:`make_libero`.
        **env_kwargs: Passed on to :class:`vla_gym.envs.libero.LiberoEnv`.

    Raises:
        ConfigError: If ``chunk_len`` is not in 1..horizon, ``obs_keys`` names no entries, or an
            argument is unknown.
        WeightsError: If the VLA's or the RL token's weights are missing or corrupt.
    """
    from vla_gym.envs.libero import LiberoEnv
    from vla_gym.wrappers import FrozenVLAObservation, PlainSpaces

    check_keywords(env_kwargs, make_libero_vla, LiberoEnv)
    model, encoder, chunk_len = _load(vla, rl_token, chunk_len, device)
    env_kwargs.setdefault("image_size", model.image_size)
    mode = _frames(render_mode)
    env = LiberoEnv(
        choose_suite(suite, bddl_path), chunk_len=chunk_len, render_mode=mode, **env_kwargs
    )
    wrapped: Env = FrozenVLAObservation(env, model, encoder, keep_images)
    if _wants_plain(flat, obs_keys, string_infos):
        wrapped = PlainSpaces(wrapped, flat, obs_keys, string_infos)
    return HumanRendering(wrapped) if render_mode == "human" else wrapped


def make_libero_vec(
    suite: str | Sequence[str] | None = None,
    num_envs: int = 1,
    *,
    bddl_path: BddlPath | None = None,
    hosts: str | Hosts | None = None,
    **kwargs: Any,
) -> LiberoVectorEnv:
    """Build many LIBERO environments, on this machine or on several.

    Args:
        suite: Suite name, e.g. ``"goal"``, or several.
        bddl_path: See :func:`make_libero`.
        num_envs: Number of environments.
        hosts: ``"ray"`` or ``"ray://host:port"``: a part of them on each node of a Ray cluster,
            see :class:`vla_gym.remote.vector_env.RemoteVectorEnv`. None: all on this machine.
        **kwargs: Of that class, or of :class:`vla_gym.vector.LiberoVectorEnv`.

    Raises:
        ConfigError: If an argument is unknown or out of range.
    """
    from vla_gym.envs.libero import LiberoEnv
    from vla_gym.vector import LiberoVectorEnv

    if hosts is not None:
        from vla_gym.remote.vector_env import RemoteVectorEnv

        check_keywords(kwargs, make_libero_vec, RemoteVectorEnv, LiberoVectorEnv, LiberoEnv)
        return RemoteVectorEnv(num_envs, choose_suite(suite, bddl_path), hosts=hosts, **kwargs)
    check_keywords(kwargs, make_libero_vec, LiberoVectorEnv, LiberoEnv)
    return LiberoVectorEnv(num_envs, choose_suite(suite, bddl_path), **kwargs)


def make_libero_vla_vec(
    suite: str | Sequence[str] | None = None,
    num_envs: int = 1,
    *,
    bddl_path: BddlPath | None = None,
    vla: str | FrozenVLA = "mini",
    rl_token: str | RLTokenEncoder | None = "auto",
    chunk_len: int | None = None,
    stride: int | None = None,
    device: str = "cpu",
    keep_images: bool = False,
    keep_inputs: bool = False,
    flat: bool = False,
    obs_keys: Sequence[str] | None = None,
    string_infos: bool = True,
    wrap_envs: Callable[[Any], Any] | None = None,
    hosts: str | Hosts | None = None,
    **kwargs: Any,
) -> VectorFrozenVLAObservation | LiberoVectorEnv | VectorPlainSpaces:
    """Build many LIBERO environments that share one frozen VLA, which stays in this process.

    With ``hosts`` there is one on each machine beside its environments, and what travels is its
    RL tokens and chunks. This process loads the VLA as well, to know its sizes, unless
    ``chunk_len`` and ``image_size`` are given.

    Args:
        suite: Suite name, e.g. ``"goal"``, or several.
        bddl_path: See :func:`make_libero`.
        num_envs: Number of environments.
        vla: Name or directory of a VLA, or an object that follows the ``FrozenVLA`` protocol.
        rl_token: See :class:`vla_gym.wrappers.vector.FrozenVLAObservation`.
        chunk_len: Control steps executed per ``step``, 1 to the VLA's horizon (default: all of it).
        stride: Control steps executed per ``step``, if fewer than ``chunk_len``: the observed
            chunk keeps its length, so that it can be executed in pieces.
        device: Torch device of the VLA and of the RL token where they are given by name.
        keep_images: Whether the camera images stay in the observation.
        keep_inputs: See :class:`vla_gym.wrappers.vector.FrozenVLAObservation`.
        flat: See :func:`make_libero_vla`, as ``obs_keys`` and ``string_infos``.
        obs_keys: See there.
        string_infos: See there.
        wrap_envs: Puts a vector wrapper between the environments and the VLA's.
        hosts: See :func:`make_libero_vec`.
        **kwargs: Passed on to :class:`vla_gym.vector.LiberoVectorEnv`: ``workers``,
            ``autoreset_mode``, ... and the arguments of :class:`vla_gym.envs.libero.LiberoEnv`.

    Raises:
        ConfigError: If ``chunk_len`` is not in 1..horizon, ``obs_keys`` names no entries, the
            environments do not fit the VLA, an ``env_factory`` is given, or an argument is
            unknown.
        WeightsError: If the VLA's or the RL token's weights are missing or corrupt.
        WorkerError: If the environments can't be built.
    """
    from vla_gym.envs.libero import LiberoEnv
    from vla_gym.vector import LiberoVectorEnv
    from vla_gym.wrappers.vector import FrozenVLAObservation, PlainSpaces

    classes: list[Callable[..., Any]] = [LiberoVectorEnv, LiberoEnv]
    if hosts is not None:
        from vla_gym.remote.vector_env import RemoteVectorEnv

        classes.append(RemoteVectorEnv)
    check_keywords(kwargs, make_libero_vla_vec, *classes)
    if stride is not None:
        as_integer(stride, "stride", 1)
    if not (wrap_envs is None or callable(wrap_envs)):
        raise ConfigError(f"wrap_envs must be a function, got {wrap_envs!r:.80}.")
    if kwargs.get("env_factory") is not None:
        raise ConfigError(
            "LiberoVLA-* builds LIBERO's own environments. For others, wrap LiberoVectorEnv(..., "
            "env_factory=...) in vla_gym.wrappers.vector.FrozenVLAObservation."
        )
    if hosts is not None:
        if chunk_len is None or "image_size" not in kwargs:
            model, _, chunk_len = _load(vla, None, chunk_len, "cpu")
            kwargs.setdefault("image_size", model.image_size)
        look = functools.partial(
            _observe,
            vla=vla,
            rl_token=rl_token,
            chunk_len=chunk_len,
            device=device,
            keep_images=keep_images,
            keep_inputs=keep_inputs,
        )
        inner = [] if wrap_envs is None else [wrap_envs]
        wrappers = [*kwargs.pop("vector_wrappers", ()), *inner, look]
        envs: Any = make_libero_vec(
            choose_suite(suite, bddl_path),
            num_envs,
            hosts=hosts,
            vector_wrappers=wrappers,
            gpu=device.startswith("cuda"),
            chunk_len=stride or chunk_len,
            **kwargs,
        )
    else:
        model, encoder, chunk_len = _load(vla, rl_token, chunk_len, device)
        kwargs.setdefault("image_size", model.image_size)
        # The VLA looks at the images at once and what is kept of them is copied by the wrapper.
        kwargs.setdefault("copy", False)
        suite = choose_suite(suite, bddl_path)
        envs = LiberoVectorEnv(num_envs, suite, chunk_len=stride or chunk_len, **kwargs)
    try:
        if hosts is None:
            wrapped = envs if wrap_envs is None else wrap_envs(envs)
            if not isinstance(wrapped, gym.vector.VectorEnv):
                raise ConfigError(f"wrap_envs must return environments, got {wrapped!r:.80}.")
            envs = wrapped
            envs = FrozenVLAObservation(envs, model, encoder, keep_images, chunk_len, keep_inputs)
        if _wants_plain(flat, obs_keys, string_infos):
            envs = PlainSpaces(envs, flat, obs_keys, string_infos)
        made: VectorFrozenVLAObservation | LiberoVectorEnv | VectorPlainSpaces = envs
        return made
    except BaseException:
        envs.close()
        raise


def _wants_plain(flat: Any, obs_keys: Any, string_infos: Any) -> bool:
    """Tell whether one of these arguments of PlainSpaces is not what is there without it."""
    return not (flat is False and obs_keys is None and string_infos is True)


def _observe(
    envs: Any,
    *,
    vla: str | FrozenVLA,
    rl_token: str | RLTokenEncoder | None,
    chunk_len: int,
    device: str,
    keep_images: bool,
    keep_inputs: bool,
) -> VectorFrozenVLAObservation:
    """Let a VLA, which is loaded where this is called, look at the frames of environments."""
    from vla_gym.wrappers.vector import FrozenVLAObservation

    model, encoder, chunk_len = _load(vla, rl_token, chunk_len, device)
    return FrozenVLAObservation(envs, model, encoder, keep_images, chunk_len, keep_inputs)


def _load(
    vla: str | os.PathLike[str] | FrozenVLA,
    rl_token: str | RLTokenEncoder | None,
    chunk_len: int | None,
    device: str,
) -> tuple[FrozenVLA, RLTokenEncoder | None, int]:
    """Return the VLA, its RL-token encoder and the chunk length, which must fit the VLA."""
    from vla_gym.rl_token import choose_rl_token
    from vla_gym.vla import check_device, load

    check_device(device)
    model = load(str(vla), device=device) if isinstance(vla, str | os.PathLike) else vla
    if not hasattr(model, "horizon"):
        raise ConfigError(f"vla must be a name, a folder, or a FrozenVLA; got {vla!r:.80}.")
    encoder = choose_rl_token(rl_token, model, device)
    if chunk_len is None:
        return model, encoder, model.horizon
    what = f"chunk_len (the VLA's horizon is {model.horizon})"
    return model, encoder, as_integer(chunk_len, what, 1, model.horizon)
