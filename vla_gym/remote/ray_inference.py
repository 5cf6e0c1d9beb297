"""Inference servers as Ray actors: one a GPU, or one a node."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import random
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from vla_gym.envs.checks import MAX_TIMEOUT_S, as_integer, as_number
from vla_gym.errors import WorkerError
from vla_gym.remote.inference import InferenceServer, Inferred, pack_weights
from vla_gym.remote.ray_hosts import RayHosts, import_ray
from vla_gym.remote.remote_vla import RemoteVLA, vla_facts

_NAMESPACE = "vla_gym"
#: Bytes of one argument of a call. Ray sends those below 100 kB with the call; larger ones wait in
#: the asker's object store until the actor's node has fetched them.
_PIECE = 90_000


def in_pieces(*arguments: Any) -> list[bytes]:
    """Return arguments, pickled, as pieces of at most ``_PIECE`` bytes."""
    sent = pickle.dumps(arguments, protocol=5)
    return [sent[i : i + _PIECE] for i in range(0, len(sent), _PIECE)]


class InferenceActor:
    """Runs an :class:`InferenceServer` in a process of its own."""

    def __init__(
        self, spec: str, device: str, prepare: Callable[[Any], None] | None, **settings: Any
    ) -> None:
        """Load the VLA where this is called."""
        from vla_gym.vla import load

        self._vla = load(spec, device=device)
        if prepare is not None:
            prepare(self._vla)
        self._server = InferenceServer(self._vla, **settings)

    async def facts(self) -> dict[str, Any]:
        """See :func:`vla_facts`."""
        return vla_facts(self._vla)

    async def infer(self, *pieces: bytes) -> Inferred:
        """See :meth:`InferenceServer.infer`; its arguments come by :func:`in_pieces`."""
        return await asyncio.wrap_future(self._server.infer(*pickle.loads(b"".join(pieces))))

    async def publish(self, version: int, weights: bytes) -> int:
        """See :meth:`InferenceServer.publish`."""
        return await asyncio.wrap_future(self._server.publish(version, weights))

    async def stats(self) -> dict[str, Any]:
        """See :meth:`InferenceServer.stats`."""
        return self._server.stats()


class AskActors:
    """Asks actors by turns, by their names, so that it can be sent to other machines."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Know them; they are looked up when they are first asked."""
        self._names = names
        self._turns: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": self._names, "_turns": None}

    def __call__(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> Future[Inferred]:
        """Return a future of the answer of the actor whose turn it is.

        It raises what the actor raises, WorkerError where the actor is lost.
        """
        answer: Future[Inferred] = Future()
        ray = import_ray()

        def pass_on(done: Future[Inferred]) -> None:
            error: Any = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, ray.exceptions.RayTaskError):  # raised in the actor, not by Ray
                answer.set_exception(error)
            else:
                answer.set_exception(_lost(error))

        try:
            if self._turns is None:
                found = [ray.get_actor(name, namespace=_NAMESPACE) for name in self._names]
                first = random.randrange(len(found))  # not all machines ask the same one
                self._turns = itertools.cycle(found[first:] + found[:first])
            asked = next(self._turns).infer.remote(*in_pieces(images, instructions, proprio))
        except (ValueError, ray.exceptions.RayError) as error:  # ValueError: no actor of that name
            raise _lost(error) from error
        asked.future().add_done_callback(pass_on)
        return answer


def _lost(error: Exception) -> WorkerError:
    return WorkerError(f"The inference actor is lost: {type(error).__name__}: {error}")


