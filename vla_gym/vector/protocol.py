"""Messages between the trainer and a worker, over one socket.

From the trainer, first byte:
    ``A``: once, first: pickled layout of the shared table, and whether autoreset is SAME_STEP;
    ``R``: run; flag byte (1: answer after each environment), then environment ids as int32, then
    optionally the pickled reset options by environment id;
    ``C``: a pickled call (environment ids, method of the slot, list of arguments);
    ``Q``: close the environments and leave.
From the worker:
    ``K``: the environments are built; their pickled spaces;
    ``D``: done; environment ids as int32, then optionally pickled extras by environment id;
    ``V``: the pickled results of a call; ``X``: a pickled exception of a call or of ``R`` with the
    environments that it left undone, after which the worker goes on; ``F``: an unexpected
    exception as text, after which it leaves.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

ATTACH, RUN, CALL, QUIT = b"A", b"R", b"C", b"Q"
READY, DONE, VALUE, RAISED, FAILED = b"K", b"D", b"V", b"X", b"F"

_HEAD = struct.Struct("<cBH")  # code, flag, number of ids


class Extras(NamedTuple):
    """What does not fit into the table's columns.

    Attributes:
        infos, final_infos: Infos that are no plain numbers.
        text: The new instruction, or None if it did not change.
    """

    infos: dict[str, Any]
    final_infos: dict[str, Any]
    text: str | None

    def __bool__(self) -> bool:
        """Tell whether there is anything to send."""
        return bool(self.infos or self.final_infos or self.text is not None)


def pack(code: bytes, ids: np.ndarray, payload: Any = None, *, flag: bool = False) -> bytes:
    """Return a message with environment ids and, unless it is empty, a pickled payload."""
    body = np.asarray(ids, "<i4").tobytes()
    tail = pickle.dumps(payload, pickle.HIGHEST_PROTOCOL) if payload else b""
    return _HEAD.pack(code, flag, len(ids)) + body + tail


def unpack(message: bytes) -> tuple[bool, np.ndarray, Any]:
    """Return the flag, the environment ids and the payload (None if there was none)."""
    _, flag, count = _HEAD.unpack_from(message)
    end = _HEAD.size + 4 * count
    ids = np.frombuffer(message, "<i4", count, _HEAD.size)
    return bool(flag), ids, pickle.loads(message[end:]) if len(message) > end else None


def pack_object(code: bytes, value: Any) -> bytes:
    """Return a message that holds one object."""
    return code + cloudpickle.dumps(value)


def unpack_object(message: bytes) -> Any:
    """Return the object of a message."""
    return pickle.loads(message[1:])
