"""The one loop that plays episodes: any policy, any starts, over the vector environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.registration import make_libero_vec
from vla_gym.errors import ConfigError
from vla_gym.remote.shards import Hosts
from vla_gym.rollout.episodes import Episode, Start
from vla_gym.rollout.policies import Info, Policy
from vla_gym.rollout.workers import ExpertActs
from vla_gym.vector import LiberoVectorEnv

#: Wraps an environment in its worker.
Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
#: Returns the next start; None as long as there is none.
NextStart = Callable[[], Start | None]
# Scenes that stay open in a worker. Episodes come task by task, so two are enough; with LIBERO's
# meshes each takes half a gigabyte on a software renderer.
SCENES = 2


def make_envs(
    suite: str,
    task_ids: Iterable[int],
    policy: Policy,
    *,
    num_envs: int = 8,
    workers: int | None = None,
    hosts: str | Hosts | None = None,
    env_wrappers: Sequence[Wrapper] = (),
    **env_kwargs: Any,
) -> LiberoVectorEnv:
    """Make environments in which a policy can play; others that see and do as much may play too.

    Args:
        suite: Suite name.
        task_ids: All that will be played.
        policy: Says what it must see, and the rows of its chunks.
        num_envs: Environments at once.
        workers: Worker processes; None: one a core; 0: none.
        hosts: Machines, see :func:`vla_gym.envs.registration.make_libero_vec`; None: this one.
        env_wrappers: Applied to each environment in its worker.
        **env_kwargs: Further arguments of :class:`LiberoVectorEnv`: ``assets``, ``physics``, ...
    """
    acts = [ExpertActs] if policy.expert else []
    kwargs: dict[str, Any] = {
        "task_ids": sorted(set(task_ids)),
        "autoreset_mode": "DISABLED",
        "chunk_len": policy.chunk_len,
        "cameras": policy.cameras,
        "image_size": policy.image_size,
        "scene_cache_size": SCENES,
        "env_wrappers": [*acts, *env_wrappers],
    }
    kwargs |= {"hosts": hosts, "workers": workers, **env_kwargs}
    envs = make_libero_vec(suite, num_envs, **kwargs)
    wrap = getattr(policy, "wrap_envs", None)
    try:
        return envs if wrap is None else wrap(envs)  # which has all of their attributes
    except BaseException:
        envs.close()
        raise


def play(
    policy: Policy,
    starts: Sequence[Start],
    *,
    num_envs: int = 8,
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Episode]:
    """Play each start once, suite by suite, in environments that are made and closed here.

    Args:
        policy: Who acts.
        starts: They are begun in this order.
        num_envs: Environments at once.
        facts: Filled with what the images depend on, ``gl_renderer`` and ``visual_profile``, before
            the first episode of each suite.
        **settings: Further arguments of :func:`make_envs`.

    Yields:
        Episodes in the order in which they end.
    """
    for suite in dict.fromkeys(start.suite for start in starts):
        mine = [start for start in starts if start.suite == suite]
        tasks = {start.task_id for start in mine}
        envs = make_envs(suite, tasks, policy, num_envs=min(num_envs, len(mine)), **settings)
        try:
            if facts is not None:  # before anything is played: rows of results name them
                _reset(envs, [0], {0: mine[0]})
                envs.recv(1)
                facts |= envs.call_some([0], "render_facts")[0]
            yield from rollout(envs, policy, mine)
        finally:
            envs.close()


def rollout(
    envs: LiberoVectorEnv, policy: Policy, starts: Sequence[Start] | NextStart
) -> Iterator[Episode]:
    """Play episodes: whichever environment is free takes the next start.

    While one half of the environments simulates, the other half is in the policy. An episode
    depends on its start and the policy alone, not on the environments' number or speed. One whose
    worker died is played again from the start, so a crash changes nothing but the time. (The
    vector environment gives up on a worker that fails again and again.)

    Args:
        envs: Of one suite, in autoreset mode DISABLED, see :func:`make_envs`. They stay open.
        policy: Who acts.
        starts: Each is played once. Or a function that gives the next one; after a None it is
            asked again when an episode has ended, and has been taken by the caller.

    Yields:
        Episodes in the order in which they end.

    Raises:
        ConfigError: If the environments reset by themselves.
        WorkerError: If a worker fails for good.
    """
    if envs.autoreset_mode != gym.vector.AutoresetMode.DISABLED:
        raise ConfigError(
            f"rollout needs environments with autoreset_mode='DISABLED', got "
            f"{envs.autoreset_mode.name}: make them with vla_gym.rollout.make_envs."
        )
    next_start = starts if callable(starts) else functools.partial(next, iter(starts), None)
    plays: dict[int, Start] = {}  # what each busy environment plays
    replays: dict[int, int] = {}
    while True:
        begun = []
        for i in range(envs.num_envs):
            if i not in plays and (start := next_start()) is not None:
                plays[i], replays[i] = start, 0
                begun.append(i)
        _reset(envs, begun, plays)
        if not plays:
            return
        obs, _, terminated, truncated, infos = envs.recv((len(plays) + 1) // 2)
        env_ids = infos["env_id"].tolist()
        lost = infos.get("worker_restarted", np.zeros(len(env_ids), bool))
        again, act, done = [], [], []
        for row, i in enumerate(env_ids):
            if lost[row]:
                replays[i] += 1
                again.append(i)
            elif terminated[row] or truncated[row]:
                flags = bool(terminated[row]), bool(truncated[row])
                done.append(_episode(plays.pop(i), *flags, _row(infos, row), replays[i]))
            else:
                act.append(row)
        _reset(envs, again, plays)
        if act:
            acting = [env_ids[row] for row in act]
            told = [
                _info(i, plays[i], _row(infos, row)) for i, row in zip(acting, act, strict=True)
            ]
            chunks = policy.act({key: value[act] for key, value in obs.items()}, told)
            envs.send(chunks, acting)
        yield from done


def _row(infos: dict[str, Any], row: int) -> dict[str, Any]:
    return {key: value[row] for key, value in infos.items() if not isinstance(value, dict)}


def _info(env_id: int, start: Start, info: dict[str, Any]) -> Info:
    return Info(
        env_id=env_id,
        suite=start.suite,
        task_id=start.task_id,
        init_state_id=start.init_state_id,
        seed=start.seed,
        instruction=str(info.get("instruction", "")),
        elapsed_steps=int(info["elapsed_steps"]),
    )


def _episode(
    start: Start, terminated: bool, truncated: bool, info: dict[str, Any], replays: int
) -> Episode:
    played = int(info["task_id"]), int(info["init_state_id"])
    assert played == start[1:3], f"an environment played {played}, not {start}"
    achieved = step = None
    if info.get("achieved", -1) >= 0:
        achieved, step = int(info["achieved"]), int(info["achieved_step"])
    return Episode(
        start,
        success=bool(info["success"]),
        terminated=terminated,
        truncated=truncated,
        length=int(info["elapsed_steps"]),
        achieved=achieved,
        achieved_step=step,
        replays=replays,
    )


def _reset(envs: LiberoVectorEnv, env_ids: list[int], plays: dict[int, Start]) -> None:
    for i in env_ids:
        start = plays[i]
        options = {"task_id": start.task_id}
        if start.init_state_id >= 0:
            options["init_state_id"] = start.init_state_id
        seeds: list[int | None] = [None] * envs.num_envs
        seeds[i] = start.seed
        envs.reset_send([i], seed=seeds, options=options)