class RayInference:
    """Inference actors that simulators on any node ask, and a learner gives new weights.

    An actor that dies is started again by Ray, and what it was asked is asked again; until the
    next :meth:`publish` it infers with the weights that it loads, which ``version`` records.

    Attributes:
        version: Of the weights that were published last.
    """

    def __init__(
        self,
        vla: str,
        *,
        hosts: str = "ray",
        actors: int = 1,
        device: str = "cpu",
        prepare: Callable[[Any], None] | None = None,
        max_rows: int = 64,
        max_wait_s: float = 0.005,
        max_restarts: int = 5,
        timeout: float = 300.0,
    ) -> None:
        """Start the actors and wait until they have loaded the VLA.

        Args:
            vla: Name or directory of the VLA; a directory must be there on every node.
            hosts: See :class:`~vla_gym.remote.vector_env.RemoteVectorEnv`.
            actors: How many. On CUDA each gets a GPU.
            device: Torch device in the actors.
            prepare: Called with the VLA in each actor, say to add LoRA adapters.
            max_rows: See :class:`InferenceServer`.
            max_wait_s: See :class:`InferenceServer`.
            max_restarts: Of each actor.
            timeout: Seconds for loading, and for an answer.

        Raises:
            ConfigError: If a number is out of range, or Ray or its cluster is missing.
            WorkerError: If the VLA cannot be loaded.
        """
        as_integer(actors, "actors", 1)
        as_integer(max_rows, "max_rows", 1)
        as_number(max_wait_s, "max_wait_s", 0, MAX_TIMEOUT_S)
        gpu = device.startswith("cuda")
        self._hosts: RayHosts | None = RayHosts(hosts, timeout, gpu=gpu)
        self._ray, self._timeout, self.version = import_ray(), timeout, 0
        self._actors: list[Any] = []
        run = uuid.uuid4().hex[:12]
        self._names = tuple(f"inference-{run}-{i}" for i in range(actors))
        options: dict[str, Any] = {"max_restarts": max_restarts, "max_task_retries": -1}
        options |= {"num_cpus": 0, "num_gpus": int(gpu), "max_concurrency": 1000}
        options |= {"namespace": _NAMESPACE, "scheduling_strategy": "SPREAD"}
        try:
            remote = self._ray.remote(InferenceActor)
            for name in self._names:
                made = remote.options(name=name, **options)
                self._actors.append(
                    made.remote(vla, device, prepare, max_rows=max_rows, max_wait_s=max_wait_s)
                )
            facts = [actor.facts.remote() for actor in self._actors]
            self._facts = self._ray.get(facts, timeout=timeout)[0]
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            late = isinstance(error, self._ray.exceptions.GetTimeoutError)
            when = f" within timeout={timeout:g} s" if late else ""
            raise WorkerError(
                f"The inference actors of the VLA {vla!r} did not come up{when}: {error}"
            ) from error

    def vla(self) -> RemoteVLA:
        """Return the VLA as environments take it; it can be sent to other machines."""
        return RemoteVLA(self._facts, AskActors(self._names), timeout=self._timeout)

    def publish(self, parameters: Mapping[str, Any]) -> int:
        """Give all actors new weights; return their version.

        Args:
            parameters: By name; see :func:`~vla_gym.remote.inference.pack_weights`.

        Raises:
            WorkerError: If an actor is not up to date within ``timeout`` seconds.
        """
        self.version += 1
        shared = self._ray.put(pack_weights(parameters))
        asked = [actor.publish.remote(self.version, shared) for actor in self._actors]
        self._get(asked, "take new weights")
        return self.version

    def stats(self) -> list[dict[str, Any]]:
        """Return what each actor has done, see ``InferenceStats``.

        Raises:
            WorkerError: If an actor does not say so within ``timeout`` seconds.
        """
        asked = [actor.stats.remote() for actor in self._actors]
        return self._get(asked, "tell what it has done")

    def _get(self, asked: Any, what: str) -> Any:
        try:
            return self._ray.get(asked, timeout=self._timeout)
        except self._ray.exceptions.RayError as error:  # GetTimeoutError is one
            raise WorkerError(f"An inference actor did not {what}: {error}") from error

    def close(self) -> None:
        """End the actors."""
        actors, hosts, self._actors, self._hosts = self._actors, self._hosts, [], None
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        if hosts is not None:
            hosts.close()
