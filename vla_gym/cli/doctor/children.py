"""Runs the doctor's probes in processes of their own, with a deadline.

A broken driver or library may abort or hang the process that asks it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Answer:
    """What a probe said.

    Attributes:
        data: The JSON object that it printed last; None if it failed.
        trouble: Why there is none, in one line.
    """

    data: dict[str, Any] | None
    trouble: str = ""


def ask(
    arguments: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> Answer:
    """Run ``python ARGUMENTS`` and return the JSON object on its last line of output.

    Args:
        arguments: After the interpreter's name.
        timeout: Deadline in seconds; then the whole process group is killed.
        environment: Variables to add to this process's own.
    """
    path = [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=variables | dict(environment or {}),
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {timeout:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        with contextlib.suppress(ValueError):
            return Answer(json.loads(lines[-1]))
    last = [line for line in error.strip().splitlines() if line.strip()][-1:]
    how = f"exit code {process.returncode}"
    if process.returncode < 0:
        how = f"killed by {signal.Signals(-process.returncode).name}"
    return Answer(None, last[0].strip()[:300] if last else how)
