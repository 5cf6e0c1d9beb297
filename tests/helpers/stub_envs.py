"""Cheap environments for the vector env's tests: known values everywhere, and faults on order.

Every value is a function of (seed, episode, step, the episode's actions), so that an expected row
can be computed anywhere. The classes are pickled by value: workers need not find this module.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

IMAGE = (6, 5, 3)
ACTION_DIM = 3
#: No wait inside a stub is longer: a broken test must not leave a process for hours.
FOREVER = 600.0
PAUSE_S = 2.0

SUCCESS, LIMIT = "success", "limit"
#: Length and end of an episode.
Ending = tuple[int, str]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    ``kind``: a signal's name ("SIGKILL", "SIGSTOP", ...) for a signal to itself, "abort", "exit",
    "leave" (sys.exit), "raise", "hang", "pause" (``PAUSE_S`` seconds), or "error" (an error of
    this package). ``at`` is "step", "reset" or "init"; a step fault comes in the ``step``-th step
    (from 1) of episode ``episode``
    (from 0), a reset fault at the reset that begins it. With a ``flag`` path it happens once, and
    the file says that the fault was reached; without one it happens each time.
    """

    kind: str
    at: str = "step"
    episode: int = 0
    step: int = 1
    flag: str | None = None

    def fire(self) -> None:
        if self.flag is not None:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if self.kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.kind))
        elif self.kind == "abort":
            os.abort()
        elif self.kind == "exit":
            os._exit(7)
        elif self.kind == "leave":
            sys.exit(9)
        elif self.kind == "raise":
            raise ZeroDivisionError(f"stub fault in {self.at}")
        elif self.kind == "error":
            from vla_gym.errors import ConfigError

            raise ConfigError(f"stub error in {self.at}")
        elif self.kind == "hang":
            time.sleep(FOREVER)
        elif self.kind == "pause":
            time.sleep(PAUSE_S)
        else:
            raise ValueError(self.kind)


@dataclass(frozen=True)
class Gate:
    """A step that waits until ``path`` exists; ``path + ".entered"`` says that it waits."""

    path: str
    episode: int = 0
    step: int = 1

    def wait(self) -> None:
        with open(self.path + ".entered", "w"):
            pass
        deadline = time.monotonic() + FOREVER
        while not os.path.exists(self.path) and time.monotonic() < deadline:
            time.sleep(0.002)


