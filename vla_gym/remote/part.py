"""A part of a vector environment: takes messages in order and answers them, in its own thread."""

from __future__ import annotations

import dataclasses
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

import vla_gym
from vla_gym.errors import AssetError, ConfigError, WorkerError
from vla_gym.remote.messages import PartSpec, Reply, Rows, flatten
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vector.env_row import EnvRowState, row_in
from vla_gym.vector.shared_memory import OF_WORKERS
from vla_gym.vector.worker import EnvSpaces, portable

#: While a part waits for its environments, it looks so often whether it is told something else.
_LOOK_S = 0.002
# A part that is asked for its share of what is wanted, and has some of it, waits so long for the
# rest: the others may have more, and a slow environment must hold up nobody.
_PATIENCE_S = 0.02


def asset_digest(assets: str | None) -> str | None:
    """Return the digest of an asset pack here; None if there is none of that name."""
    from vla_gym.assets import resolve_asset_pack

    if assets is None:
        return None
    try:
        return resolve_asset_pack(assets).digest
    except AssetError:
        return None


class PartEnv(LiberoVectorEnv):
    """The vector environment of a part, whose environments another table drives."""

    def begin(
        self,
        ids: np.ndarray,
        ops: np.ndarray,
        rows: Mapping[str, np.ndarray],
        options: Mapping[int, dict[str, Any]],
        *,
        each: bool,
    ) -> None:
        """Begin what another table asks of idle environments, ascending; see ``EnvTable.take``.

        ``recv`` returns what comes of it; with ``each`` they may be received one by one.
        """
        self._assert_open()
        self._table.take(ids, ops, rows)
        self.seeded = True
        self._runner.launch(ids, ops, options, each=each)

    def tell_restarts(self, tell: Callable[[str], None]) -> None:
        """Have restarts of workers told to a function; without it they are warnings."""
        self._runner.tell = tell

    def num_done(self) -> int:
        """Return how many environments are done and not received."""
        return len(self._table.finished)

    def written(self, ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str | None]]:
        """Return what workers wrote for environments: columns but observations, instructions."""
        columns, extras = self._table.columns, self._table.extras
        rows = {name: columns[name][ids] for name in columns if name.startswith(OF_WORKERS)}
        return rows, {i: extras[i].text for i in ids.tolist() if i in extras}

    def call_rows(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> list[Any]:
        """Call a method of ``EnvRow`` with arguments by environment."""
        self._idle(method, list(calls))
        return self._runner.call(calls, method)


def build(spec: PartSpec) -> tuple[PartEnv, Any]:
    """Return the vector environment of a part, and the same with its wrappers."""
    if spec.files:
        from vla_gym.suites.libero.own import BddlSuite

        BddlSuite(spec.files).keep()
    base = PartEnv(spec.num_envs, spec.suite, env_ids=spec.env_ids, copy=False, **spec.kwargs)
    envs: Any = base
    try:
        for wrapper in spec.vector_wrappers:
            envs = wrapper(envs)
    except BaseException:
        base.close()
        raise
    return base, envs


class Part:
    """One vector environment and the thread that alone touches it.

    The commands of :meth:`submit`:
        ``start``: build it; see :meth:`_start`.
        ``run``: begin steps and resets; with ``each`` they are received by ``recv``, else the
        answer is what they did.
        ``recv``: of what was begun with ``each``, these environments; or so many, or fewer if the
        rest takes long. A later ``recv`` replaces one that still waits, which is answered without
        rows.
        ``call``: methods of ``EnvRow``, on environments with nothing under way.
        ``close``: end it.
    """

    place = "this process"

    def __init__(self) -> None:
        """Wait for the first command."""
        self._inbox: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Reply]]]
        self._inbox = queue.SimpleQueue()
        self._base: Any = None
        self._envs: Any = None
        self._told: list[str] = []
        # What the ``recv`` that waits is for, and since when.
        self._asked: tuple[Future[Reply], Sequence[int] | int, float] | None = None
        self._thread = threading.Thread(target=self._serve, name="vla-gym-part", daemon=True)
        self._thread.start()

    def submit(self, command: str, *arguments: Any) -> Future[Reply]:
        """Give a command; commands are taken in the order in which they are given.

        Returns:
            A future of the answer. It never raises: exceptions are answers.
        """
        future: Future[Reply] = Future()
        self._inbox.put((command, arguments, future))
        return future

    def kill(self) -> None:
        """End the thread when it has done what it was told before."""
        self.submit("close")

    def _serve(self) -> None:
        while True:
            try:
                command, arguments, future = self._inbox.get(block=self._asked is None)
            except queue.Empty:
                self._look()
                continue
            if command == "recv":
                self._replace_asked((future, arguments[0], time.monotonic()))
                continue
            future.set_result(self._reply(getattr(self, f"_{command}"), *arguments))
            if command == "close":
                self._replace_asked(None)
                return

    def _reply(self, method: Callable[..., Reply], *arguments: Any) -> Reply:
        try:
            reply = method(*arguments)
        except Exception as error:
            reply = Reply("raised", _portable(error))
        if reply.kind == "waiting":
            return reply
        told, self._told[:] = tuple(self._told), []
        return reply._replace(warnings=told)

    def _replace_asked(
        self, asked: tuple[Future[Reply], Sequence[int] | int, float] | None
    ) -> None:
        if self._asked is not None:
            self._asked[0].set_result(Reply("begun"))
        self._asked = asked

    def _look(self) -> None:
        """Answer the ``recv`` that waits, if enough is done."""
        assert self._asked is not None
        future, wanted, since = self._asked
        if isinstance(wanted, int) and time.monotonic() > since + _PATIENCE_S:
            wanted = max(1, min(wanted, self._base.num_done()))
        reply = self._reply(self._receive, wanted)
        if reply.kind != "waiting":
            self._asked = None
            future.set_result(reply)

    # Commands

    def _start(self, version: str, assets: str | None, digest: str | None, payload: bytes) -> Reply:
        """Build a cloudpickled :class:`PartSpec`, if package and asset pack are the caller's."""
        if version != vla_gym.__version__:
            raise ConfigError(
                f"This program runs vla_gym {version}, the node has {vla_gym.__version__}: install "
                f"vla-gym=={version} there."
            )
        if digest is not None and (mine := asset_digest(assets)) != digest:
            raise ConfigError(
                f"The asset pack {assets!r} has digest {digest[:12]} here and "
                f"{mine[:12] if mine else 'is missing'} on the node: both need the same pack, see "
                "'vla-gym assets'."
            )
        spec: PartSpec = pickle.loads(payload)
        self._base, self._envs = build(spec)
        self._base.tell_restarts(self._told.append)
        envs = self._envs
        spaces = EnvSpaces(
            envs.single_observation_space,
            envs.single_action_space,
            dict(envs.metadata),
            envs.render_mode,
        )
        return Reply("ready", spaces)

    def _run(self, each: bool, ids: np.ndarray, *what: Any) -> Reply:
        self._envs.begin(ids, *what, each=each)
        if each:
            return Reply("begun")
        try:
            return self._rows(self._envs.recv(env_ids=ids))
        except Exception:
            self._base.end()
            raise

    def _receive(self, wanted: Sequence[int] | int) -> Reply:
        going = self._base.going()
        chosen: dict[str, Any] = {"env_ids": wanted}
        if isinstance(wanted, int):
            chosen = {"min_envs": min(wanted, len(going))}
        elif not np.isin(wanted, going).all():  # an error has left some of them undone
            chosen = {"env_ids": np.intersect1d(wanted, going)}
        if not len(going) or not len(chosen.get("env_ids", going)):
            return Reply("begun")
        try:
            return self._rows(self._envs.recv(timeout=_LOOK_S, **chosen))
        except Exception as error:
            if isinstance(error, TimeoutError) and np.array_equal(going, self._base.going()):
                return Reply("waiting")
            undone = np.setdiff1d(going, self._base.going()).tolist()
            return Reply("raised", _portable(error), undone)

    def _rows(self, result: Any) -> Reply:
        ids = result[4]["env_id"]
        return Reply("done", Rows.of(result, *self._base.written(ids)))

    def _call(self, calls: Mapping[int, tuple[Any, ...]], method: str) -> Reply:
        ids = list(calls)
        if method == "get_state":
            if not self._base.seeded:  # of a part that takes the place of a lost one
                return Reply("value", ([EnvRowState(None, 0.0, 0)] * len(ids), {}))
            return Reply("value", ([_as_row(state) for state in self._envs.get_state(ids)], {}))
        if method == "set_state":
            states = [state.env if row_in(state.env) else state for (state,) in calls.values()]
            obs = self._envs.set_state(states, ids)
            rows = {name: values[ids].copy() for name, values in flatten(obs).items()}
            return Reply("value", ([None] * len(ids), rows))
        return Reply("value", (self._base.call_rows(calls, method), {}))

    def _close(self) -> Reply:
        if self._envs is not None:
            self._envs.close()
        return Reply("begun")


def _as_row(state: Any) -> EnvRowState:
    """Return a state of the outermost wrapper as that of a row, whose ``env`` it then is."""
    row = row_in(state)
    assert row is not None
    return row if row is state or row.env is None else dataclasses.replace(row, env=state)


def _portable(error: Exception) -> Exception:
    if isinstance(error, TimeoutError):  # of a wrapper or a VLA, not of the caller's own deadline
        return WorkerError("".join(traceback.format_exception(error)))
    return portable(error, "a part of the vector environment")
