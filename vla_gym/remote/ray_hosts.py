"""Parts of a vector environment on the machines of a Ray cluster, each in an actor."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.remote.messages import Answer
from vla_gym.remote.part import Part
from vla_gym.remote.shards import Shard

PINNED = "2.60.0"
#: Custom resource of nodes that simulate: ``ray start --resources='{"sim": 1}'``.
RESOURCE = "sim"
_PROBE_S = 2.0  # for a connection to a machine to open
_DEATHS = 2  # of an actor's process that may be chance: a third is an error
_LOOK_S = 0.5  # between two looks whether a node has joined
# A cluster of this program alone listens on nothing else; Ray takes 127.0.0.1 for "this machine's
# address in the network".
_LOOPBACK = "127.0.0.2"
# Of a GPU: that many parts and other actors may share one; there is one part a node.
_GPU_SHARE = 0.01


class PartActor:
    """Runs a part in a process of its own; Ray takes calls of such actors in any order."""

    def __init__(self) -> None:
        """Start the part's thread."""
        self._part = Part()
        self._next = 0
        self._early: dict[int, tuple[tuple[Any, ...], asyncio.Future[Any]]] = {}

    async def submit(self, number: int, *command: Any) -> Answer:
        """Do ``Part.submit(*command)`` as the ``number``-th call, from 0."""
        answer = asyncio.get_running_loop().create_future()
        self._early[number] = command, answer
        while self._next in self._early:
            given, waiting = self._early.pop(self._next)
            if given[0] == "call":  # arrays that Ray hands over, such as states, cannot be written
                given = copy.deepcopy(given)
            waiting.set_result(self._part.submit(*given))
            self._next += 1
        return await asyncio.wrap_future(await answer)


class RayShard:
    """A part in an actor; see :class:`~vla_gym.remote.shards.Shard`."""

    def __init__(self, ray: Any, actor: Any, place: str) -> None:
        """Take over an actor, which may still have to start."""
        self.place, self._ray, self._actor = place, ray, actor
        self._number = 0

    def submit(self, command: str, *arguments: Any) -> Future[Answer]:
        """See :class:`~vla_gym.remote.shards.Shard`."""
        try:
            answer = self._actor.submit.remote(self._number, command, *arguments)
        except TypeError as error:
            raise ConfigError(
                f"A part of the vector environment cannot be told to {command}, since an argument "
                f"cannot be pickled: {str(error).splitlines()[0]}"
            ) from error
        self._number += 1  # the actor waits for a number that is left out
        return answer.future()

    def kill(self) -> None:
        """See :class:`~vla_gym.remote.shards.Shard`."""
        with contextlib.suppress(Exception):  # it may be gone, and Ray too
            self._ray.kill(self._actor, no_restart=True)


