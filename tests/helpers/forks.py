"""Runs a function in a fork of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vla_gym.errors import WorkerError


def in_fork(function: Callable[[], Any]) -> str:
    """Return what a fork of this process raises, as text; "" for nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            text = ""
        except WorkerError as error:
            text = str(error)
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text
