"""Where the time of a run goes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the seconds of named parts; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what happens in the context, an exception included."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        with self._lock:
            self._seconds[part] += seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds of every part since the last call, and begin anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)
