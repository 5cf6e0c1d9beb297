"""Runs hostile cases, each in a process of its own with a deadline and a limit of memory.

A case is a function that is given an empty folder. What comes of it is its verdict:

- ``clear``: a documented error of one line, or a command that ends with status 2 and says why;
- ``accepted``: it returned, and what it checked about the result held;
- ``nonsense``: it returned although it must not, or what came of it is none (:class:`Nonsense`);
- ``raw``: any other error, a command with a traceback or another status, a process that died;
- ``late``: no verdict after :data:`DEADLINE_S` seconds of processor time, or :data:`HANG_S` of the
  clock, which others that use the machine make run faster.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil

from vla_gym.errors import VlaGymError

DEADLINE_S, HANG_S = 10.0, 90.0
#: Of resident memory, and of addresses: MuJoCo asks for far more than it touches.
MEMORY_BYTES, ADDRESS_BYTES = 4 * 2**30, 64 * 2**30
VERDICTS = ("clear", "accepted", "nonsense", "raw", "late")
#: Longest message of an error: a screen.
_MAX_MESSAGE = 3000


class Nonsense(Exception):
    """What was accepted does not behave properly."""


class Refused(Exception):
    """A command ended with status 2; the text is what it wrote to stderr."""


@dataclass(frozen=True)
class Case:
    """One attempt.

    Attributes:
        group: Its row of the table.
        name: What was tried.
        run: Called with an empty folder.
        wanted: ``clear`` or ``accepted``, where the other one is nonsense; empty: either.
    """

    group: str
    name: str
    run: Callable[[Path], Any]
    wanted: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of one case: verdict, message, seconds of processor time."""

    case: Case
    verdict: str
    message: str
    seconds: float


def command(main: Callable[[Sequence[str]], int], *arguments: str) -> None:
    """Run a command; return if it ends with status 0.

    Raises:
        Refused: If it ends with status 2.
        RuntimeError: If it ends with another status.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status: Any = main(list(arguments))
        except SystemExit as leave:  # the parser's own
            status = leave.code
    if status == 2:
        raise Refused(said.getvalue())
    if status:
        raise RuntimeError(f"status {status}: {said.getvalue()[-500:]}")


def run_cases(cases: Iterable[Case], processes: int = 2) -> Iterator[Outcome]:
    """Yield the outcome of each case, in the order in which they end."""
    running: dict[int, _Child] = {}
    waiting = iter(cases)
    try:
        while True:
            while len(running) < processes and (case := next(waiting, None)) is not None:
                child = _Child(case)
                running[child.pipe] = child
            if not running:
                return
            ready, _, _ = select.select(list(running), [], [], 0.2)
            for pipe, child in list(running.items()):
                if (pipe in ready and child.has_ended()) or child.is_late() or child.is_big():
                    del running[pipe]
                    yield child.outcome()
    finally:
        for child in running.values():
            child.outcome()


class _Child:
    """A process that runs one case and writes its verdict into a pipe."""

    def __init__(self, case: Case) -> None:
        self.case, self.begun, self.text = case, time.monotonic(), b""
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        sys.stdout.flush()
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _child(case, self.folder, end)
        os.close(end)

    def has_ended(self) -> bool:
        part = os.read(self.pipe, 65536)
        self.text += part
        return not part

    def is_late(self) -> bool:
        return time.monotonic() - self.begun > HANG_S

    def is_big(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss > MEMORY_BYTES
        return False

    def outcome(self) -> Outcome:
        hung = self.is_late()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started goes, too
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.pid, 0)
        seconds = used.ru_utime + used.ru_stime
        os.close(self.pipe)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.text:
            verdict, message = json.loads(self.text)
        elif hung or seconds >= DEADLINE_S:
            verdict, message = "late", f"no verdict after {seconds:.1f} s of processor time"
        else:
            verdict, message = "raw", f"the process ended with {os.waitstatus_to_exitcode(status)}"
        return Outcome(self.case, verdict, message, seconds)


def _child(case: Case, folder: Path, end: int) -> None:
    """Run the case and end this process."""
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(DEADLINE_S), int(DEADLINE_S)))
        limit = psutil.Process().memory_info().vms + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.chdir(folder)
        warnings.simplefilter("ignore")
        os.write(end, json.dumps(_verdict(case, folder)).encode())
    finally:
        os._exit(0)


def _verdict(case: Case, folder: Path) -> tuple[str, str]:
    verdict, message = _outcome(case, folder)
    if case.wanted and {verdict, case.wanted} == {"clear", "accepted"}:
        return "nonsense", f"expected {case.wanted}, got {verdict}: {message}"
    return verdict, message


def _outcome(case: Case, folder: Path) -> tuple[str, str]:
    try:
        case.run(folder)
    except Nonsense as error:
        return "nonsense", str(error)
    except (VlaGymError, gym.error.Error) as error:
        text = str(error)
        unclear = not text or len(text) > _MAX_MESSAGE or "Traceback" in text
        return ("raw" if unclear else "clear"), f"{type(error).__name__}: {text[:_MAX_MESSAGE]}"
    except Refused as error:
        text = str(error)
        own = text.startswith("error: ") and text.count("\n") == 1
        parser = "For full helptext" in text  # tyro's box
        clear = "Traceback" not in text and (own or parser) and len(text) <= _MAX_MESSAGE
        return ("clear" if clear else "raw"), text[:_MAX_MESSAGE]
    except BaseException:
        return "raw", traceback.format_exc()[-2000:]
    return "accepted", ""


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each group, and one of all of them."""
    groups = list(dict.fromkeys(outcome.case.group for outcome in outcomes))
    rows = []
    for name in (*groups, "all"):
        own = [o for o in outcomes if name in (o.case.group, "all")]
        counts = Counter(o.verdict for o in own)
        row = {"group": name, "tried": len(own), **{key: counts[key] for key in VERDICTS}}
        rows.append(row | {"slowest_s": round(max((o.seconds for o in own), default=0.0), 1)})
    return rows
