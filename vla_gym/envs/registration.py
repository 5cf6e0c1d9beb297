"""Registers the environments with Gymnasium.

``Libero-<suite>-v0`` and ``LiberoVLA-<suite>-v0`` for every suite, those of installed plug-ins
included; ``Libero-v0`` and ``LiberoVLA-v0`` take ``suite=...``, one name or several.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import HumanRendering

from vla_gym.envs.checks import check_choice, check_keywords
from vla_gym.errors import RenderError
from vla_gym.suites import BddlPath, choose_suite, suite_names

if TYPE_CHECKING:
    from vla_gym.remote.shards import Hosts
    from vla_gym.vector import LiberoVectorEnv


Env = gym.Env[dict[str, Any], np.ndarray]


def register_envs() -> None:
    """Register every environment id; calling it again changes nothing.

    ``max_episode_steps`` is left out on purpose: Gymnasium's TimeLimit would count chunks, while
    LIBERO's limit counts control steps and is kept by the environment itself.
    """
    kinds = {
        "Libero": "vla_gym.envs.registration:make_libero",
        "LiberoVLA": "vla_gym.wrappers.make:make_libero_vla",
    }
    for suite in (None, *suite_names()):
        for kind, entry_point in kinds.items():
            env_id = f"{kind}-{suite}-v0" if suite else f"{kind}-v0"
            if env_id not in gym.registry:
                gym.register(
                    env_id,
                    entry_point=entry_point,
                    vector_entry_point=f"{entry_point}_vec",
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
        RenderError: If there is no display for the window, or no pygame.
    """
    from vla_gym.envs.libero import LiberoEnv

    check_keywords(kwargs, make_libero, LiberoEnv)
    env = LiberoEnv(choose_suite(suite, bddl_path), render_mode=frames_mode(render_mode), **kwargs)
    return HumanRendering(env) if render_mode == "human" else env


def frames_mode(render_mode: str | None) -> str | None:
    """Return the environment's own render mode; a window shows its ``"rgb_array"``."""
    check_choice(render_mode, "render_mode", (None, "rgb_array", "human"))
    if render_mode != "human":
        return render_mode
    names = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if sys.platform.startswith("linux") and not any(map(os.environ.get, names)):
        raise RenderError(
            "render_mode='human' needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set: "
            "use render_mode='rgb_array', record a video with 'vla-gym play', connect with "
            "'ssh -X', or run under 'xvfb-run -a'."
        )
    if importlib.util.find_spec("pygame") is None:
        raise RenderError("render_mode='human' needs pygame: pip install 'vla-gym[window]'")
    return "rgb_array"


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
