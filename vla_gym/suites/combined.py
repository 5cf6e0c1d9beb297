"""Several suites that are played together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.suites.protocol import CompiledTask, Simulation, Suite, Task


class CombinedSuite(Suite):
    """The tasks of several suites, numbered one suite after the other.

    Of ``"goal+spatial"``, tasks 0 to 9 are those of goal and 10 to 19 those of spatial: a task's
    number in a combined suite says which suite it is of. The tasks themselves keep suite and id.

    Attributes:
        name: The names, joined by ``+``.
        parts: The suites.
        num_init_states: The number that all tasks have, the smallest of the parts'.
        cameras, action, proprio, control_hz: What the parts have in common.
    """

    def __init__(self, parts: Sequence[Suite]) -> None:
        """Check that the suites agree in spaces.

        Raises:
            ConfigError: If one is named twice, or two differ in cameras, actions or
                proprioception.
        """
        self.name = "+".join(part.name for part in parts)
        self.parts = tuple(parts)
        if len({part.name for part in parts}) < len(parts):
            raise ConfigError(f"Each suite may be named once, got {self.name!r:.80}.")
        for part in parts[1:]:
            for what in ("cameras", "action", "proprio", "control_hz"):
                ours, theirs = getattr(parts[0], what), getattr(part, what)
                if ours != theirs:
                    raise ConfigError(
                        f"Suites {parts[0].name!r} and {part.name!r} cannot be played together: "
                        f"they differ in {what}, {ours} and {theirs}. Make one environment each."
                    )
        self.num_init_states = min(part.num_init_states for part in parts)
        self.cameras, self.control_hz = parts[0].cameras, parts[0].control_hz
        self.action, self.proprio = parts[0].action, parts[0].proprio
        self.can_settle = all(part.can_settle for part in parts)
        self.has_progress = all(part.has_progress for part in parts)
        self._tasks = tuple(task for part in parts for task in part.tasks)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of all parts."""
        return self._tasks

    def load_task_model(
        self, task: Any, assets: str | Path | None = None, *, clutter: bool = False
    ) -> CompiledTask:
        """Load a task of any part; see ``Suite.load_task_model``."""
        return self._part(task).load_task_model(task, assets, clutter=clutter)

    def check_assets(self, task: Any, assets: str | Path | None = None) -> None:
        """Check the assets of a task of any part; see ``Suite.check_assets``."""
        self._part(task).check_assets(task, assets)

    def make_simulation(self, task_model: Any, *args: Any, **kwargs: Any) -> Simulation:
        """Simulate a task of any part; see ``Suite.make_simulation``."""
        return self._part(task_model.task).make_simulation(task_model, *args, **kwargs)

    def _part(self, task: Task) -> Suite:
        return next(part for part in self.parts if part.name == task.suite)
