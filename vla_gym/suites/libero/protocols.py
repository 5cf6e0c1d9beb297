"""How the field evaluates policies on LIBERO: what each known evaluation fixes.

Read from openvla/openvla and moojink/openvla-oft (``run_libero_eval.py``),
Physical-Intelligence/openpi (``examples/libero/main.py``) and LIBERO itself (``lifelong/metric.py``
with its default configuration). All play each official state once, in their order, and count an
episode as won if its goal is true after any control step; the no-ops before an episode do not
count. Images are turned by the policy, which also resizes them in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_gym.suites.libero.spec import ACTION, SETTLE_STEPS

ProtocolName = Literal["openvla", "openpi", "libero"]


@dataclass(frozen=True)
class EvalProtocol:
    """What an evaluation fixes; None: nothing.

    Attributes:
        episodes: Official states of each task, from 0.
        settle_steps: No-ops before an episode; None: the suite's.
        settle_gripper: Their gripper command: -1 opens, 0 leaves the fingers as they are; None: the
            suite's.
        max_control_steps: Limit of an episode; None: the suite's (spatial 220, object 280, goal
            300, 10: 520, 90: 400), which stems from OpenVLA's evaluation.
        image_size: Pixels of a render's side.
        chunk_len: Control steps that are executed before the policy is asked again; None: all that
            it proposes.
        vla_options: Options that a VLA with such options must have: its preprocessing.
    """

    episodes: int | None = None
    settle_steps: int | None = None
    settle_gripper: float | None = None
    max_control_steps: int | None = None
    image_size: int | None = None
    chunk_len: int | None = None
    vla_options: Mapping[str, Any] = field(default_factory=dict)

    def env_kwargs(self) -> dict[str, Any]:
        """Return the arguments of environments, but for the image size."""
        return {
            "settle_steps": self.settle_steps,
            "settle_gripper": self.settle_gripper,
            "max_control_steps": self.max_control_steps,
            "observation_timing": "libero",
        }


#: By name; None: no protocol.
PROTOCOLS: dict[ProtocolName | None, EvalProtocol] = {
    None: EvalProtocol(),
    "openvla": EvalProtocol(
        50,
        SETTLE_STEPS,
        ACTION.noop[6],
        image_size=256,
        vla_options={"jpeg": True, "crop": True},
    ),
    "openpi": EvalProtocol(50, SETTLE_STEPS, ACTION.noop[6], image_size=256, chunk_len=5),
    "libero": EvalProtocol(
        20,
        settle_steps=5,
        settle_gripper=0.0,
        max_control_steps=600,
        image_size=128,
        chunk_len=1,
    ),
}
