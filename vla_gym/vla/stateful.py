"""VLAs that remember an episode: the protocol, and what keeps their states by environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.vla.base import FrozenVLA, VLAOutput

if TYPE_CHECKING:
    import torch

#: Named tensors; row i of each belongs to row i of the batch.
VLAState = dict[str, "torch.Tensor"]


@runtime_checkable
class StatefulVLA(FrozenVLA, Protocol):
    """A VLA with a recurrent state, which is carried through an episode.

    The state begins anew at the first frame of every episode and goes on with each ``env.step``,
    whose frame the VLA sees once. Callers carry it: the object itself keeps none, so it may play
    many episodes at once. Row i of what is returned, state included, depends on row i alone.
    """

    def initial_state(self, n: int) -> VLAState:
        """Return the state of n episodes that have not begun.

        Returns:
            Named tensors with n equal rows each, of any shape and dtype; these never change.
        """

    def infer_with_state(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        state: VLAState,
    ) -> tuple[VLAOutput, VLAState]:
        """Predict one action chunk per row, and the state after these observations.

        ``state``, B rows, is the one before them; it is not changed. All else is as for ``infer``.
        """

    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one action chunk per row as if each were the first of its episode."""
        state = self.initial_state(len(instructions))
        return self.infer_with_state(images, instructions, proprio, state)[0]


def require_stateful(vla: Any, what: str) -> StatefulVLA:
    """Return a VLA after a check that it is stateful.

    Args:
        vla: The model.
        what: What needs its state, the beginning of the message.

    Raises:
        ConfigError: If it lacks a part of :class:`StatefulVLA`.
    """
    if isinstance(vla, StatefulVLA):
        return vla
    names = ("initial_state", "infer_with_state", "infer", *FrozenVLA.__annotations__)
    lacking = [name for name in names if not hasattr(vla, name)]
    raise ConfigError(
        f"{what} needs a stateful VLA, and {getattr(vla, 'name', vla)!r} lacks "
        f"{', '.join(lacking)} of vla_gym.vla.StatefulVLA: take another one, or derive its class "
        "from StatefulVLA; see docs/vla.md."
    )


def is_stateful(vla: Any) -> bool:
    """Tell whether a VLA has a state.

    Raises:
        ConfigError: If it has only a part of :class:`StatefulVLA`: it would be played without.
    """
    if not hasattr(vla, "infer_with_state"):
        return False
    require_stateful(vla, "Playing with infer_with_state")
    return True


class VLAMemory:
    """A frozen VLA and, if it is stateful, its state in the episode of every environment.

    Whoever runs a VLA in episodes asks for it by :meth:`at`, stateful or not. States stay on the
    VLA's device.

    Attributes:
        vla: The model.
        is_stateful: Whether it has a state; if not, nothing is kept.
    """

    def __init__(self, vla: FrozenVLA) -> None:
        """Remember nothing yet.

        Raises:
            ConfigError: If the VLA has only a part of the protocol, or its states are no tensors
                with a row for each episode.
        """
        self.vla, self.is_stateful = vla, is_stateful(vla)
        self._initial: VLAState = {}  # of one environment, as all below without the axis of rows
        self._states: dict[int, VLAState] = {}
        if self.is_stateful:
            two = cast(StatefulVLA, vla).initial_state(2)
            shapes = {name: tuple(getattr(rows, "shape", ())) for name, rows in two.items()}
            if not shapes or any(shape[:1] != (2,) for shape in shapes.values()):
                raise ConfigError(
                    f"initial_state(2) of the VLA {vla.name!r} must return named tensors with 2 "
                    f"rows each, got {shapes}."
                )
            self._initial = {name: rows[0].detach().clone() for name, rows in two.items()}

    def at(
        self,
        env_ids: Sequence[int] | np.ndarray,
        begins: Sequence[bool] | np.ndarray = (),
        ended: Sequence[int] | np.ndarray = (),
    ) -> FrozenVLA:
        """Return the VLA for one look at observations of certain environments.

        Its ``infer`` goes on from their states, and they have the new ones afterwards.

        Args:
            env_ids: Environment of each row. Rows of the same environment must be equal.
            begins: Whether a row is the first of its episode; empty: no row is.
            ended: Environments of further rows, the last observations of episodes that have ended:
                they are seen with the state of those, which nobody needs afterwards.

        Raises:
            ConfigError: If the VLA has not seen the beginning of an environment's episode.
        """
        if not self.is_stateful:
            return self.vla
        before = [self._state(int(i)) for i in ended]
        ids = [int(i) for i in env_ids]
        for i, is_first in zip(ids, begins, strict=False):
            if is_first:
                self._states[i] = self._initial
        rows = [self._state(i) for i in ids] + before
        return cast(FrozenVLA, _InEpisodes(self, ids, rows))

    def _state(self, env_id: int) -> VLAState:
        if env_id not in self._states:
            raise ConfigError(
                f"The VLA {self.vla.name!r} has a state, and has not seen the episode of "
                f"environment {env_id} from its beginning: reset the environment, or say that its "
                "row begins an episode."
            )
        return self._states[env_id]

    def save(self, env_id: int) -> dict[str, np.ndarray]:
        """Return the state of an environment as arrays without an axis of rows.

        bfloat16, which NumPy lacks, comes as float32. Before an episode: the initial state.
        """
        state = self._states.get(env_id, self._initial)
        return {name: _as_array(row) for name, row in state.items()}

    def check(self, saved: Mapping[str, np.ndarray]) -> None:
        """Check that a state of :meth:`save` is one of this VLA.

        Raises:
            ConfigError: If names or shapes differ, or this VLA has no state.
        """
        mine = {name: tuple(row.shape) for name, row in self._initial.items()}
        theirs = {name: np.shape(array) for name, array in saved.items()}
        if mine != theirs:
            raise ConfigError(
                f"The saved state belongs to another VLA: expected {mine} of {self.vla.name!r}, "
                f"got {theirs}."
            )

    def load(self, env_id: int, saved: Mapping[str, np.ndarray]) -> None:
        """Give an environment a state that :meth:`check` has seen."""
        import torch

        self._states[env_id] = {
            name: torch.tensor(saved[name], dtype=row.dtype, device=row.device)
            for name, row in self._initial.items()
        }


class _InEpisodes:
    """A stateful VLA whose ``infer`` goes on from the states of episodes; all else is the VLA's."""

    def __init__(self, memory: VLAMemory, env_ids: list[int], rows: list[VLAState]) -> None:
        self._vla = cast(StatefulVLA, memory.vla)
        self._states, self._env_ids, self._rows = memory._states, env_ids, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vla, name)

    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        import torch

        before = {key: torch.stack([row[key] for row in self._rows]) for key in self._rows[0]}
        output, after = self._vla.infer_with_state(images, instructions, proprio, before)
        if _like(after) != _like(before):
            raise ConfigError(
                f"infer_with_state of the VLA {self._vla.name!r} must return a state like the one "
                f"that it was given: expected {_like(before)}, got {_like(after)}."
            )
        for row, env_id in enumerate(self._env_ids):
            # Copies: a view would keep the batch alive, and a compiled network writes into the
            # same tensors at its next call.
            self._states[env_id] = {key: rows[row].detach().clone() for key, rows in after.items()}
        return output


def _like(state: VLAState) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(rows.shape), rows.dtype) for name, rows in state.items()}


def _as_array(row: torch.Tensor) -> np.ndarray:
    import torch

    row = row.detach().cpu()
    return np.array((row.float() if row.dtype == torch.bfloat16 else row).numpy())
