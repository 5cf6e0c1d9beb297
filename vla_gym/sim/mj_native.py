"""MuJoCo's C functions as numba externals, so that compiled callers are cached on disk.

numba refuses to cache a function that holds a ctypes pointer: the pointer is only valid in one
process. A symbol that is resolved by name when the cached code is loaded has no such problem, so
the MuJoCo library is made visible to LLVM once (before any compiled code is loaded) and each
function is declared with :class:`numba.types.ExternalFunction`.

Model and data are passed as integers: ``MjModel._address`` and ``MjData._address``; arrays as
``array.ctypes.data``. The functions release no lock themselves; callers are ``nogil``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import mujoco
from numba import types

from vla_gym.errors import VlaGymError


def _load_mujoco_library() -> None:
    """Make the symbols of the MuJoCo library that the Python package uses visible to LLVM.

    It is the one of that version: LLVM must call into the library that made the model.

    Raises:
        VlaGymError: If the library is not where the mujoco wheel puts it.
    """
    library = Path(mujoco.__file__).with_name(f"libmujoco.so.{mujoco.mj_versionString()}")
    if not library.is_file():
        raise VlaGymError(
            f"MuJoCo's library was not found: expected {library}. "
            "Reinstall it with: pip install --force-reinstall 'mujoco>=3.3,<3.4'"
        )
    llvm.load_library_permanently(str(library))


_load_mujoco_library()

_ADDRESS = types.intp
_MODEL_DATA = types.void(_ADDRESS, _ADDRESS)

# void mj_step1(const mjModel* m, mjData* d): position and velocity stages.
mj_step1: Callable[..., None] = types.ExternalFunction("mj_step1", _MODEL_DATA)
# void mj_step2(const mjModel* m, mjData* d): actuation, acceleration, integration.
mj_step2: Callable[..., None] = types.ExternalFunction("mj_step2", _MODEL_DATA)
# void mj_jacSite(m, d, mjtNum* jacp (3, nv), mjtNum* jacr (3, nv), int site)
mj_jacSite: Callable[..., None] = types.ExternalFunction(
    "mj_jacSite", types.void(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, types.int32)
)
