"""Seconds of the parts of a run."""

import time

import pytest

from vla_gym_trainers.runs.stopwatch import Stopwatch


def test_parts_add_up_until_they_are_read():
    clock = Stopwatch()
    clock.add("learn", 1.5)
    clock.add("learn", 0.25)
    with pytest.raises(KeyError), clock("wait"):
        time.sleep(0.02)
        raise KeyError  # time that ended in an error counts, too
    seconds = clock.lap()
    assert seconds["learn"] == 1.75 and 0.02 <= seconds["wait"] < 5.0
    assert set(seconds) == {"learn", "wait"} and clock.lap() == {}