class StubEnv(gym.Env[dict[str, Any], np.ndarray]):
    """A counter with an image; its observation says who it is.

    Observation: ``proprio`` = (seed, episode, step, sum of the episode's actions) float32,
    ``image`` uint8 drawn from (seed, episode, step), ``task_id``. An episode's length and end come
    from ``script`` (one Ending an episode, the last one again after that) or from (seed, episode).
    The reward of a step is 0.25 * step, plus 1 at a success. ``task_id`` is (seed + episode) % 5
    unless the reset options say otherwise.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}
    render_mode = "rgb_array"

    def __init__(
        self,
        index: int = 0,
        *,
        script: Sequence[Ending] | None = None,
        faults: Sequence[Fault] = (),
        gates: Sequence[Gate] = (),
        delay: float = 0.0,
        executed: int | None = 4,
        rich_info: bool = False,
    ) -> None:
        self.index, self.script, self.executed = index, script, executed
        self.faults, self.gates, self.delay = tuple(faults), tuple(gates), delay
        self.rich_info = rich_info
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, IMAGE, np.uint8),
                "proprio": spaces.Box(-np.inf, np.inf, (4,), np.float32),
                "task_id": spaces.Discrete(5),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        self.knob: Any = index
        self._seed_value: int | None = None
        self._next = 0
        self.episode = self.count = 0
        self.over = True
        self._fault("init", 0, 0)

    def seek(self, seed: int, episode: int, env_index: int | None = None) -> None:
        """Let the next reset without a seed begin episode ``episode`` of ``seed``."""
        del env_index
        self._seed_value, self._next = seed, episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed_value, self._next = int(seed), 0
        elif self._seed_value is None:
            self._seed_value = int(self.np_random.integers(2**20))
        self.episode, self.count = self._next, 0
        self._next += 1
        self.total = np.float32(0.0)
        options = options or {}
        self.task_id = int(options.get("task_id", (self._seed_value + self.episode) % 5))
        self.init_state_id = int(options.get("init_state_id", -1))
        self.over = False
        self._fault("reset", self.episode, 0)
        info = self._info(False, 0)
        if self.rich_info:
            info["fresh"] = 10 * self.episode
        return self.observe(), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if self.over:
            raise gym.error.ResetNeeded("step of an ended stub")
        self.count += 1
        if self.delay:
            time.sleep(self.delay)
        for gate in self.gates:
            if (gate.episode, gate.step) == (self.episode, self.count):
                gate.wait()
        self._fault("step", self.episode, self.count)
        self.total = np.float32(self.total + np.asarray(action, np.float32).sum())
        length, end = self._ending()
        ended = self.count >= length
        terminated, truncated = ended and end == SUCCESS, ended and end == LIMIT
        self.over = ended
        reward = 0.25 * self.count + float(terminated)
        info = self._info(terminated, 1)
        if self.rich_info:
            info.update(self._more())
        return self.observe(), reward, terminated, truncated, info

    def _ending(self) -> Ending:
        if self.script is not None:
            return self.script[min(self.episode, len(self.script) - 1)]
        draw = np.random.default_rng([self._seed_value, self.episode, 99]).integers(2**16)
        return 1 + int(draw) % 5, SUCCESS if draw & 1024 else LIMIT

    def _fault(self, at: str, episode: int, step: int) -> None:
        for fault in self.faults:
            if (fault.at, fault.episode) == (at, episode) and (at != "step" or fault.step == step):
                fault.fire()

    def observe(self) -> dict[str, Any]:
        key = (self._seed_value, self.episode, self.count)
        image = stub_image(*key)
        proprio = np.array([*key, self.total], np.float32)
        return {"image": image, "proprio": proprio, "task_id": np.int64(self.task_id)}

    def _info(self, success: bool, steps: int) -> dict[str, Any]:
        info: dict[str, Any] = {
            "success": success,
            "is_success": success,
            "elapsed_steps": self.count * (self.executed or 1),
            "instruction": f"do task {self.task_id}",
            "task_id": self.task_id,
            "init_state_id": self.init_state_id,
            "discount": float(0.9 ** (steps * (self.executed or 1))),
        }
        if self.executed is not None:
            info["executed_steps"] = steps * self.executed
        return info

    def _more(self) -> dict[str, Any]:
        """Infos of every kind that Gymnasium knows, some of them not in every step."""
        more: dict[str, Any] = {
            "pose": np.full(2, self.count, np.float32),
            "scalar": np.float32(self.count),
            "detail": {"height": 0.5 * self.count, "deep": {"even": self.count % 2 == 0}},
            "note": None if self.count == 1 else f"step {self.count}",
        }
        if self.count % 2:
            more["odd"] = self.count
        return more

    def render(self) -> np.ndarray:
        return self.observe()["image"]

    def get_state(self) -> dict[str, Any]:
        names = ("_seed_value", "_next", "episode", "count", "total", "task_id", "init_state_id")
        return {name: getattr(self, name) for name in (*names, "over")}

    def set_state(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, value in state.items():
            setattr(self, name, value)
        return self.observe()

    def pid(self) -> int:
        return os.getpid()

    def add(self, a: int, b: int = 0) -> int:
        return self.index * 100 + a + b

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def nap(self) -> None:
        time.sleep(PAUSE_S / 2)

    def fail(self) -> None:
        raise KeyError("stub call")


class Unseekable(StubEnv):
    """An environment as others write them: only reset(seed=...) says what it plays."""

    seek = property()  # there is none


def stub_factory(
    per_env: Mapping[int, Mapping[str, Any]] | None = None, **kwargs: Any
) -> Callable[[int], StubEnv]:
    """A factory of StubEnv(index, **kwargs), with ``per_env[index]`` over them."""
    own = dict(per_env or {})

    def make(index: int) -> StubEnv:
        return StubEnv(index, **{**kwargs, **own.get(index, {})})

    return make


def stub_image(seed: int | None, episode: int, step: int) -> np.ndarray:
    """The image that a stub shows after a step (0: after the reset)."""
    return np.random.default_rng([seed, episode, step]).integers(0, 256, IMAGE, dtype=np.uint8)


def stub_action(seed: int, episode: int, step: int) -> np.ndarray:
    """The action that every test plays in a step (from 0)."""
    rng = np.random.default_rng([seed, episode, step, 7])
    return rng.uniform(-1, 1, ACTION_DIM).astype(np.float32)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
