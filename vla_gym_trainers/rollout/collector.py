"""Collects chunks from groups of environments that take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_gym_trainers.rollout.chunks import ChunkStep, Group, Observation, own


@dataclass
class Transition:
    """One chunk of all N environments, in their order; names are those of SB3's callbacks.

    Attributes:
        obs: Observations that were acted on.
        actions: (N, C, 7) chunks.
        new_obs: To act on next: of the next episode where one has ended.
        next_obs: After the chunk, of the same episode.
        rewards: (N,) float32.
        dones: (N,) bool.
        infos: N dicts; see :class:`ChunkStep`.
    """

    obs: Observation
    actions: np.ndarray
    new_obs: Observation
    next_obs: Observation
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]


#: Returns chunks (n, C, 7) for: observations of n environments, which ones these are, chunks that
#: each environment has begun in this call.
Act = Callable[[Observation, np.ndarray, int], np.ndarray]


class Collector:
    """Plays groups of environments by turns: while one simulates, the VLA works for another.

    The groups are fixed and take turns in a fixed order, so nothing depends on timing.

    Attributes:
        obs: What is acted on next, of all environments.
    """

    def __init__(self, groups: Sequence[Group], obs: Observation) -> None:
        """Begin at observations.

        Args:
            groups: See :meth:`ChunkEnvs.groups`.
            obs: Of all N environments, which have been reset.
        """
        self.groups, self.obs = groups, own(obs)
        self.num_envs = sum(len(group.env_ids) for group in groups)

    def collect(
        self, act: Act, num_steps: int, on_step: Callable[[np.ndarray, ChunkStep], None]
    ) -> list[Transition]:
        """Play ``num_steps`` chunks in each environment.

        Args:
            act: The policy; called once a chunk and group.
            num_steps: Chunks.
            on_step: Called with the environments of a group and what their chunk led to.
        """
        n = self.num_envs
        out: list[Transition] = []
        taken = [0] * len(self.groups)
        for number in range(len(self.groups)):
            self._send(number, act, 0, out)
        turns = deque(range(len(self.groups)))
        while turns:
            number = turns.popleft()
            step = self.groups[number].recv()
            if step is not None:
                ids = self.groups[number].env_ids
                transition = out[taken[number]]
                for mine, its in (
                    (self.obs, step.obs),
                    (transition.new_obs, step.obs),
                    (transition.next_obs, step.next_obs),
                ):
                    for key, value in its.items():
                        mine[key][ids] = value
                transition.rewards[ids], transition.dones[ids] = step.rewards, step.dones
                for i, info in zip(ids.tolist(), step.infos, strict=True):
                    transition.infos[i] = info
                on_step(ids, step)
                taken[number] += 1
                if taken[number] == num_steps:
                    continue
                self._send(number, act, taken[number], out)
            turns.append(number)
        assert all(len(transition.infos) == n for transition in out)
        return out

    def _send(self, number: int, act: Act, step: int, out: list[Transition]) -> None:
        group = self.groups[number]
        ids = group.env_ids
        obs = {key: value[ids] for key, value in self.obs.items()}
        actions = act(obs, ids, step)
        if step == len(out):
            n = self.num_envs
            empty = [{k: np.empty_like(v) for k, v in self.obs.items()} for _ in range(3)]
            chunks = np.empty((n, *actions.shape[1:]), actions.dtype)
            rewards, dones = np.empty(n, np.float32), np.empty(n, bool)
            infos: list[dict[str, Any]] = [{} for _ in range(n)]
            out.append(Transition(empty[0], chunks, empty[1], empty[2], rewards, dones, infos))
        for key, value in obs.items():
            out[step].obs[key][ids] = value
        out[step].actions[ids] = actions
        group.send(actions)
