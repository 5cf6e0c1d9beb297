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
from vla_gym.remote.messages import Answer, Rows, flatten
from vla_gym.vector.env_row import EnvRowState, row_in
from vla_gym.vector.worker import EnvSpaces, Event, portable

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

    Environments have in commands and answers the numbers that they have among those of all parts.
    An answer is a list of events, which know no number of a worker. The value of ``"done"`` is
    :class:`Rows`, that of ``"value"`` the results and columns of observations.
    """

    place = "this process"

    def __init__(self) -> None:
        """Wait for the first command."""
        self._inbox: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Answer]]]
        self._inbox = queue.SimpleQueue()
        self._base: Any = None
        self._envs: Any = None
        self._told: list[str] = []
        # What the ``recv`` that waits is for, and since when.
        self._asked: tuple[Future[Answer], Sequence[int] | int, float] | None = None
        self._thread = threading.Thread(target=self._serve, name="vla-gym-part", daemon=True)
        self._thread.start()

    def submit(self, command: str, *arguments: Any) -> Future[Answer]:
        """Give a command; commands are taken in the order in which they are given.

        Returns:
            A future of the answer. It never raises: exceptions are events.
        """
        future: Future[Answer] = Future()
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
            future.set_result(self._answer(getattr(self, f"_{command}"), *arguments) or [])
            if command == "close":
                self._replace_asked(None)
                return

    def _answer(self, method: Callable[..., Answer | None], *arguments: Any) -> Answer | None:
        """Return what a method does, after restarts of workers meanwhile; None: nothing yet."""
        try:
            events = method(*arguments)
        except Exception as error:
            events = [_raised(error)]
        if events is None:
            return None
        told = [Event("told", -1, (), text) for text in self._told]
        self._told.clear()
        return told + events

    def _replace_asked(self, asked: tuple[Future[Answer], Any, float] | None) -> None:
        if self._asked is not None:
            self._asked[0].set_result([])
        self._asked = asked

    def _look(self) -> None:
        """Answer the ``recv`` that waits, if enough is done."""
        assert self._asked is not None
        future, wanted, since = self._asked
        if isinstance(wanted, int) and time.monotonic() > since + _PATIENCE_S:
            wanted = max(1, min(wanted, self._base.num_done()))
        answer = self._answer(self._receive, wanted)
        if answer is not None:
            self._asked = None
            future.set_result(answer)

    # Commands

    def _start(
        self, version: str, assets: str | None, digest: str | None, payload: bytes
    ) -> Answer:
        """Call a pickled :func:`.part_env.build`, if package and pack are the caller's."""
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
        self._base, self._envs = pickle.loads(payload)()
        self._base.tell_restarts(self._told.append)
        envs = self._envs
        spaces = EnvSpaces(
            envs.single_observation_space,
            envs.single_action_space,
            dict(envs.metadata),
            envs.render_mode,
        )
        return [Event("ready", -1, (), spaces)]

    def _run(self, each: bool, ids: np.ndarray, options: Mapping[int, Any], *what: Any) -> Answer:
        first = self._base.first
        options = {i - first: own for i, own in options.items()}
        self._envs.begin(ids - first, *what, options, each=each)
        if each:
            return []
        try:
            return self._done(self._envs.recv(env_ids=ids - first))
        except Exception:
            self._base.end()
            raise

    def _receive(self, wanted: Sequence[int] | int) -> Answer | None:
        going, first = self._base.going(), self._base.first
        if isinstance(wanted, int):
            chosen: dict[str, Any] = {"min_envs": min(wanted, len(going))}
        else:  # an error may have left some of them undone
            chosen = {"env_ids": np.intersect1d(np.subtract(wanted, first), going)}
        if not len(going) or not len(chosen.get("env_ids", going)):
            return []
        try:
            return self._done(self._envs.recv(timeout=_LOOK_S, **chosen))
        except Exception as error:
            if isinstance(error, TimeoutError) and np.array_equal(going, self._base.going()):
                return None
            undone = np.setdiff1d(going, self._base.going()) + first
            return [_raised(error, undone.tolist())]

    def _done(self, result: Any) -> Answer:
        infos = result[4]
        ids = infos["env_id"] + self._base.first
        rows = Rows.of(result, ids, *self._base.written(infos["env_id"]))
        events = [Event("done", -1, ids.tolist(), rows)]
        if "worker_restarted" in infos:
            # Where the mode resets in the same step, the row's flags alone do not tell who lost it.
            lost = infos.get("final_info", {}).get("worker_restarted", np.zeros(len(ids), bool))
            restarted = ids[infos["worker_restarted"]].tolist()
            events.insert(0, Event("restarted", -1, restarted, ids[lost].tolist()))
        return events

    def _call(self, ids: np.ndarray, method: str, arguments: Sequence[Any]) -> Answer:
        own = (ids - self._base.first).tolist()
        columns: dict[str, np.ndarray] = {}
        if method == "get_state" and not self._base.seeded:
            # Of a part that takes the place of a lost one.
            values: list[Any] = [EnvRowState(None, 0.0, 0)] * len(own)
        elif method == "get_state":
            values = [_as_row(state) for state in self._envs.get_state(own)]
        elif method == "set_state":
            states = [state.env if row_in(state.env) else state for (state,) in arguments]
            obs = self._envs.set_state(states, own)
            columns = {name: rows[own].copy() for name, rows in flatten(obs).items()}
            values = [None] * len(own)
        else:
            values = self._base.call_rows(dict(zip(own, arguments, strict=True)), method)
        return [Event("value", -1, (), (values, columns))]

    def _close(self) -> Answer:
        if self._envs is not None:
            self._envs.close()
        return []


def _as_row(state: Any) -> EnvRowState:
    """Return a state of the outermost wrapper as that of a row, whose ``env`` it then is."""
    row = row_in(state)
    assert row is not None
    return row if row is state or row.env is None else dataclasses.replace(row, env=state)


def _raised(error: Exception, undone: Sequence[int] = ()) -> Event:
    if isinstance(error, TimeoutError):  # of a wrapper or a VLA, not of the caller's own deadline
        error = WorkerError("".join(traceback.format_exception(error)))
    else:
        error = portable(error, "a part of the vector environment")
    return Event("raised", -1, undone, error)
