"""Builds LIBERO environments that a frozen VLA looks at: ``LiberoVLA-<suite>-v0``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import HumanRendering

from vla_gym.envs.checks import as_integer, check_keywords
from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.registration import Env, frames_mode, make_libero_vec
from vla_gym.errors import ConfigError
from vla_gym.remote.shards import Hosts
from vla_gym.remote.vector_env import RemoteVectorEnv
from vla_gym.rl_token import RLTokenEncoder, choose_rl_token
from vla_gym.suites import BddlPath, choose_suite
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla import as_vla, check_device
from vla_gym.vla.base import FrozenVLA
from vla_gym.wrappers.frozen_vla import FrozenVLAObservation
from vla_gym.wrappers.plain_spaces import PlainSpaces
from vla_gym.wrappers.vector import FrozenVLAObservation as VectorFrozenVLAObservation
from vla_gym.wrappers.vector import PlainSpaces as VectorPlainSpaces


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
        bddl_path: See :func:`~vla_gym.envs.registration.make_libero`.
        vla: Name or directory of a VLA, or an object that follows the ``FrozenVLA`` protocol.
        rl_token: See :class:`vla_gym.wrappers.FrozenVLAObservation`.
        chunk_len: Control steps executed per ``step``, 1 to the VLA's horizon (default: all of it).
        device: Torch device of the VLA and of the RL token where they are given by name.
        keep_images: Whether the camera images stay in the observation.
        flat: One float32 vector as observation, one as action; see
            :class:`vla_gym.wrappers.PlainSpaces`.
        obs_keys: The entries of the observation that are kept, in this order; None for all.
        string_infos: Whether infos may hold texts such as ``instruction``.
        render_mode: See :func:`~vla_gym.envs.registration.make_libero`.
        **env_kwargs: Passed on to :class:`vla_gym.envs.libero.LiberoEnv`.

    Raises:
        ConfigError: If ``chunk_len`` is not in 1..horizon, ``obs_keys`` names no entries, or an
            argument is unknown.
        WeightsError: If the VLA's or the RL token's weights are missing or corrupt.
    """
    check_keywords(env_kwargs, make_libero_vla, LiberoEnv)
    model, encoder, chunk_len = _load(vla, rl_token, chunk_len, device)
    env_kwargs.setdefault("image_size", model.image_size)
    mode = frames_mode(render_mode)
    env = LiberoEnv(
        choose_suite(suite, bddl_path), chunk_len=chunk_len, render_mode=mode, **env_kwargs
    )
    wrapped: Env = FrozenVLAObservation(env, model, encoder, keep_images)
    if _wants_plain(flat, obs_keys, string_infos):
        wrapped = PlainSpaces(wrapped, flat, obs_keys, string_infos)
    return HumanRendering(wrapped) if render_mode == "human" else wrapped


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
        bddl_path: See :func:`~vla_gym.envs.registration.make_libero`.
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
        hosts: See :func:`~vla_gym.envs.registration.make_libero_vec`.
        **kwargs: Passed on to :class:`vla_gym.vector.LiberoVectorEnv`: ``workers``,
            ``autoreset_mode``, ... and the arguments of :class:`vla_gym.envs.libero.LiberoEnv`.

    Raises:
        ConfigError: If ``chunk_len`` is not in 1..horizon, ``obs_keys`` names no entries, the
            environments do not fit the VLA, an ``env_factory`` is given, or an argument is
            unknown.
        WeightsError: If the VLA's or the RL token's weights are missing or corrupt.
        WorkerError: If the environments can't be built.
    """
    there = () if hosts is None else (RemoteVectorEnv,)
    check_keywords(kwargs, make_libero_vla_vec, LiberoVectorEnv, LiberoEnv, *there)
    if stride is not None:
        as_integer(stride, "stride", 1)
    if not (wrap_envs is None or callable(wrap_envs)):
        raise ConfigError(f"wrap_envs must be a function, got {wrap_envs!r:.80}.")
    if kwargs.get("env_factory") is not None:
        raise ConfigError(
            "LiberoVLA-* builds LIBERO's own environments. For others, wrap LiberoVectorEnv(..., "
            "env_factory=...) in vla_gym.wrappers.vector.FrozenVLAObservation."
        )
    if hosts is None:
        model, rl_token, chunk_len = _load(vla, rl_token, chunk_len, device)
        vla = model
        kwargs.setdefault("image_size", model.image_size)
        # The VLA looks at the images at once and what is kept of them is copied by the wrapper.
        kwargs.setdefault("copy", False)
    elif chunk_len is None or "image_size" not in kwargs:
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
    if hosts is not None:
        inner = [] if wrap_envs is None else [wrap_envs]
        kwargs["vector_wrappers"] = [*kwargs.get("vector_wrappers", ()), *inner, look]
        kwargs.setdefault("gpu", device.startswith("cuda"))
    kwargs |= {"bddl_path": bddl_path, "hosts": hosts, "chunk_len": stride or chunk_len}
    envs: Any = make_libero_vec(suite, num_envs, **kwargs)
    try:
        if hosts is None:
            wrapped = envs if wrap_envs is None else wrap_envs(envs)
            if not isinstance(wrapped, gym.vector.VectorEnv):
                raise ConfigError(f"wrap_envs must return environments, got {wrapped!r:.80}.")
            envs = wrapped  # to be closed if it does not fit the VLA
            envs = look(envs)
        if _wants_plain(flat, obs_keys, string_infos):
            envs = VectorPlainSpaces(envs, flat, obs_keys, string_infos)
        return envs
    except BaseException:
        envs.close()
        raise


def _wants_plain(flat: Any, obs_keys: Any, string_infos: Any) -> bool:
    """Tell whether one of these arguments of PlainSpaces is not what is there without it."""
    return not (flat is False and obs_keys is None and string_infos is True)


def _observe(
    envs: Any,
    vla: str | FrozenVLA,
    rl_token: str | RLTokenEncoder | None,
    chunk_len: int,
    device: str,
    **keep: bool,
) -> VectorFrozenVLAObservation:
    """Let a VLA, which is loaded where this is called, look at the frames of environments."""
    model, encoder, chunk_len = _load(vla, rl_token, chunk_len, device)
    return VectorFrozenVLAObservation(envs, model, encoder, chunk_len=chunk_len, **keep)


def _load(
    vla: str | Path | FrozenVLA,
    rl_token: str | RLTokenEncoder | None,
    chunk_len: int | None,
    device: str,
) -> tuple[FrozenVLA, RLTokenEncoder | None, int]:
    """Return the VLA, its RL-token encoder and the chunk length, which must fit the VLA."""
    check_device(device)
    model = as_vla(vla, device)
    encoder = choose_rl_token(rl_token, model, device)
    if chunk_len is None:
        return model, encoder, model.horizon
    what = f"chunk_len (the VLA's horizon is {model.horizon})"
    return model, encoder, as_integer(chunk_len, what, 1, model.horizon)
