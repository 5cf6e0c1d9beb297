"""What a vector env must return, worked out from single environments.

A :class:`Reference` plays one single environment; a :class:`Follower` holds one per row and knows,
for each autoreset mode, what every observation, reward, flag and info of a vector env must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from stub_envs import StubEnv, stub_action, stub_factory
from trees import assert_same

from vla_gym.vector import LiberoVectorEnv

MODES = NEXT_STEP, SAME_STEP, DISABLED = tuple(AutoresetMode)
#: In this process; with workers, of which the first of three envs has two.
by_workers = pytest.mark.parametrize("workers", [0, 2])
by_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
by_autoreset = pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
#: For workers that hang: a wait of this length is part of the test.
HANG_S = 3.0
#: What goes wrong in an environment, and what the warning says about it.
CRASHES = {
    "SIGKILL": "SIGKILL",
    "abort": "SIGABRT",
    "raise": "ZeroDivisionError: stub fault",
    "exit": "exit code 7",
    "leave": "exit code 9",
}


def random_action(env: int, shape: tuple[int, ...], episode: int, step: int) -> np.ndarray:
    """Return the action of a step, the same whoever asks."""
    rng = np.random.default_rng([env, episode, step])
    return rng.uniform(-1, 1, shape).astype(np.float32)


class Record(NamedTuple):
    """What one reset or step returned."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


def copied(value: Any) -> Any:
    """A copy that later changes of the original do not reach."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return np.array(value) if isinstance(value, np.ndarray) else value


class Reference:
    """The episodes of one single environment, played when they are asked for.

    The action of each step is ``action(episode, step)`` with steps from 0. With ``keep=False``
    only the last episodes are remembered.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        seed: int,
        action: Callable[[int, int], np.ndarray],
        options: dict[str, Any] | None = None,
        *,
        keep: bool = True,
    ) -> None:
        self.env, self.seed, self.action, self.options = env, seed, action, options
        self.keep, self.played = keep, 0
        self.episodes: dict[int, list[Record]] = {}

    def __getitem__(self, episode: int) -> list[Record]:
        while self.played <= episode:
            self._play()
        return self.episodes[episode]

    def _play(self) -> None:
        number, self.played = self.played, self.played + 1
        if not self.keep:
            self.episodes.pop(number - 2, None)
        obs, info = self.env.reset(
            seed=None if number else self.seed, options=None if number else self.options
        )
        records = [Record(copied(obs), 0.0, False, False, dict(info))]
        while not records[-1].ended:
            obs, reward, *flags, info = self.env.step(self.action(number, len(records) - 1))
            records.append(Record(copied(obs), float(reward), *map(bool, flags), dict(info)))
        self.episodes[number] = records

    def paid(self, record: Record) -> float:
        """What statistics add up: the task's reward, where a wrapper pays for more."""
        return float(record.info.get("reward_terms", {"task": record.reward})["task"])

    def stats(self, episode: int) -> dict[str, Any]:
        steps = self[episode][1:]
        return {
            "return": float(sum(self.paid(record) for record in steps)),
            "length": int(sum(record.info.get("executed_steps", 1) for record in steps)),
            "success": bool(steps[-1].info["success"]),
        }


def rows(value: Any, index: Any) -> Any:
    """Row(s) of a batched observation."""
    if isinstance(value, Mapping):
        return {key: rows(inner, index) for key, inner in value.items()}
    return value[index]


