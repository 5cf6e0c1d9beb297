"""Output into a pipe that nobody reads any more, as of ``vla-gym tasks | head``."""

from __future__ import annotations

import io
import sys
from typing import Any


class _PatientFile(io.FileIO):
    """A file descriptor to write to; what nobody reads is dropped."""

    def write(self, data: object, /) -> int:
        """Write bytes; return how many."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Let the command do its work and end with its own status if its output is not read to the end.

    Streams that are not the process's own (captured ones) stay as they are.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _patient(sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _patient(sys.stderr)


def _patient(stream: Any) -> Any:
    if stream is None or stream.isatty():  # None: a process without one
        return stream
    stream.flush()
    raw = _PatientFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or getattr(stream, "write_through", False),
    )
