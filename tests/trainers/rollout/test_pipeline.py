"""How far collecting is ahead of learning: which weights act, bounds, pauses, errors, state."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest

from vla_gym.errors import WorkerError
from vla_gym_trainers.rollout.pipeline import Pipeline

Block = tuple[int, int]


class Learner:
    """Counts its updates; a block is (weights that acted, number of the block)."""

    def __init__(self, ahead: int, **kwargs: Any) -> None:
        self.updates, self.threads = 0, set[int]()
        self.pipeline: Pipeline[int, Block] = Pipeline(
            self.collect, lambda: self.updates, ahead=ahead, **{"deadline": 30.0, **kwargs}
        )

    def collect(self, weights: int, index: int) -> Block:
        self.threads.add(threading.get_ident())
        return weights, index

    def run(self, blocks: int) -> list[tuple[Block, int]]:
        """Learn from some blocks; return them with their staleness."""
        seen = []
        for _ in range(blocks):
            block, staleness = self.pipeline.next()
            assert staleness == self.updates - block[0]
            seen.append((block, staleness))
            self.updates += 1
            self.pipeline.publish()
        return seen


def test_in_turn_the_newest_weights_act() -> None:
    learner = Learner(ahead=0)
    with learner.pipeline:
        assert learner.run(3) == [((0, 0), 0), ((1, 1), 0), ((2, 2), 0)]
    assert learner.threads == {threading.get_ident()}


def test_one_ahead_acts_with_the_weights_of_one_update_ago_whatever_the_timing() -> None:
    learner = Learner(ahead=1)
    with learner.pipeline:
        assert learner.run(4) == [((0, 0), 0), ((0, 1), 1), ((1, 2), 1), ((2, 3), 1)]
    assert len(learner.threads) == 1
    assert threading.get_ident() not in learner.threads


@pytest.mark.parametrize("slow", ["collect", "learn"])
def test_many_ahead_are_bounded_and_use_the_newest_weights(slow: str) -> None:
    learner = Learner(ahead=3)
    begun: list[int] = []

    def collect(weights: int, index: int) -> Block:
        begun.append(index)
        time.sleep(0.02 * (slow == "collect"))
        return weights, index

    learner.pipeline = Pipeline(collect, lambda: learner.updates, ahead=3, deadline=30.0)
    staleness = []
    with learner.pipeline:
        for number in range(12):
            block, stale = learner.pipeline.next()
            assert block[1] == number
            staleness.append(stale)
            time.sleep(0.02 * (slow == "learn"))
            assert begun[-1] <= number + 3
            learner.updates += 1
            learner.pipeline.publish()
    assert max(staleness) <= 3
    assert staleness[-1] == (3 if slow == "learn" else 1)


def test_the_limit_and_a_caller_who_looks_first() -> None:
    learner = Learner(ahead=2, limit=3)
    with learner.pipeline:
        learner.run(3)
        time.sleep(0.05)
        assert learner.pipeline.state()["ready"] == []
    looking = Learner(ahead=1)
    with looking.pipeline as pipeline:
        assert pipeline.next(begin=False)[0] == (0, 0)
        looking.updates = 5
        pipeline.begin()
        assert pipeline.next()[0] == (5, 1)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("pause_at", [1, 2, 5])
def test_goes_on_from_a_state_as_if_it_had_never_stopped(ahead: int, pause_at: int) -> None:
    whole = Learner(ahead)
    with whole.pipeline:
        expected = whole.run(6)
    for limit in (None, pause_at):
        first = Learner(ahead, limit=limit)
        with first.pipeline as pipeline:
            seen = first.run(pause_at)
            with pipeline.paused():
                state = pickle.loads(pickle.dumps(pipeline.state()))
        for kept in (state, first.pipeline.state()):  # in the middle, and at the end
            second = Learner(ahead, state=kept)
            second.updates = pause_at
            with second.pipeline:
                assert seen + second.run(6 - pause_at) == expected


def test_nothing_is_collected_while_paused_and_nothing_is_lost() -> None:
    learner = Learner(ahead=4)
    with learner.pipeline as pipeline:
        learner.run(1)
        with pipeline.paused():
            before = pipeline.state()["index"]
            time.sleep(0.05)
            assert pipeline.state()["index"] == before
        assert [block[1] for block, _ in learner.run(6)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_errors_come_after_the_blocks_before(ahead: int) -> None:
    def collect(weights: int, index: int) -> Block:
        if index == 2:
            raise RuntimeError("the simulator broke")
        return weights, index

    pipeline = Pipeline(collect, lambda: 0, ahead=ahead, deadline=30.0)
    with pytest.raises(RuntimeError, match="simulator broke"), pipeline:
        assert [pipeline.next()[0][1] for _ in range(2)] == [0, 1]
        pipeline.next()
    if ahead:
        with pytest.raises(RuntimeError, match="simulator broke"), pipeline.paused():
            raise AssertionError
    state = pipeline.state()
    assert state["ready"] == [] and state["index"] == 2


def test_deadlines() -> None:
    release = threading.Event()

    def collect(weights: int, index: int) -> Block:
        assert release.wait(30)
        return weights, index

    with Pipeline(collect, lambda: 0, ahead=1, deadline=0.05) as pipeline:
        with pytest.raises(WorkerError, match=r"within 0\.05 seconds"):
            pipeline.next()
        with pytest.raises(WorkerError, match="not collected"), pipeline.paused():
            raise AssertionError
        release.set()
        assert pipeline.next()[0] == (0, 0)  # late, not lost
