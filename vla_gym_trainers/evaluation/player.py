"""Plays the episodes of an evaluation over the vector environment."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.evaluation.episodes import Episode, Start
from vla_gym_trainers.evaluation.policies import Info, Policy
from vla_gym_trainers.evaluation.worker_env import SCENES, EvalEnv

Hook = Callable[[LiberoEnv, dict[str, Any], bool], None]


@dataclass
class Player:
    """How episodes are played.

    Attributes:
        policy: Who acts.
        assets: Asset pack.
        physics: Physics mode.
        num_envs: Environments at once.
        workers: Worker processes; None: one a core; 0: none.
        watch_goals: Record which task's goal was the first to become true.
        env_kwargs: Further arguments of the vector environment.
        facts: Filled while playing: what the images depend on, and ``worker_restarts``: episodes
            that were played again because their worker died.
    """

    policy: Policy
    assets: str = "lite"
    physics: Literal["fast", "exact"] = "fast"
    num_envs: int = 8
    workers: int | None = None
    watch_goals: bool = False
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=lambda: {"worker_restarts": 0})

    def play(self, starts: Sequence[Start], on_step: Hook | None = None) -> Iterator[Episode]:
        """Play each start once.

        Args:
            starts: They are begun in this order.
            on_step: See :class:`EvalEnv`; needs ``workers=0``.

        Yields:
            Episodes in the order in which they end.
        """
        for suite in dict.fromkeys(start.suite for start in starts):
            mine = [start for start in starts if start.suite == suite]
            envs = self._make(suite, mine, on_step)
            try:
                yield from _Session(envs, self.policy, mine, self.facts).episodes()
            finally:
                envs.close()

    def _make(self, suite: str, starts: Sequence[Start], on_step: Hook | None) -> LiberoVectorEnv:
        wrapper = functools.partial(
            EvalEnv,
            chunk_len=self.policy.chunk_len,
            cameras=self.policy.cameras,
            image_size=self.policy.image_size,
            expert=self.policy.expert,
            watch_goals=self.watch_goals,
            on_step=on_step,
        )
        num_envs = min(self.num_envs, len(starts))
        kwargs: dict[str, Any] = {
            "workers": self.workers if self.workers is None else min(self.workers, num_envs),
            "task_ids": sorted({start.task_id for start in starts}),
            "autoreset_mode": "DISABLED",
            "assets": self.assets,
            "physics": self.physics,
            "cameras": (),
            "init_states": "official",
            "scene_cache_size": SCENES,
            "env_wrappers": [wrapper],
        }
        return LiberoVectorEnv(num_envs, suite, **{**kwargs, **self.env_kwargs})


class _Session:
    """Plays starts of one suite: whichever environment is free takes the next one.

    An environment whose worker died plays its episode again from the start, so a crash changes
    nothing but the time. (The vector environment gives up on a worker that fails again and again.)
    """

    def __init__(
        self,
        envs: LiberoVectorEnv,
        policy: Policy,
        starts: Sequence[Start],
        facts: dict[str, Any],
    ) -> None:
        self._envs, self._policy, self._facts = envs, policy, facts
        self._left = deque(starts)
        self._plays: dict[int, Start] = {}  # what each busy environment plays

    def episodes(self) -> Iterator[Episode]:
        """Yield episodes as they end."""
        envs = self._envs
        self._reset([i for i in range(envs.num_envs) if self._take(i)])
        while self._plays:
            # Half of them: while these are in the policy, the others simulate.
            obs, _, terminated, truncated, infos = envs.recv((len(self._plays) + 1) // 2)
            env_ids = infos["env_id"].tolist()
            restarted = infos.get("worker_restarted", np.zeros(len(env_ids), bool))
            ended = (terminated | truncated) & ~restarted
            again, act, done = [], [], []
            for row, i in enumerate(env_ids):
                if restarted[row]:
                    self._facts["worker_restarts"] += 1
                    again.append(i)
                elif ended[row]:
                    done.append(self._episode(i, row, terminated, truncated, infos))
                    if self._take(i):
                        again.append(i)
                else:
                    act.append(row)
            self._reset(again)
            self._act([env_ids[row] for row in act], obs, infos, act)
            self._look()
            yield from done

    def _take(self, i: int) -> bool:
        """Give environment i its next start; False if none is left."""
        self._plays.pop(i, None)
        if self._left:
            self._plays[i] = self._left.popleft()
        return i in self._plays

    def _reset(self, env_ids: list[int]) -> None:
        if not env_ids:
            return
        options = {name: np.full(self._envs.num_envs, -1) for name in ("task_id", "init_state_id")}
        for i in env_ids:
            options["task_id"][i] = self._plays[i].task_id
            options["init_state_id"][i] = self._plays[i].init_state_id
        # An official state depends on no seed; a fixed one keeps it that way for all else.
        self._envs.reset_send(env_ids, seed=0, options=options)

    def _act(
        self, env_ids: list[int], obs: dict[str, np.ndarray], infos: dict[str, Any], rows: list[int]
    ) -> None:
        if not env_ids:
            return
        known = [
            Info(
                suite=self._plays[i].suite,
                task_id=self._plays[i].task_id,
                init_state_id=self._plays[i].init_state_id,
                instruction=str(infos["instruction"][row]),
                elapsed_steps=int(infos["elapsed_steps"][row]),
            )
            for i, row in zip(env_ids, rows, strict=True)
        ]
        observed = {key: value[rows] for key, value in obs.items()}
        self._envs.send(self._policy.act(observed, known), env_ids)

    def _look(self) -> None:
        """Ask once what the images depend on, at a moment when nothing is under way."""
        if "gl_renderer" in self._facts:
            return
        free = [i for i in range(self._envs.num_envs) if i not in self._plays]
        if free and not self._plays:
            self._facts |= self._envs.call_some(free[:1], "facts")[0]

    def _episode(
        self,
        i: int,
        row: int,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> Episode:
        start = self._plays[i]
        played = int(infos["task_id"][row]), int(infos["init_state_id"][row])
        assert played == start[1:], f"environment {i} played {played}, not {start}"
        achieved = step = None
        if "achieved" in infos and infos["achieved"][row] >= 0:
            achieved, step = int(infos["achieved"][row]), int(infos["achieved_step"][row])
        return Episode(
            *start,
            success=bool(infos["success"][row]),
            terminated=bool(terminated[row]),
            truncated=bool(truncated[row]),
            length=int(infos["elapsed_steps"][row]),
            achieved=achieved,
            achieved_step=step,
        )
