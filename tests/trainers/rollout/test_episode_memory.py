"""What is carried from chunk to chunk: rows by environment, apart from who gave or takes them."""

import numpy as np

from vla_gym_trainers.rollout.memory import EpisodeMemory

SHAPES = {"memory": (2,), "previous_action": (3, 7)}


def test_rows_belong_to_their_environments():
    carried = EpisodeMemory(SHAPES)
    memory, chunks = np.arange(4.0).reshape(2, 2), np.ones((2, 3, 7))
    carried.keep([5, 2], memory, chunks)
    rows = carried.rows(np.array([2, 0, 5]))
    assert rows["memory"].tolist() == [[2, 3], [0, 0], [0, 1]]
    assert rows["previous_action"].shape == (3, 3, 7) and rows["memory"].dtype == np.float32
    assert not rows["previous_action"][1].any() and rows["previous_action"][[0, 2]].all()
    carried.cut([2, 9], [1, 1])
    assert carried.rows([2])["previous_action"][0].any(axis=1).tolist() == [True, False, False]
    rows["memory"][:], memory[:] = 9.0, 9.0
    assert chunks.all() and carried.rows([5])["memory"].tolist() == [[0, 1]]
    carried.forget([5, 7])
    assert not carried.rows([5])["memory"].any() and carried.rows([2])["memory"].any()


def test_without_memory_nothing_is_carried():
    carried = EpisodeMemory({})
    assert carried.rows([0, 1]) == {}
    carried.forget([0])
