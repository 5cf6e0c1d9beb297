"""Code in a process of its own, which has imported nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    code: str, *, fails: bool = False, cwd: Path | None = None, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run code with this checkout; unless it is to fail, that is an error.

    Args:
        code: What is run.
        fails: Whether it is to end with another status than 0.
        cwd: Where.
        **environment: Variables, None for those that are taken away.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done
