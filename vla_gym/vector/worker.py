"""A worker: builds its environments and runs them on command.

The same :class:`Worker` runs in a worker process and, with ``workers=0``, in the trainer's. In a
process it is told what to do over one socket, by pickled tuples: ``"attach"``, ``"run"``,
``"call"`` or ``"quit"`` and arguments; an :class:`Event` comes back, as a tuple too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from vla_gym.errors import ConfigError, VlaGymError, WorkerError
from vla_gym.vector.env_row import EnvRow, Extras
from vla_gym.vector.shared_memory import map_arrays


class Event(NamedTuple):
    """Something that a worker did.

    ``kind`` is ``"ready"`` (the :class:`EnvSpaces` of its environments), ``"done"`` (ids, extras by
    environment id), ``"value"`` (results of a call), ``"raised"`` (an exception and the ids that
    it left undone; the worker goes on) or ``"failed"`` (a :class:`Failure`; a worker itself says
    its own error of this package or None, and the traceback). A remote part also says
    ``"restarted"``: the ids of environments whose worker there was restarted during their command,
    and as value those that lost a step by it; and ``"told"``: what to warn of.
    ``answers`` says how many answers an exception stands for.
    """

    kind: str
    worker: int
    ids: Sequence[int]
    value: Any
    answers: int = 1


class Failure(NamedTuple):
    """Why a worker is gone.

    Attributes:
        reason: What was seen, e.g. ``"was killed by signal SIGKILL"``.
        error: The package's own error, if that is what ended it.
        raised: Whether it was an exception.
        started: Whether its environments had been built.
        command: What it was told last.
    """

    reason: str
    error: VlaGymError | None
    raised: bool
    started: bool
    command: str


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to know; it is cloudpickled on its way.

    Attributes:
        worker: Index of the worker.
        env_ids: Its environments.
        make_env: Builds environment ``first + i`` of the vector environment that this is a part of.
        first: Number of environment 0 in that one.
        device: EGL device that it draws on; None: as MuJoCo chooses.
    """

    worker: int
    env_ids: tuple[int, ...]
    make_env: Callable[[int], gym.Env[Any, Any]]
    first: int = 0
    device: int | None = None


