"""Start and end of the process server, seen from the trainer."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vla_gym.errors import WorkerError
from vla_gym.vector import server_link
from vla_gym.vector.server_link import Context, Request

#: How long a server that is told to end, or that has closed its link, may take to be gone.
EXIT_S = 10.0
#: The server's own libraries must not start threads: forks would lack them.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def trainer_context(environ: Mapping[str, str]) -> Context:
    """Return this process's surroundings, with some environment variables changed."""
    try:
        folder: str | None = os.getcwd()
    except OSError:
        folder = None
    variables = {**os.environ, **environ}
    return Context(variables, folder, tuple(map(str, sys.path)), tuple(map(str, sys.argv)))


def start(remote: socket.socket) -> subprocess.Popen[bytes]:
    """Start the server with its end of the link.

    Raises:
        WorkerError: If the interpreter cannot be started.
    """
    # Whatever made our own imports work, a bare checkout or a changed sys.path, works there, too;
    # -P, because the working directory shall come first only if it does so here.
    checkout = str(Path(__file__).resolve().parents[2])
    here = trainer_context({}).folder or os.sep
    paths = [os.path.join(here, path) for path in map(str, sys.path)]
    environ = {**os.environ, **ONE_THREAD}
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, checkout]))
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "vla_gym.vector.server",
                str(remote.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            env=environ,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # a Ctrl-C is for the trainer alone
        )
    except OSError as error:
        raise WorkerError(
            f"The process server cannot be started with {sys.executable!r}: {error}."
        ) from error


def end(owner: int, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a server and wait for it; its workers are gone then."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        link.settimeout(0)
        server_link.send(link, Request(0, "end"))
    link.close()
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
