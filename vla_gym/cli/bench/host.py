"""Script of a child process: holds one system and does what the benchmark asks of it.

It also runs in the environments of peers, where there is no vla_gym: there this folder is imported
under a name of its own, and its modules that peers need import each other relatively.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ALIAS = "vla_gym_bench"


def _import_here(name: str) -> Any:
    """Import a module of this folder without the packages above it."""
    if ALIAS not in sys.modules:
        folder = Path(__file__).resolve().parent
        spec = importlib.util.spec_from_file_location(
            ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[ALIAS] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{ALIAS}.{name}")


def serve(connection: Connection, is_peer: bool) -> None:
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
            elif is_peer:
                system = _import_here("peers").make(*arguments)
            else:
                from vla_gym.cli.bench.systems import System

                system = System(*arguments)
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
    serve(Connection(handle), sys.argv[2] == "peer")
elif __name__ == "__mp_main__":  # a process that a peer has spawned: what it unpickles is here
    _import_here("peers").prepare_worker()
