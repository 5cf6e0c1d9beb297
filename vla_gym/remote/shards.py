"""How parts of a vector environment are placed and reached; here in threads of this process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from vla_gym.remote.messages import Answer
from vla_gym.remote.part import Part


class Shard(Protocol):
    """Reaches one :class:`~vla_gym.remote.part.Part`, wherever it is.

    Attributes:
        place: Where, for messages.
    """

    place: str

    def submit(self, command: str, *arguments: Any) -> Future[Answer]:
        """Give a command, see ``Part.submit``; the future raises only if the part is lost."""

    def kill(self) -> None:
        """End the part at once, if that is possible."""


class Hosts(Protocol):
    """Machines that parts can be placed on."""

    def count(self, timeout: float) -> int:
        """Return how many there are, at least 1; wait so many seconds for the first one.

        Raises:
            ConfigError: If there is none.
        """

    def place(self, part: int) -> Shard:
        """Begin to place a part. A second call for the same one says that the first was lost."""

    def passes(self, part: int, error: BaseException, losses: int) -> bool:
        """Tell whether a part that was lost before it came up may come up if placed again.

        Args:
            part: Its number.
            error: That it was lost with.
            losses: How often it was lost before, since it was last up.
        """

    def close(self) -> None:
        """Let go of the machines."""


class ThreadHosts:
    """This process as several machines: the same paths without Ray, for tests and debuggers."""

    def __init__(self, count: int = 1) -> None:
        """Have ``count`` machines."""
        self._count = count

    def count(self, timeout: float) -> int:
        """See :class:`Hosts`."""
        del timeout
        return self._count

    def place(self, part: int) -> Shard:
        """See :class:`Hosts`."""
        del part
        return Part()

    def passes(self, part: int, error: BaseException, losses: int) -> bool:
        """See :class:`Hosts`: there is nowhere else to go."""
        del part, error, losses
        return False

    def close(self) -> None:
        """See :class:`Hosts`."""
