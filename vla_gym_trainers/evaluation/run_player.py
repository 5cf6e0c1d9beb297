"""Where the policies of a training run are played: validation, guard, final evaluation, films."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.rollout import Episode, Start, rollout
from vla_gym.rollout.film import record_video
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.evaluation.summary import compare, summarize
from vla_gym_trainers.world_model.protocol import WorldModel

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vector import LiberoVectorEnv
    from vla_gym.vla import FrozenVLA


class RunPlayer:
    """Plays policies over the RL token in environments that stay open.

    Attributes:
        envs: The environments, in autoreset mode DISABLED.
    """

    def __init__(
        self,
        envs: LiberoVectorEnv,
        chunk_len: int,
        vla: FrozenVLA | None = None,
        rl_token: RLTokenEncoder | None = None,
        world_model: WorldModel | None = None,
        **settings: Any,
    ) -> None:
        """Put it together; see :func:`vla_gym.rollout.make_envs` and :class:`.ActorPolicy`.

        The settings are those of environments that films are made in (assets, physics).
        """
        self.envs, self._settings, self._world_model = envs, settings, world_model
        self._parts = self._trained = vla, rl_token, chunk_len

    def use(self, vla: FrozenVLA, rl_token: RLTokenEncoder | None) -> None:
        """Play policies, from now on, on what these make of the frames; the VLA itself stays."""
        self._trained = vla, rl_token, self._parts[2]

    def policy(self, model: Any, name: str = "policy") -> ActorPolicy:
        """Return the policy of a model that can play here, None for the VLA itself."""
        parts = self._parts if model is None else self._trained
        return ActorPolicy(model, *parts, name=name, world_model=self._world_model)

    def play(self, model: Any, starts: Sequence[Start]) -> list[Episode]:
        """Return the episodes of a policy, None for the VLA itself, in the order of the starts."""
        return sorted(rollout(self.envs, self.policy(model), starts), key=lambda e: e.start)

    def evaluate(self, model: Any, starts: Sequence[Start]) -> dict[str, Any]:
        """Play the VLA and a policy; return the evaluation in a run's card.

        Returns:
            ``start`` of the VLA and ``policy``, see :func:`~.summary.summarize`; the second with
            ``paired``, the comparison.
        """
        start, policy = self.play(None, starts), self.play(model, starts)
        name = getattr(self._parts[0], "name", "VLA")
        head = getattr(self._parts[0], "head", "l1")
        vla = {"kind": "vla", "vla": {"name": name}, "head": head}
        paired = {"policy": vla, **compare(policy, start)}
        return {"start": summarize(start), "policy": {**summarize(policy), "paired": paired}}

    def film(self, model: Any, starts: Sequence[Start], path: Path, label: str) -> list[Episode]:
        """Play a policy, None for the VLA, once more and write a video with a tile an episode."""
        return record_video(path, self.policy(model, label), starts, **self._settings)

    def facts(self) -> dict[str, Any]:
        """Return the chunk's length and what the images depend on; toys have no such facts."""
        vla, _, chunk_len = self._parts
        if vla is None:
            return {"chunk_len": chunk_len, "gl_renderer": None, "visual_profile": None}
        self.envs.reset(seed=0)
        return {"chunk_len": chunk_len, **self.envs.call_some([0], "render_facts")[0]}

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()
