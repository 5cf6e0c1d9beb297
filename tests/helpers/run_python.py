"""This checkout: its files, and code that runs with it in a process of its own."""

from __future__ import annotations

import os
import shutil
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


def copy_checkout(to: Path) -> Path:
    """Copy the files that git tracks or would track into a new folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to
