"""Registers ``Libero-<suite>-v0`` and ``LiberoVLA-<suite>-v0`` with Gymnasium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym

from vla_gym.suites import SUITES

if TYPE_CHECKING:
    from vla_gym.vla.base import FrozenVLA
    from vla_gym.wrappers import FrozenVLAObservation


def register_envs() -> None:
    """Register every environment id; calling it again changes nothing.

    ``max_episode_steps`` is left out on purpose: Gymnasium's TimeLimit would count chunks, while
    LIBERO's limit counts control steps and is kept by the environment itself.
    """
    for suite in SUITES:
        for env_id, entry_point in (
            (f"Libero-{suite}-v0", "vla_gym.env:LiberoEnv"),
            (f"LiberoVLA-{suite}-v0", "vla_gym.registration:make_libero_vla"),
        ):
            if env_id not in gym.registry:
                gym.register(env_id, entry_point=entry_point, kwargs={"suite": suite})


def make_libero_vla(
    suite: str,
    *,
    vla: str | FrozenVLA = "mini",
    rl_token: Any = "auto",
    chunk_len: int | None = None,
    device: str = "cpu",
    **env_kwargs: Any,
) -> FrozenVLAObservation:
    """Build a LIBERO environment whose observation comes from a frozen VLA.

    Args:
        suite: Suite name, e.g. ``"goal"``.
        vla: Name or directory of a VLA, or an object that follows the ``FrozenVLA`` protocol.
        rl_token: See :class:`vla_gym.wrappers.FrozenVLAObservation`.
        chunk_len: Control steps executed per ``step``, 1 to the VLA's horizon (default: all of it).
        device: Torch device of the VLA when ``vla`` is a name or a directory.
        **env_kwargs: Passed on to :class:`vla_gym.env.LiberoEnv`.

    Raises:
        ConfigError: If ``chunk_len`` is not in 1..horizon.
        WeightsError: If the VLA's or the RL token's weights are missing or corrupt.
    """
    from vla_gym.env import LiberoEnv
    from vla_gym.errors import ConfigError
    from vla_gym.vla import load
    from vla_gym.wrappers import FrozenVLAObservation

    model = load(vla, device=device) if isinstance(vla, str) else vla
    chunk_len = model.horizon if chunk_len is None else chunk_len
    if not 1 <= chunk_len <= model.horizon:
        raise ConfigError(
            f"chunk_len must be between 1 and the VLA's horizon {model.horizon}, got {chunk_len}."
        )
    env_kwargs.setdefault("image_size", model.image_size)
    env = LiberoEnv(suite, chunk_len=chunk_len, **env_kwargs)
    return FrozenVLAObservation(env, vla=model, rl_token=rl_token)
