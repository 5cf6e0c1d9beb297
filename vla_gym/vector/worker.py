"""A worker process: builds its environments and runs them on command."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.errors import ConfigError, VlaGymError, WorkerError
from vla_gym.vector import protocol
from vla_gym.vector.shared_memory import SharedArrays
from vla_gym.vector.slot import Slot


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
        connection.send_bytes(protocol.pack_object(protocol.READY, found))
        message = connection.recv_bytes()
        if message[:1] != protocol.ATTACH:
            return
        layout, same_step = protocol.unpack_object(message)
        memory = SharedArrays(layout, fds[1])
        os.close(fds[1])
        slots = {i: Slot(env, i, memory.arrays, same_step) for i, env in envs.items()}
        _serve(connection, spec, memory, slots)
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
    connection: Connection, spec: WorkerSpec, memory: SharedArrays, slots: dict[int, Slot]
) -> None:
    """Answer commands until QUIT."""
    while True:
        message = connection.recv_bytes()
        code = message[:1]
        if code == protocol.RUN:
            try:
                _run(connection, spec.worker, memory, slots, message)
            except Exception as error:
                connection.send_bytes(_failure(error))
                return
        elif code == protocol.CALL:
            ids, method, arguments = protocol.unpack_object(message)
            try:
                results = [
                    getattr(slots[i], method)(*a) for i, a in zip(ids, arguments, strict=True)
                ]
                answer = protocol.pack_object(protocol.VALUE, results)
            except Exception as error:
                answer = _raised(error, np.array(ids, np.int32), answers=1)
            connection.send_bytes(answer)
        else:
            for slot in slots.values():
                slot.env.close()
            return


def _run(
    connection: Connection,
    worker: int,
    memory: SharedArrays,
    slots: dict[int, Slot],
    message: bytes,
) -> None:
    """Run environments one after another and say when they are done."""
    began = time.perf_counter()
    each, ids, options = protocol.unpack(message)
    extras: dict[int, protocol.Extras] = {}
    for done, i in enumerate(ids.tolist()):
        try:
            found = run_slot(slots[i], (options or {}).get(i))
        except VlaGymError as error:
            left = ids[done:] if each else ids
            connection.send_bytes(_raised(error, left, answers=len(left) if each else 1))
            return
        except Exception as error:
            error.add_note(f"It was raised by environment {i}.")
            raise
        memory["progress"][worker] += 1
        if each:
            answer = protocol.pack(protocol.DONE, np.array([i]), {i: found} if found else None)
            connection.send_bytes(answer)
        elif found:
            extras[i] = found
    memory["busy_s"][worker] = time.perf_counter() - began
    if not each:
        connection.send_bytes(protocol.pack(protocol.DONE, ids, extras))


def run_slot(slot: Slot, options: dict[str, Any] | None) -> protocol.Extras:
    """Run one environment and return what does not fit into its row."""
    slot.run(options)
    return protocol.Extras(*slot.extras, slot.text)


def _failure(error: Exception) -> bytes:
    """Return the message of an exception after which the worker leaves."""
    text = _format(error)
    if isinstance(error, VlaGymError):
        return protocol.FAILED + pickle.dumps((error, text))
    return protocol.FAILED + pickle.dumps((None, text))


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
        message = protocol.pack_object(protocol.RAISED, (error, ids, answers))
        protocol.unpack_object(message)
    except Exception:
        message = protocol.pack_object(protocol.RAISED, (WorkerError(text), ids, answers))
    return message


def _format(error: Exception) -> str:
    """Return the traceback from where it leaves this package's own loops."""
    frames = error.__traceback__
    folder = os.path.dirname(__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folder):
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames or error.__traceback__)))