class RayHosts:
    """The nodes of a Ray cluster that have the resource ``sim``, or, if none has, CPUs.

    One part is placed on each. A part that was lost goes to the node with the fewest of ours,
    whatever it has room for, or waits for one to join.
    """

    def __init__(self, address: str = "ray", timeout: float = 60.0, *, gpu: bool = False) -> None:
        """Connect to a cluster; see :class:`~vla_gym.remote.vector_env.RemoteVectorEnv`.

        Args:
            address: ``"ray"`` or ``"ray://host:port"``.
            timeout: Seconds for the answer of a cluster whose address is known, at most 10.
            gpu: Whether parts need a GPU.

        Raises:
            ConfigError: If Ray is missing or no cluster answers.
        """
        self._ray = import_ray()
        self._gpu = gpu
        self._placed: dict[int, str | None] = {}
        _Session.enter(self._ray, address, timeout)

    def count(self, timeout: float) -> int:
        """See :class:`~vla_gym.remote.shards.Hosts`."""
        end = time.monotonic() + timeout
        while not (nodes := self._nodes()):
            if time.monotonic() >= end:
                needs = "a GPU" if self._gpu else f"the resource {RESOURCE!r} or a CPU"
                raise ConfigError(
                    f"No node of the Ray cluster has {needs}, and none has joined within "
                    f"{timeout:g} s: start one with 'ray start --address=...'."
                )
            time.sleep(_LOOK_S)
        return len(nodes)

    def _nodes(self) -> list[dict[str, Any]]:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        if self._gpu:
            alive = [node for node in alive if node["Resources"].get("GPU", 0) > 0]
        marked = [node for node in alive if node["Resources"].get(RESOURCE, 0) > 0]
        return marked or [node for node in alive if node["Resources"].get("CPU", 0) > 0]

    def place(self, part: int) -> Shard:
        """See :class:`~vla_gym.remote.shards.Hosts`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        lost = self._placed.pop(part, None)
        # A node that has just died is still listed for a while.
        nodes = [node for node in self._nodes() if node["NodeID"] != lost or _listens(node)]
        load = Counter(self._placed.values())
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 64}
        if self._gpu:
            options["num_gpus"] = _GPU_SHARE
        place = "a node that has not joined yet"
        chosen: str | None = None
        if nodes:
            node = min(nodes, key=lambda node: load[node["NodeID"]])
            chosen = str(node["NodeID"])
            place = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(chosen, soft=False)
        else:  # Ray waits for one; there is nothing else to wait for
            options["num_cpus"] = 0.001
        self._placed[part] = chosen
        actor = self._ray.remote(PartActor).options(**options).remote()
        return RayShard(self._ray, actor, place)

    def passes(self, part: int, error: BaseException, losses: int) -> bool:
        """See :class:`~vla_gym.remote.shards.Hosts`: the node is gone, or its process has died."""
        from ray import exceptions

        if isinstance(error, exceptions.ActorUnschedulableError):
            return True
        if isinstance(error, exceptions.ActorDiedError) and losses < _DEATHS:
            return True
        on = self._placed.get(part)
        node = next((node for node in self._ray.nodes() if node["NodeID"] == on), None)
        return node is None or not node["Alive"] or not _listens(node)

    def close(self) -> None:
        """See :class:`~vla_gym.remote.shards.Hosts`."""
        _Session.leave(self._ray)


class _Session:
    """Our connection to Ray, which all users in this process share; not one of the caller's own."""

    _lock = threading.Lock()
    _users = 0
    _ours = False
    _address = "ray"

    @classmethod
    def enter(cls, ray: Any, address: str, timeout: float) -> None:
        with cls._lock:
            if not ray.is_initialized():
                _connect(ray, address, timeout)
                cls._ours, cls._address = True, address
            elif address != "ray" and not cls._is_there(address):
                raise ConfigError(
                    f"This program is connected to a Ray cluster already, and hosts={address!r} "
                    "asks for another: close what uses it first, or give hosts='ray'."
                )
            cls._users += 1

    @classmethod
    def _is_there(cls, address: str) -> bool:
        """Tell whether this program is connected to an address, as far as that is known."""
        from ray.util.client import ray as client

        if cls._ours:
            return address == cls._address
        return bool(client.is_connected())  # by the caller, who knows whereto

    @classmethod
    def leave(cls, ray: Any) -> None:
        with cls._lock:
            cls._users -= 1
            if cls._users == 0 and cls._ours:
                cls._ours = False
                ray.shutdown()


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"hosts='ray' needs Ray, which is not installed: pip install 'vla-gym[ray]' (that is "
            f"ray[client]=={PINNED}), here and on every node."
        ) from error
    return ray


def _connect(ray: Any, address: str, timeout: float) -> None:
    found = os.environ.get("RAY_ADDRESS") if address == "ray" else address
    if found:
        host, _, port = found.removeprefix("ray://").rpartition(":")
        if not port.isdecimal() or not _opens(host, int(port), min(timeout, 5 * _PROBE_S)):
            raise ConfigError(
                f"No Ray cluster answers at {found!r}: expected the address of a running one, "
                "'ray://host:10001' or RAY_ADDRESS=host:6379. Start one with 'ray start --head', "
                "or use hosts='ray' without RAY_ADDRESS to start a local one."
            )
    else:
        found = _here()
    quiet: dict[str, Any] = {} if found and found.startswith("ray://") else {"log_to_driver": False}
    try:
        if found:
            ray.init(found, **quiet)
        else:
            ray.init("local", include_dashboard=False, _node_ip_address=_LOOPBACK, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Could not connect to the Ray cluster {found or 'of this machine'!r}: {error}. Look "
            "at 'ray status' there; both sides need the same versions of Python and Ray, and here "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, if the cluster asks for a token."
        ) from error


def _here() -> str | None:
    """Return the address of the cluster that was started on this machine, if it runs."""
    folder = os.environ.get("RAY_TMPDIR") or os.path.join(tempfile.gettempdir(), "ray")
    try:
        address = Path(folder, "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    host, _, port = address.rpartition(":")
    return address if port.isdigit() and _opens(host, int(port), _PROBE_S) else None


def _listens(node: dict[str, Any]) -> bool:
    return _opens(node["NodeManagerAddress"], node["NodeManagerPort"], _PROBE_S)


def _opens(host: str, port: int, timeout: float) -> bool:
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except (OSError, ValueError, OverflowError):  # ValueError: no name of a machine
        return False
    return True
