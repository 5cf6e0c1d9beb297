"""A frozen VLA that is elsewhere, as environments take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.errors import WorkerError
from vla_gym.vla.base import FrozenVLA, VLAOutput
from vla_gym.vla.preprocess import area_downsample

if TYPE_CHECKING:
    from vla_gym.remote.inference import Inferred


def vla_facts(vla: FrozenVLA) -> dict[str, Any]:
    """Return the attributes of a VLA that :class:`RemoteVLA` has as well."""
    facts = {name: getattr(vla, name) for name in FrozenVLA.__annotations__}
    return {**facts, "shipped_as": getattr(vla, "shipped_as", None)}


class RemoteVLA(FrozenVLA):
    """A frozen VLA that is elsewhere.

    Renders are shrunk to the VLA's ``input_size`` before they travel, where it has one.

    Attributes:
        version: Of the weights that the last rows were made with.
    """

    name: str
    horizon: int
    num_hidden_tokens: int
    hidden_size: int
    image_size: int
    shipped_as: str | None

    def __init__(
        self,
        facts: Mapping[str, Any],
        ask: Callable[[dict[str, np.ndarray], list[str], np.ndarray], Future[Inferred]],
        *,
        timeout: float = 60.0,
    ) -> None:
        """Take over what is known of the VLA.

        Args:
            facts: From :func:`vla_facts`.
            ask: ``InferenceServer.infer``, or what reaches it.
            timeout: Seconds for an answer.
        """
        for name, value in facts.items():
            setattr(self, name, value)
        self._ask, self._timeout, self.version = ask, timeout, 0

    def infer(
        self, images: Mapping[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one action chunk per row, see ``FrozenVLA.infer``.

        Raises:
            WorkerError: If there is no answer in time, or who should answer is lost.
        """
        import torch

        small, side = {view: np.asarray(images[view]) for view in self.cameras}, self.input_size
        if side is not None:
            small = {view: area_downsample(pictures, side) for view, pictures in small.items()}
        try:
            found = self._ask(small, instructions, proprio).result(self._timeout)
        except TimeoutError as error:
            raise WorkerError(
                f"The inference server of the VLA {self.name!r} did not answer within "
                f"{self._timeout:g} s."
            ) from error
        self.version = found.version
        # Copies: arrays that have travelled may be read-only.
        return VLAOutput(
            torch.from_numpy(np.array(found.hidden)), torch.from_numpy(np.array(found.actions))
        )
