"""The process under measurement: ``python -m vla_gym.cli.bench.host FD_IN FD_OUT``.

Builds one system, then runs its driver's methods as asked over pipes, and ends with its input.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_gym.cli.bench.drivers import Driver


def main(fd_in: int, fd_out: int) -> None:
    """Serve until the input ends, then close the system."""
    commands = Connection(fd_in, writable=False)
    answers = Connection(fd_out, readable=False)
    driver: Driver | None = None
    try:
        while True:
            name, args = commands.recv()
            try:
                result: Any = None
                if name == "build":
                    from vla_gym.cli.bench.drivers import make_driver

                    driver = make_driver(args[0])
                else:
                    result = getattr(driver, name)(*args)
            except Exception as error:
                answers.send(_as_answer(error))
            else:
                answers.send(("result", result))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        if driver is not None:
            with contextlib.suppress(Exception):
                driver.close()


def _as_answer(error: Exception) -> tuple[str, str]:
    from vla_gym.errors import VlaGymError

    if isinstance(error, VlaGymError):
        return ("mistake", str(error))
    return ("exception", traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