def info_row(infos: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The single environment's info inside Gymnasium's vector infos."""
    found = {}
    for key, value in infos.items():
        if key.startswith("_") or f"_{key}" not in infos or not infos[f"_{key}"][i]:
            continue
        found[key] = info_row(value, i) if isinstance(value, Mapping) else value[i]
    return found


def batch_infos(single: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gymnasium's own arrangement of single infos."""
    owner: Any = SimpleNamespace(num_envs=len(single))
    owner._add_info = lambda *args: VectorEnv._add_info(owner, *args)
    infos: dict[str, Any] = {}
    for i, info in enumerate(single):
        for key, value in info.items():
            infos = owner._add_info(infos, {key: value}, i)
    return infos


class Follower:
    """Checks each row of a vector env against its single environment.

    ``loose`` says by key, or for ``reward``, how far numbers may be off; others must be equal.

    Attributes:
        episode, count: Where each env is: number of the episode, steps taken in it.
        finished: Episodes that ended, the killed ones included.
        lost: Killed episodes.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        mode: AutoresetMode,
        loose: Mapping[str, float] = {},
    ) -> None:
        self.references, self.mode, self.loose = list(references), mode, loose
        self.num_envs = len(self.references)
        self.episode = [0] * self.num_envs
        self.count = [0] * self.num_envs
        self.due = [False] * self.num_envs
        self.finished = [0] * self.num_envs
        self.lost = [0] * self.num_envs
        self.last: list[Any] = [None] * self.num_envs

    def actions(self, ids: Iterable[int] | None = None) -> np.ndarray:
        """The next actions of the envs; any for one that is reset instead."""
        steps = [
            (i, 0 if self.due[i] else self.count[i])
            for i in (range(self.num_envs) if ids is None else ids)
        ]
        return np.stack([self.references[i].action(self.episode[i], step) for i, step in steps])

    def expect_reset(self, i: int, *, first: bool = False) -> tuple[Record, dict[str, Any]]:
        """What a reset of env i must give."""
        if first:
            self.episode[i] = 0
        elif self.last[i] is not None:
            self.episode[i] += 1
        self.count[i], self.due[i] = 0, False
        record = self.references[i][self.episode[i]][0]
        self.last[i] = record.obs
        return record, dict(record.info)

    def expect_step(self, i: int) -> tuple[Record, dict[str, Any]]:
        """What a step of env i must give."""
        if self.due[i]:
            assert self.mode == NEXT_STEP, "the test steps an ended env"
            return self.expect_reset(i)
        reference = self.references[i]
        self.count[i] += 1
        record = reference[self.episode[i]][self.count[i]]
        info = dict(record.info)
        self.last[i] = record.obs
        if record.ended:
            stats = reference.stats(self.episode[i])
            self.finished[i] += 1
            if self.mode == SAME_STEP:
                begun, fresh = self.expect_reset(i)
                info = {"final_obs": record.obs, "final_info": info, **fresh}
                record = record._replace(obs=begun.obs)
            else:
                self.due[i] = True
            info["episode_stats"] = stats
        return record, info

    def check_reset(self, result: tuple[Any, Any], *, first: bool = True) -> None:
        """Check the result of a reset of all envs."""
        expected = [self.expect_reset(i, first=first) for i in range(self.num_envs)]
        self._compare(result[0], result[1], [*expected])

    def check_masked_reset(self, result: tuple[Any, Any], mask: np.ndarray) -> None:
        """Check the result of a reset of some envs: the others' observations stay, without info."""
        expected = []
        for i in range(self.num_envs):
            if mask[i]:
                expected.append(self.expect_reset(i))
            else:
                expected.append((Record(self.last[i], 0.0, False, False, {}), {}))
        self._compare(result[0], result[1], expected)

    def check_step(
        self,
        result: tuple[Any, ...],
        *,
        lost: Sequence[int] = (),
        ids: Sequence[int] | None = None,
        reset: Sequence[int] = (),
    ) -> None:
        """Check the result of a step, or of a recv whose rows are the envs ``ids``.

        Envs in ``lost`` must be as the fault rule says; those in ``reset`` were sent to a reset.
        """
        obs, rewards, terminations, truncations, infos = result
        chosen = list(range(self.num_envs)) if ids is None else list(ids)
        for name, array, dtype in (
            ("rewards", rewards, np.float64),
            ("terminations", terminations, np.bool_),
            ("truncations", truncations, np.bool_),
        ):
            assert array.dtype == dtype and array.shape == (len(chosen),), name
        infos = dict(infos)
        if ids is not None:
            assert infos["env_id"].dtype == np.int64
            assert infos["env_id"].tolist() == chosen
            infos.pop("env_id"), infos.pop("_env_id", None)
        restarted = infos.pop("worker_restarted", None)
        mask = infos.pop("_worker_restarted", None)
        expected: list[tuple[Record, dict[str, Any]] | None] = []
        for r, i in enumerate(chosen):
            if i in lost and not (self.due[i] and self.mode == NEXT_STEP):
                assert mask is not None and mask[r] and restarted[r], f"env {i}: worker_restarted"
                self._check_lost(r, i, obs, infos)
                flags = (rewards[r], terminations[r], truncations[r])
                assert flags == (0.0, False, True), f"env {i}: {flags}"
                expected.append(None)
                continue
            if i not in lost:
                assert mask is None or not (mask[r] or restarted[r]), f"env {i} was not restarted"
            record, info = self.expect_reset(i) if i in reset else self.expect_step(i)
            flags = (rewards[r], terminations[r], truncations[r])
            where = f"env {i}, episode {self.episode[i]}, step {self.count[i]}: {flags}"
            assert flags[1:] == (record.terminated, record.truncated), where
            assert abs(flags[0] - record.reward) <= self.loose.get("reward", 0.0), where
            expected.append((record, info))
        self._compare(obs, infos, expected)

    def _check_lost(self, r: int, i: int, obs: Any, infos: Mapping[str, Any]) -> None:
        """The fault rule: the killed episode truncates, the next one is (seed, episode + 1)."""
        before, info = self.last[i], info_row(infos, r)
        assert "episode_stats" not in info, f"env {i}: a killed episode has no statistics"
        self.lost[i] += 1
        self.finished[i] += 1
        final = info
        if self.mode == SAME_STEP:
            self._same(info["final_obs"], before, f"env {i} final_obs")
            final = info["final_info"]
            begun, fresh = self.expect_reset(i)
            self._same(rows(obs, r), begun.obs, f"env {i} first observation of the next episode")
            known = {key: info[key] for key in fresh}
            assert_same(known, fresh, f"env {i} info of the next episode")
        else:
            assert "final_obs" not in info
            self._same(rows(obs, r), before, f"env {i} last observation")
            self.due[i] = True
        assert not final["success"] and not final["is_success"], f"env {i}: success"
        assert final.get("executed_steps", 0) == 0, f"env {i}: executed_steps"

    def _compare(
        self, obs: Any, infos: Mapping[str, Any], expected: list[tuple[Record, dict] | None]
    ) -> None:
        for r, item in enumerate(expected):
            if item is not None:
                self._same(rows(obs, r), item[0].obs, f"row {r} observation")
        if all(item is not None for item in expected):
            self._same(infos, batch_infos([item[1] for item in expected if item]), "infos")
            return
        for r, item in enumerate(expected):
            if item is not None:
                self._same(info_row(infos, r), info_row(batch_infos([item[1]]), 0), f"info {r}")

    def _same(self, actual: Any, expected: Any, where: str) -> None:
        assert_same(actual, expected, where, self.loose)


def follower(num_envs, seed, mode, per_env=None, *, keep=True, **kwargs):
    """References without the faults."""
    references = []
    for i in range(num_envs):
        own = {key: value for key, value in (per_env or {}).get(i, {}).items() if key == "script"}
        env = StubEnv(i, **{**kwargs, **own})
        references.append(Reference(env, seed + i, partial(stub_action, seed + i), keep=keep))
    return Follower(references, mode)


def begin(envs, seed, per_env=None, **kwargs):
    """Reset vector envs of stubs; return their references, which have begun as well."""
    mode = envs.metadata["autoreset_mode"]
    expected = follower(envs.num_envs, seed, mode, per_env, **kwargs)
    expected.check_reset(envs.reset(seed=seed))
    return expected


def reset_due(envs, expected):
    """Reset what has ended, where DISABLED leaves that to the caller; restarts may be noted."""
    if expected.mode == DISABLED and any(expected.due):
        mask = np.array(expected.due)
        expected.check_masked_reset(plain_reset(envs.reset(options={"reset_mask": mask})), mask)


def advance(envs, expected, steps=1, lost=()):
    """Step, with the resets that DISABLED needs; the first step loses the envs ``lost``."""
    for step in range(steps):
        reset_due(envs, expected)
        expected.check_step(envs.step(expected.actions()), lost=() if step else lost)


def plain_reset(result):
    """A reset's result without the notes on restarts, which the contract leaves open there."""
    obs, infos = result
    dropped = ("worker_restarted", "_worker_restarted")
    return obs, {key: value for key, value in infos.items() if key not in dropped}


def follow(
    envs: Any,
    follower: Follower,
    seed: Any,
    episodes: int,
    *,
    stagger: Sequence[int] = (),
) -> None:
    """Play until each env has ended ``episodes`` episodes.

    The envs ``stagger`` are reset after the first step, so that not all end at the same time.
    """
    follower.check_reset(envs.reset(seed=seed))
    for step in range(200):
        if min(follower.finished) >= episodes:
            return
        reset = list(stagger) if step == 1 else []
        if follower.mode == DISABLED:
            reset += np.flatnonzero(follower.due).tolist()
        if reset:
            mask = np.isin(np.arange(follower.num_envs), reset)
            follower.check_masked_reset(envs.reset(options={"reset_mask": mask}), mask)
        follower.check_step(envs.step(follower.actions()))
    raise AssertionError(f"only {follower.finished} episodes after 200 steps")


def play_alike(
    envs: Any, expected: Any, seed: int, steps: int, *, meanwhile: Callable[[], object] = list
) -> Iterator[tuple[Any, ...]]:
    """Play two vector envs side by side and yield each step, which is the same of both.

    Args:
        envs: Ours; only it has statistics of episodes.
        expected: Gymnasium's.
        seed: Of their reset.
        steps: How many.
        meanwhile: Called after a step of ours, before what it returned is compared.
    """
    assert_same(envs.reset(seed=seed), expected.reset(seed=seed))
    rng, over = np.random.default_rng(0), np.zeros(envs.num_envs, bool)
    for _ in range(steps):
        if expected.metadata["autoreset_mode"] is DISABLED and over.any():
            options = [{"reset_mask": over.copy()} for _ in range(2)]
            assert_same(envs.reset(options=options[0]), expected.reset(options=options[1]))
        actions = rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        result = envs.step(actions)
        meanwhile()
        for key in ("episode_stats", "_episode_stats"):
            result[4].pop(key, None)
        assert_same(result, expected.step(actions))
        over = result[2] | result[3]
        yield result


def check_cells(result: tuple[Any, ...], cells: Sequence[str], image: Callable[..., Any]) -> None:
    """Compare a step of stub envs (``rich_info``) with one row of a hand-written table.

    A cell is ``"OBS REWARD FLAG INFO [<FINAL] [=STATS]"``: OBS and FINAL are "episode.step"; FLAG
    is "T" (terminated), "C" (truncated) or "-"; INFO says whose info it is: "step", "reset" or
    "lost" (the worker was restarted); STATS are return/length/success. What a cell does not name
    must not be there.
    """
    obs, rewards, terminations, truncations, infos = result
    for i, cell in enumerate(cells):
        source, reward, flag, kind, *more = cell.split()
        info, where = info_row(infos, i), f"env {i}: {cell}"
        _check_source(rows(obs, i), source, image, where)
        assert float(rewards[i]) == float(reward), where
        assert (bool(terminations[i]), bool(truncations[i])) == (flag == "T", flag == "C"), where
        final = [item[1:] for item in more if item[0] == "<"]
        stats = [item[1:] for item in more if item[0] == "="]
        # In SAME_STEP a lost row carries the info of the next episode, else that of the lost step.
        fresh = kind == "reset" or (kind == "lost" and bool(final))
        assert ("fresh" in info) == fresh and ("pose" in info) == (kind == "step"), where
        assert info.get("executed_steps") == (4 if kind == "step" else 0), where
        assert ("worker_restarted" in info) == (kind == "lost"), where
        assert ("final_obs" in info) == ("final_info" in info) == bool(final), where
        assert info["success"] == info["is_success"] == (flag == "T" and not final), where
        for name in final:
            _check_source(info["final_obs"], name, image, where)
            assert info["final_info"]["success"] == (flag == "T"), where
            lost = kind == "lost"
            assert info["final_info"]["executed_steps"] == (0 if lost else 4), where
            assert ("pose" in info["final_info"]) == (not lost), where
            assert "fresh" not in info["final_info"], where
        assert ("episode_stats" in info) == bool(stats), where
        for text in stats:
            found = info["episode_stats"]
            assert f"{found['return']}/{found['length']}/{int(found['success'])}" == text, where


def _check_source(observation: Any, source: str, image: Callable[..., Any], where: str) -> None:
    seed, episode, step, _ = observation["proprio"]
    assert f"{episode:.0f}.{step:.0f}" == source, where
    assert_same(observation["image"], image(int(seed), int(episode), int(step)), where)


@contextmanager
def stub_vecs(
    kind: Any = LiberoVectorEnv, **always: Any
) -> Iterator[Callable[..., LiberoVectorEnv]]:
    """Make vector envs of stubs that are closed at the end.

    ``stubs``: a factory, or arguments of some of the stubs.
    """
    made = []

    def make(num_envs: int = 3, stubs: Any = None, **kwargs: Any) -> LiberoVectorEnv:
        stub = {key: kwargs.pop(key) for key in ("script", "rich_info") if key in kwargs}
        factory = stubs if callable(stubs) else stub_factory(stubs, **stub)
        made.append(kind(num_envs, env_factory=factory, **{"workers": 2, **always, **kwargs}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()
    made.clear()