@dataclass(frozen=True)
class EnvSpaces:
    """What the environments of a worker look like."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None

    @classmethod
    def of(cls, env: gym.Env[Any, Any]) -> EnvSpaces:
        """Read them off an environment."""
        return cls(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)

    def check_same(self, index: int, first: EnvSpaces) -> None:
        """Check that environment ``index`` has the spaces of the first one.

        Raises:
            ConfigError: If not.
        """
        for name in ("observation_space", "action_space"):
            space, wanted = getattr(self, name), getattr(first, name)
            if space != wanted:
                raise ConfigError(
                    f"Environment {index} has {name} {space}, the first one {wanted}: all "
                    "environments of a vector environment need the same spaces."
                )


class Worker:
    """Some environments and their rows of the shared table."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Build the environments.

        Raises:
            ConfigError: If the spaces of two of them differ.
        """
        self.index, self._first = spec.worker, spec.first
        self._envs = {index: spec.make_env(spec.first + index) for index in spec.env_ids}
        found = EnvSpaces.of(self._envs[spec.env_ids[0]])
        for index, env in self._envs.items():
            EnvSpaces.of(env).check_same(index, found)
        self.ready = Event("ready", self.index, (), found)
        self._rows: dict[int, EnvRow] = {}

    def attach(self, columns: dict[str, np.ndarray], same_step: bool) -> None:
        """Take over the rows of the table."""
        self._progress = columns["progress"]
        self._rows = {
            i: EnvRow(env, i, columns, same_step, self._first) for i, env in self._envs.items()
        }

    def run(
        self, ids: Sequence[int], options: Mapping[int, dict[str, Any]], each: bool
    ) -> Iterator[Event]:
        """Run environments one after another and say when they are, or each of them is, done.

        Errors of this package become an event, others are raised.
        """
        extras: dict[int, Extras] = {}
        for done, i in enumerate(ids):
            try:
                found = self._rows[i].run(options.get(i))
            except VlaGymError as error:
                left = ids[done:] if each else ids
                yield Event("raised", self.index, left, error, len(left) if each else 1)
                return
            except Exception as error:
                error.add_note(f"It was raised by environment {self._first + i}.")
                raise
            self._progress[self.index] += 1
            if found:
                extras[i] = found
            if each:
                yield Event("done", self.index, [i], extras)
                extras = {}
        if not each:
            yield Event("done", self.index, ids, extras)

    def call(self, ids: Sequence[int], method: str, arguments: list[Any]) -> Event:
        """Call a method of rows; an exception becomes an event, too."""
        try:
            pairs = zip(ids, arguments, strict=True)
            results = [getattr(self._rows[i], method)(*a) for i, a in pairs]
            return Event("value", self.index, (), results)
        except Exception as error:
            return Event("raised", self.index, (), error)

    def close(self) -> None:
        """Close the environments."""
        envs, self._envs, self._rows = self._envs, {}, {}
        for env in envs.values():
            env.close()


def main(payload: bytes, fds: Sequence[int]) -> None:
    """Run a worker process until the trainer says so or is gone.

    Args:
        payload: A cloudpickled :class:`WorkerSpec`.
        fds: The socket to the trainer, and the memory of the shared table.
    """
    connection = Connection(fds[0])
    try:
        _serve(connection, Worker(pickle.loads(payload)), fds[1])
    except Exception as error:
        own = error if isinstance(error, VlaGymError) else None
        event = Event("failed", -1, (), (own, _format(error)))
        with contextlib.suppress(OSError):  # the trainer is gone; there is nobody to tell
            connection.send_bytes(cloudpickle.dumps(tuple(event)))


def _serve(connection: Connection, worker: Worker, memory_fd: int) -> None:
    """Answer commands until the last one, or until there is nobody to give any."""
    connection.send_bytes(_message(worker.ready))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        command, *arguments = pickle.loads(message)
        if command == "run":
            for event in worker.run(*arguments):
                connection.send_bytes(_message(event))
        elif command == "attach":
            layout, same_step = arguments
            worker.attach(map_arrays(layout, memory_fd), same_step)
            os.close(memory_fd)
        elif command == "call":
            connection.send_bytes(_message(worker.call(*arguments)))
        else:
            worker.close()
            return


def _message(event: Event) -> bytes:
    """Return an event as a message; what can't be pickled becomes an exception as text."""
    if event.kind != "raised":
        try:
            # Of a step, which is nearly always a few numbers: cloudpickle would take longer.
            dumps = pickle.dumps if event.kind == "done" else cloudpickle.dumps
            return dumps(tuple(event))
        except Exception as error:
            event = event._replace(kind="raised", value=error)
    return cloudpickle.dumps(tuple(event._replace(value=portable(event.value, "a worker process"))))


def packed(value: Any, what: str) -> bytes:
    """Return what another process unpacks.

    Raises:
        ConfigError: If it holds what cannot be packed; ``what`` names it.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # of any class's __reduce__
        raise ConfigError(
            f"{what} cannot be sent to another process: {error}. Give arguments, factories and "
            "wrappers that cloudpickle can pack."
        ) from error


def portable(error: Exception, where: str) -> Exception:
    """Return an exception that can be pickled, with a note of where it was raised."""
    text = _format(error)
    with contextlib.suppress(Exception):
        copy: Exception = pickle.loads(cloudpickle.dumps(error))
        copy.add_note(f"It was raised in {where}:\n{text}")
        return copy
    return WorkerError(text)


def _format(error: Exception) -> str:
    """Return the traceback from where it leaves this package's own loops."""
    frames = error.__traceback__
    folder = os.path.dirname(__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folder):
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames or error.__traceback__)))
