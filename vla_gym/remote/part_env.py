"""The vector environment of a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from vla_gym.vector import LiberoVectorEnv
from vla_gym.vector.shared_memory import OF_WORKERS

VectorWrapper = Callable[[VectorEnv[Any, Any, Any]], VectorEnv[Any, Any, Any]]


class PartEnv(LiberoVectorEnv):
    """The vector environment of a part, whose environments another table drives."""

    @property
    def first(self) -> int:
        """Number of environment 0 among those of all parts."""
        return self._table.first

    def begin(
        self,
        ids: np.ndarray,
        ops: np.ndarray,
        rows: Mapping[str, np.ndarray],
        options: Mapping[int, dict[str, Any]],
        *,
        each: bool,
    ) -> None:
        """Begin what another table asks of idle environments, ascending; see ``EnvTable.take``.

        ``recv`` returns what comes of it; with ``each`` they may be received one by one.
        """
        self._assert_open()
        self._table.take(ids, ops, rows)
        self.seeded = True
        self._runner.launch(ids, ops, options, each=each)

    def tell_restarts(self, tell: Callable[[str], None]) -> None:
        """Have restarts of workers told to a function; without it they are warnings."""
        self._runner.tell = tell

    def num_done(self) -> int:
        """Return how many environments are done and not received."""
        return len(self._table.finished)

    def written(self, ids: np.ndarray) -> tuple[dict[str, np.ndarray], list[str | None]]:
        """Return what workers wrote: columns but observations, and instructions that are new."""
        columns, extras = self._table.columns, self._table.extras
        rows = {name: columns[name][ids] for name in columns if name.startswith(OF_WORKERS)}
        return rows, [extras[i].text if i in extras else None for i in ids.tolist()]

    def call_rows(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> list[Any]:
        """Call a method of ``EnvRow`` with arguments by environment."""
        self._idle(method, list(calls))
        return self._runner.call(calls, method)


def build(
    make: Callable[[], PartEnv], wrappers: Sequence[VectorWrapper], files: Sequence[tuple[str, str]]
) -> tuple[PartEnv, Any]:
    """Return the vector environment of a part, and the same with its wrappers, in their order.

    ``files``: of a suite of BDDL files, name and content of each.
    """
    if files:
        from vla_gym.suites.libero.own import BddlSuite

        BddlSuite(files).keep()
    base = make()
    envs: Any = base
    try:
        for wrapper in wrappers:
            envs = wrapper(envs)
    except BaseException:
        base.close()
        raise
    return base, envs
