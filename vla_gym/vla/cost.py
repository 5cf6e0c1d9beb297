"""What a VLA's chunk costs in arithmetic and memory traffic, and the roofline that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from vla_gym.vla.base import FrozenVLA


@dataclass(frozen=True)
class Cost:
    """Cost of one batched forward pass.

    Attributes:
        flops: Floating-point operations for one row, by part of the network; a multiply and an
            add are two. Norms, activations and softmax are left out.
        weight_bytes: Bytes of weights that a pass reads, whatever the number of rows; a weight
            that is read once per decoded token counts as often. Activations are left out.
        counted: ``"config"`` if it follows from the configuration, ``"run"`` if a forward pass was
            watched.
    """

    flops: Mapping[str, float]
    weight_bytes: float
    counted: str = "config"

    @property
    def total_flops(self) -> float:
        """Operations for one row."""
        return sum(self.flops.values())

    def roofline(self, batch: int, peak_flops: float, bandwidth: float) -> float:
        """Return the most chunks a second that a device could reach.

        Arithmetic and memory traffic are taken to overlap fully, so no program can be faster.

        Args:
            batch: Rows in a forward pass.
            peak_flops: Operations a second for dense matrix products in the weights' dtype.
            bandwidth: Bytes a second.

        Raises:
            ConfigError: If a number is not positive.
        """
        if min(batch, peak_flops, bandwidth) <= 0:
            raise ConfigError(
                "The roofline needs a positive batch, peak_flops and bandwidth, got "
                f"{batch}, {peak_flops} and {bandwidth}."
            )
        seconds = max(batch * self.total_flops / peak_flops, self.weight_bytes / bandwidth)
        return batch / seconds


@runtime_checkable
class CountsCost(Protocol):
    """A backend that counts its cost itself; others are watched, see :func:`watched_cost`."""

    def cost(self, instruction: str) -> Cost:
        """Return the cost of a forward pass with that instruction, from the configuration."""
        ...


def watched_cost(
    vla: FrozenVLA, images: dict[str, np.ndarray], instruction: str, proprio: np.ndarray
) -> Cost:
    """Count a backend's cost by watching the matrix products of one row's forward pass.

    Args:
        vla: With its network in ``.model``, if weights are to be counted.
        images: As in ``infer``, one row.
        instruction: Of that row.
        proprio: (1, 8).

    Returns:
        With the flops in one part, and every parameter's bytes counted once.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # As plain matrix products: the CPU's fused attention would be counted as nothing.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        vla.infer(images, [instruction], proprio)
    network: Any = getattr(vla, "model", None)
    parameters = network.parameters() if network is not None else ()
    size = sum(p.numel() * p.element_size() for p in parameters)
    return Cost({"all": float(counter.get_total_flops())}, float(size), "run")
