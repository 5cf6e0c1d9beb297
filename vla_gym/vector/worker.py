"""A worker process: builds its environments and runs them on command.

Messages over its one socket, from the trainer, first byte:
    ``A``: once, first: pickled layout of the shared table, and whether autoreset is SAME_STEP;
    ``R``: run; flag byte (1: answer after each environment), then environment ids as int32, then
    optionally the pickled reset options by environment id;
    ``C``: a pickled call (environment ids, method of ``EnvRow``, list of arguments);
    ``Q``: close the environments and leave.
From the worker:
    ``K``: the environments are built; their pickled spaces;
    ``D``: done; environment ids as int32, then optionally pickled extras by environment id;
    ``V``: the pickled results of a call; ``X``: a pickled exception of a call or of ``R`` with the
    environments that it left undone, after which the worker goes on; ``F``: an unexpected
    exception as text, after which it leaves.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from vla_gym.errors import ConfigError, VlaGymError, WorkerError
from vla_gym.vector.env_row import EnvRow
from vla_gym.vector.shared_memory import SharedArrays

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


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to know; it is cloudpickled on its way.

    Attributes:
        worker: Index of the worker.
        env_ids: Rows of its environments.
        make_env: Builds environment ``i``.
    """

    worker: int
    env_ids: tuple[int, ...]
    make_env: Callable[[int], gym.Env[Any, Any]]


@dataclass
class EnvSpaces:
    """What a vector environment must know of its environments before it builds them."""

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    render_mode: str | None = None

    @classmethod
    def of(cls, env: gym.Env[Any, Any]) -> EnvSpaces:
        """Read them off an environment."""
        return cls(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)


def main(payload: bytes, fds: Sequence[int]) -> None:
    """Run a worker until the trainer says so or is gone.

    Args:
        payload: A cloudpickled :class:`WorkerSpec`.
        fds: The socket to the trainer, and the memory of the shared table.
    """
    connection = Connection(fds[0])
    try:
        try:
            spec: WorkerSpec = pickle.loads(payload)
            envs, found = build_envs(spec)
        except Exception as error:
            connection.send_bytes(_failure(error))
            return
        connection.send_bytes(pack_object(READY, found))
        message = connection.recv_bytes()
        if message[:1] != ATTACH:
            return
        layout, same_step = unpack_object(message)
        memory = SharedArrays(layout, fds[1])
        os.close(fds[1])
        rows = {i: EnvRow(env, i, memory.arrays, same_step) for i, env in envs.items()}
        _serve(connection, spec, memory, rows)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone; there is nobody to tell


def build_envs(spec: WorkerSpec) -> tuple[dict[int, gym.Env[Any, Any]], EnvSpaces]:
    """Build the environments of a worker, and say what spaces they have.

    Raises:
        ConfigError: If the spaces of two of them differ.
    """
    envs = {index: spec.make_env(index) for index in spec.env_ids}
    found = EnvSpaces.of(envs[spec.env_ids[0]])
    for index, env in envs.items():
        check_spaces(index, EnvSpaces.of(env), found)
    return envs, found


def check_spaces(index: int, found: EnvSpaces, first: EnvSpaces) -> None:
    """Check that an environment has the same spaces as the first one.

    Raises:
        ConfigError: If not.
    """
    for name in ("observation_space", "action_space"):
        space, wanted = getattr(found, name), getattr(first, name)
        if space != wanted:
            raise ConfigError(
                f"Environment {index} has {name} {space}, the first one {wanted}: all "
                "environments of a vector environment need the same spaces."
            )


def _serve(
    connection: Connection, spec: WorkerSpec, memory: SharedArrays, rows: dict[int, EnvRow]
) -> None:
    """Answer commands until QUIT."""
    while True:
        message = connection.recv_bytes()
        code = message[:1]
        if code == RUN:
            try:
                _run(connection, spec.worker, memory, rows, message)
            except Exception as error:
                connection.send_bytes(_failure(error))
                return
        elif code == CALL:
            ids, method, arguments = unpack_object(message)
            try:
                results = [
                    getattr(rows[i], method)(*a) for i, a in zip(ids, arguments, strict=True)
                ]
                answer = pack_object(VALUE, results)
            except Exception as error:
                answer = _raised(error, np.array(ids, np.int32), answers=1)
            connection.send_bytes(answer)
        else:
            for row in rows.values():
                row.env.close()
            return


def _run(
    connection: Connection,
    worker: int,
    memory: SharedArrays,
    rows: dict[int, EnvRow],
    message: bytes,
) -> None:
    """Run environments one after another and say when they are done."""
    began = time.perf_counter()
    each, ids, options = unpack(message)
    extras: dict[int, Extras] = {}
    for done, i in enumerate(ids.tolist()):
        try:
            found = run_row(rows[i], (options or {}).get(i))
        except VlaGymError as error:
            left = ids[done:] if each else ids
            connection.send_bytes(_raised(error, left, answers=len(left) if each else 1))
            return
        except Exception as error:
            error.add_note(f"It was raised by environment {i}.")
            raise
        memory["progress"][worker] += 1
        if each:
            answer = pack(DONE, np.array([i]), {i: found} if found else None)
            connection.send_bytes(answer)
        elif found:
            extras[i] = found
    memory["busy_s"][worker] = time.perf_counter() - began
    if not each:
        connection.send_bytes(pack(DONE, ids, extras))


def run_row(row: EnvRow, options: dict[str, Any] | None) -> Extras:
    """Run one environment and return what does not fit into its row."""
    row.run(options)
    return Extras(*row.extras, row.text)


def _failure(error: Exception) -> bytes:
    """Return the message of an exception after which the worker leaves."""
    text = _format(error)
    if isinstance(error, VlaGymError):
        return FAILED + pickle.dumps((error, text))
    return FAILED + pickle.dumps((None, text))


def _raised(error: Exception, ids: np.ndarray, *, answers: int) -> bytes:
    """Return the message of an exception that the caller shall see.

    Args:
        error: The exception; one that can't be pickled travels as text.
        ids: Environments whose command came to nothing.
        answers: How many answers this one stands for.
    """
    text = _format(error)
    error.add_note(f"It was raised in a worker process:\n{text}")
    try:
        message = pack_object(RAISED, (error, ids, answers))
        unpack_object(message)
    except Exception:
        message = pack_object(RAISED, (WorkerError(text), ids, answers))
    return message


def _format(error: Exception) -> str:
    """Return the traceback from where it leaves this package's own loops."""
    frames = error.__traceback__
    folder = os.path.dirname(__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folder):
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames or error.__traceback__)))
