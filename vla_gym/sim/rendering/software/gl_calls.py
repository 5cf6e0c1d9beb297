"""OpenGL functions that compiled code can call.

numba refuses to cache a function that holds an address, and OpenGL's addresses are known only in a
process that draws. So each function here takes a table of addresses as its first argument, made by
:func:`load_table` at run time, and a tuple with OpenGL's own arguments:
``gl.translatef(table, (x, y, z))``. A pointer is an integer, an enumeration an int.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from vla_gym.errors import RenderError

_INT, _FLOAT, _POINTER = types.int32, types.float32, types.intp
_names: list[str] = []


def _entry(name: str, *parameters: Any) -> Callable[..., None]:
    """Declare an OpenGL function that returns nothing; its place in the table is its order here."""
    index = len(_names)
    _names.append(name)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        table, packed = arguments
        slots = builder.inttoptr(table, word.as_pointer())
        address = builder.load(builder.gep(slots, [ir.Constant(word, index)]))
        values = [
            context.cast(builder, builder.extract_value(packed, k), signature.args[1][k], kind)
            for k, kind in enumerate(parameters)
        ]
        kinds = [context.get_value_type(kind) for kind in parameters]
        function = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        builder.call(builder.inttoptr(address, function), values)
        return context.get_dummy_value()

    @intrinsic
    def call(_context: Any, _table: Any, arguments: Any) -> Any:
        return types.void(types.intp, arguments), codegen

    return call


active_texture = _entry("glActiveTexture", _INT)
bind_texture = _entry("glBindTexture", _INT, _INT)
blend_func = _entry("glBlendFunc", _INT, _INT)
call_list = _entry("glCallList", _INT)
clear = _entry("glClear", _INT)
clip_plane = _entry("glClipPlane", _INT, _POINTER)
color4f = _entry("glColor4f", _FLOAT, _FLOAT, _FLOAT, _FLOAT)
color_mask = _entry("glColorMask", _INT, _INT, _INT, _INT)
cull_face = _entry("glCullFace", _INT)
depth_mask = _entry("glDepthMask", _INT)
disable = _entry("glDisable", _INT)
disable_client_state = _entry("glDisableClientState", _INT)
draw_elements = _entry("glDrawElements", _INT, _INT, _INT, _POINTER)
enable = _entry("glEnable", _INT)
enable_client_state = _entry("glEnableClientState", _INT)
front_face = _entry("glFrontFace", _INT)
lightfv = _entry("glLightfv", _INT, _INT, _POINTER)
materialf = _entry("glMaterialf", _INT, _INT, _FLOAT)
materialfv = _entry("glMaterialfv", _INT, _INT, _POINTER)
mult_matrixf = _entry("glMultMatrixf", _POINTER)
pop_matrix = _entry("glPopMatrix")
push_matrix = _entry("glPushMatrix")
scalef = _entry("glScalef", _FLOAT, _FLOAT, _FLOAT)
scissor = _entry("glScissor", _INT, _INT, _INT, _INT)
stencil_func = _entry("glStencilFunc", _INT, _INT, _INT)
stencil_op = _entry("glStencilOp", _INT, _INT, _INT)
tex_genfv = _entry("glTexGenfv", _INT, _INT, _POINTER)
translatef = _entry("glTranslatef", _FLOAT, _FLOAT, _FLOAT)

# OpenGL's enumerations.
ALWAYS, EQUAL, KEEP, REPLACE = 0x0207, 0x0202, 0x1E00, 0x1E01
BACK, FRONT, FRONT_AND_BACK = 0x0405, 0x0404, 0x0408
BLEND, ONE, SRC_ALPHA, ONE_MINUS_SRC_ALPHA = 0x0BE2, 1, 0x0302, 0x0303
CLIP_PLANE0, COLOR_MATERIAL, DEPTH_TEST, LIGHTING, LIGHT0 = 0x3000, 0x0B57, 0x0B71, 0x0B50, 0x4000
CCW, CW = 0x0901, 0x0900
EMISSION, SHININESS, SPECULAR, POSITION, SPOT_DIRECTION = 0x1600, 0x1601, 0x1202, 0x1203, 0x1204
SCISSOR_TEST, STENCIL_TEST, STENCIL_BUFFER_BIT = 0x0C11, 0x0B90, 0x0400
TEXTURE0, TEXTURE_2D, TEXTURE_CUBE_MAP = 0x84C0, 0x0DE1, 0x8513
TEXTURE_GEN_S, OBJECT_PLANE, TEXTURE_COORD_S = 0x0C60, 0x2501, 0x2000
TEXTURE_COORD_ARRAY, TRIANGLES, UNSIGNED_INT = 0x8078, 4, 0x1405


def load_table() -> np.ndarray:
    """Return the addresses of the functions above, int64, in this process.

    Raises:
        RenderError: If the OpenGL library lacks one.
    """
    find = ctypes.CDLL("libEGL.so.1").eglGetProcAddress
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    addresses = [find(name.encode()) for name in _names]
    missing = [name for name, address in zip(_names, addresses, strict=True) if not address]
    if missing:
        raise RenderError(f"The OpenGL library lacks {', '.join(missing)}.")
    return np.array(addresses, np.int64)
