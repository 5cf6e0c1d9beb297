"""Program of a child process: holds one system and does what the benchmark asks of it.

It also runs in the environments of peers, where there is no vla_gym: there this folder is a package
of another name, and its modules that peers need import each other relatively.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Answer (name, arguments) with (whether it went well, result or message) until the end."""
    system: Any = None
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        result = None
        try:
            if name != "build":
                result = getattr(system, name)(*arguments)
            elif __package__ == "vla_gym.cli.bench":
                from vla_gym.cli.bench.systems import System

                system = System(*arguments)
            else:
                from .peers import make

                system = make(*arguments)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if any(kind.__name__ == "VlaGymError" for kind in type(error).__mro__):
                message = str(error)
            elif name != "build":
                message = f"{name!r} failed: {message}"
            connection.send((False, message))
        else:
            connection.send((True, result))


if __name__ == "__main__":
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)
    serve(Connection(handle))
elif __name__ == "__mp_main__":  # a process that a peer has spawned: what it unpickles is here
    from .peers import prepare_worker

    prepare_worker()
