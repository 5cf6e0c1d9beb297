"""Arguments of environments, seeds, options and actions: single, vector, with a VLA."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from engine import Case, Nonsense
from hostile_data import ARGUMENTS, drawn
from hypothesis import strategies as st

import vla_gym  # noqa: F401  (registers the environments)
from vla_gym.envs.base import LiberoEnvBase
from vla_gym.envs.checks import MAX_SEED
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers import ActionChunk, History, PlainSpaces
from vla_gym.wrappers.make import make_libero_vla, make_libero_vla_vec

BLIND = {"assets": "lite", "cameras": [], "task_ids": 8}
SMALL = {"assets": "lite", "task_ids": 8}
#: Names that an argument may well be given, beside values of all kinds.
WORDS = st.sampled_from(
    ["goal", "goal/8", "goal-swap", "official", "round_robin", "exact", "end", "mild", "human"]
    + ["SAME_STEP", "staged", "agentview", ["agentview", "agentview"], [8, 8], [[8], [9]], "mini"]
    + [1, 2, 3, 0.5, 1.5, np.float64("nan"), np.array([8]), np.zeros((2, 2)), ["task_id"]]
)


def plays(make: Callable[[], Any]) -> None:
    """Make an environment, play a little; what it returns must lie in its spaces."""
    env = make()
    obs, _ = env.reset(seed=0)
    for _ in range(2):
        _inside(env.observation_space, obs)
        obs, reward, *_ = env.step(env.action_space.sample())
        if not np.isfinite(np.asarray(reward, float)).all():
            raise Nonsense(f"reward {reward}")
    _inside(env.observation_space, obs)
    env.close()


def _inside(space: gym.Space[Any], obs: Any) -> None:
    if not space.contains(obs):
        raise Nonsense(f"an observation that is not in {space}")


def single(kwargs: dict[str, Any], env_id: str = "Libero-goal-v0") -> Any:
    return gym.make(env_id, disable_env_checker=True, **kwargs)


def vector(kwargs: dict[str, Any], env_id: str = "Libero-goal-v0") -> Any:
    return gym.make_vec(env_id, **{"num_envs": 2, "workers": 0, **kwargs})


def arguments_of(*functions: Callable[..., Any]) -> list[str]:
    """Return the names of their arguments but ``self`` and ``**``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [inspect.signature(function).parameters.items() for function in functions]
    names = [name for pairs in found for name, p in pairs if p.kind in kinds and name != "self"]
    return list(dict.fromkeys(names))


def arguments(group: str, names: list[str], base: Any, make: Any, count: int, seed: int) -> Any:
    """Yield cases that give one argument another value."""
    pairs = st.tuples(st.sampled_from(names), st.one_of(ARGUMENTS, WORDS))
    for name, value in drawn(pairs, count, seed):
        if callable(value) and name in ("env_wrappers", "env_factory", "wrap_envs"):
            continue  # what a user's own function raises is the user's
        run = partial(plays, partial(make, {**base, name: value}))
        yield Case(group, f"{name}={value!r}"[:90], lambda _, run=run: run())


def calls(folder: Path, call: str, value: Any, make: Callable[[], Any]) -> None:
    """Give a seed, options or an action to an environment that has begun."""
    del folder
    env = make()
    env.reset(seed=0)
    if call == "action":
        env.step(value)
        if not np.isfinite(np.asarray(value, float)).all():
            raise Nonsense("an action that is not finite")
        if np.shape(value) != env.action_space.shape:
            raise Nonsense(f"an action of shape {np.shape(value)}")
        return
    if call == "seed":
        env.reset(seed=value)
        seeds = value if isinstance(value, list | tuple | np.ndarray | range) else [value]
        for seed in seeds:
            known = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
            if seed is not None and not (known and 0 <= seed <= MAX_SEED):
                raise Nonsense(f"seed {seed!r}")
    else:
        env.reset(options=value)
    obs = env.step(env.action_space.sample())[0]
    _inside(env.observation_space, obs)


def _call_cases(group: str, make: Any, shape: tuple[int, ...], count: int, seed: int) -> Any:
    numbers = st.sampled_from(
        [0, 1, [0, 1], [0, 0.5], [1.0, 2.0], [True, 1], [None, 3], np.array([1, 2]), range(2)]
        + [(1, 2), np.array([2**63], np.uint64), "12", {"seed": 1}]
    )
    kinds = ["float64", "int64", "complex128", "bool", "float16", "object", "<U3", "datetime64[s]"]
    shapes = [shape, (*shape, 1), shape[1:], (0,), (10**6, *shape)]
    arrays = st.builds(
        lambda s, kind, low: np.full(s, low).astype(kind) if low == 0 else np.full(s, low),
        st.sampled_from(shapes),
        st.sampled_from(kinds),
        st.sampled_from([0, 0, 0, 1e300, np.nan, -np.inf, 2**100]),
    )
    keys = st.sampled_from(["task_id", "init_state_id", "reset_mask", "nonsense"])
    options = st.dictionaries(keys, st.one_of(ARGUMENTS, numbers), max_size=2)
    strategies = {
        "seed": st.one_of(numbers, ARGUMENTS),
        "options": st.one_of(options, ARGUMENTS),
        "action": st.one_of(arrays, ARGUMENTS),
    }
    for call, strategy in strategies.items():
        for value in drawn(strategy, count // 3, seed):
            run = partial(calls, call=call, value=value, make=make)
            yield Case(group, f"{call} {value!r}"[:90], run)


def wrappers(count: int, seed: int) -> Iterator[Case]:
    """Yield cases of wrappers' arguments."""
    makers = {
        "ActionChunk": lambda env, x: ActionChunk(env, x),
        "History": lambda env, x: History(env, x),
        "PlainSpaces obs_keys": lambda env, x: PlainSpaces(env, False, x, True),
    }
    for name, value in drawn(st.tuples(st.sampled_from([*makers]), ARGUMENTS), count, seed):
        make = lambda _, n=name, v=value: plays(lambda: makers[n](single(BLIND), v))  # noqa: E731
        yield Case("environments", f"{name} {value!r}"[:90], make)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield the cases of environments, about ``count``."""
    for make in (single, vector):
        for kwargs in (BLIND, SMALL):
            run = lambda _, m=make, k=kwargs: plays(lambda: m(k))  # noqa: E731
            yield Case("environments", f"{make.__name__} as it is", run, "accepted")
    base = arguments_of(LiberoEnvBase.__init__)
    base += ["render_mode", "no_such"]
    yield from arguments("environments", base, BLIND, single, count // 5, seed)
    yield from wrappers(count // 20, seed)
    yield from _call_cases(
        "seeds, options, actions", partial(single, BLIND), (7,), count // 5, seed + 1
    )
    names = [*arguments_of(LiberoVectorEnv.__init__), "hosts", *base]
    yield from arguments("vector environments", names, BLIND, vector, count // 5, seed + 2)
    yield from _call_cases(
        "seeds, options, actions", partial(vector, BLIND), (2, 7), count // 5, seed + 3
    )
    vla = partial(single, env_id="LiberoVLA-goal-v0")
    names = arguments_of(make_libero_vla)
    yield from arguments("environments with a VLA", names, SMALL, vla, count // 10, seed + 4)
    vla = partial(vector, env_id="LiberoVLA-goal-v0")
    names = arguments_of(make_libero_vla_vec)
    yield from arguments("environments with a VLA", names, SMALL, vla, count // 10, seed + 5)
