"""Messages between the trainer and the process server: objects and descriptors over one socket.

A message is one packet of one byte; its content, a pickle, travels as a memory file beside the
other descriptors. So a message is never cut in two, whatever its size, and sending one does not
wait for the other side to read.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Descriptors that fit into one message (Linux allows 253).
MAX_FDS = 250


@dataclass(frozen=True)
class Context:
    """Surroundings of the trainer that the server and its workers take over.

    Attributes:
        environ: All environment variables.
        folder: The working directory; None if it is gone.
        sys_path: ``sys.path``.
        argv: ``sys.argv``.
    """

    environ: Mapping[str, str]
    folder: str | None
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What the trainer asks for.

    Attributes:
        number: Repeated in the reply.
        operation: ``"preload"``, ``"spawn"``, ``"exit_code"``; without a reply ``"discard"`` (a
            worker that nobody wants) and ``"end"``.
        arguments: Its arguments.
        context: For the first two.
    """

    number: int
    operation: str
    arguments: tuple[Any, ...] = ()
    context: Context | None = None


@dataclass(frozen=True)
class Reply:
    """What the server answers.

    Attributes:
        number: Of the request.
        value: The result.
        error: A pickled exception instead.
        forked: Whether ``value`` is a worker that runs since then.
    """

    number: int
    value: Any = None
    error: bytes | None = None
    forked: bool = False


def new_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection; neither is inherited by a program that is started."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: Request | Reply, fds: Sequence[int] = ()) -> None:
    """Send a message.

    Raises:
        OSError: If the other side is gone (BrokenPipeError, ConnectionResetError).
        TimeoutError: If the other side leaves so many messages unread that the link is full.
    """
    memory = os.memfd_create("vla_gym-message", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            pickle.dump(message, file, pickle.HIGHEST_PROTOCOL)
        socket.send_fds(link, [b"m"], [memory, *fds])
    finally:
        os.close(memory)


def receive(link: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for a message; return it and its descriptors, or None when the other side is gone.

    Raises:
        OSError: If this process may not open that many descriptors.
    """
    fds = array.array("i")
    space = socket.CMSG_SPACE((MAX_FDS + 1) * fds.itemsize)
    try:
        # Not socket.recv_fds: it ignores the flag, and a program that is started would inherit.
        data, ancillary, flags, _ = link.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    for _, _, content in ancillary:
        fds.frombytes(content)
    if not data:
        return None
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with open(fds[0], "rb") as file:
        file.seek(0)
        return pickle.load(file), list(fds[1:])


def kill_group(pid: int) -> None:
    """SIGKILL a worker, stopped or not, and the processes that it has started in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
