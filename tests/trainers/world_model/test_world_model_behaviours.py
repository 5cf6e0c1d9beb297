"""What is said of behaviours: cells visited, reward terms of steps, and what a recorder keeps."""

import numpy as np
import torch
from world_model_toys import ACTION, CHUNK_LEN, toy_model, toy_sequences

from vla_gym_trainers.world_model.behaviours import (
    by_behaviour,
    cells_visited,
    state_coverage,
    step_terms,
)
from vla_gym_trainers.world_model.evaluate import memory_states
from vla_gym_trainers.world_model.memory import StepRecorder
from vla_gym_trainers.world_model.windows import Windows


def test_cells_are_counted_once_for_each_group():
    positions = np.array([[0.02, 0.0], [0.04, 0.04], [0.06, 0.0], [-0.001, 0.0], [np.nan, 0]])
    assert cells_visited(positions, np.zeros(5, int)) == 3
    assert cells_visited(positions, np.array([0, 1, 1, 0, 2])) == 4
    assert cells_visited(positions[:0], np.zeros(0, int)) == 0


def test_coverage_counts_the_arm_and_the_objects_that_moved():
    data = toy_sequences((4, 3))  # two control steps a row but for the last one of each
    data.proprio[:, :3] = 0.001
    data.proprio[[1, 2], 0] = 0.07, 0.12  # the first row is where it begins, not where it went
    data.objects = np.full((7, 2, 3), np.nan)
    data.objects[:, 0] = 0.5
    data.objects[2:4, 0, 0] = 0.501, 0.57  # a nudge within 2 cm, and a move
    data.objects[4:, 0] = 0.9  # elsewhere in the next episode, from its beginning on
    rows = data.transitions()
    found = state_coverage(data, rows)
    assert found == {"coverage": 3 / 5, "object_coverage": 1 / 5}
    assert state_coverage(data, rows[:1]) == {"coverage": 1.0, "object_coverage": 0.0}
    data.objects = data.objects[:, :0]
    assert state_coverage(data, rows)["object_coverage"] == 0.0


def test_terms_of_steps_are_those_that_an_environment_pays():
    model, data = toy_model(), toy_sequences((5, 4))
    states, rows = memory_states(model, data), data.transitions()
    found = step_terms(model, data, rows)
    change = (states[1] - states[0]).square().mean().sqrt()
    np.testing.assert_allclose(found["memory_divergence"][0], change, rtol=1e-6)
    tokens, action = torch.from_numpy(data.tokens), torch.from_numpy(data.actions)
    log_p = model.logits(states[2:3], tokens[2:3], action[2:3])[0].log_softmax(-1)
    error = -log_p[torch.arange(4), tokens[3]].mean() / np.log(6)
    np.testing.assert_allclose(found["prediction_error"][2], error, rtol=1e-5)
    assert all(len(values) == 7 for values in found.values())


def test_paired_behaviours_have_as_many_steps():
    data = toy_sequences((5, 4, 3, 8))
    data.behaviour[:] = np.repeat([0, 0, 3, 3], [5, 4, 3, 8])
    steps = {k: v["steps"] for k, v in by_behaviour(toy_model(), data).items()}
    assert steps == {"random": 7, "explorer": 9}
    steps = {k: v["steps"] for k, v in by_behaviour(toy_model(), data, paired=True).items()}
    assert steps == {"random": 5, "explorer": 5}


def rows_of(numbers, actions):
    column = np.array(numbers, np.float32)[:, None]
    chunks = np.repeat(np.array(actions, np.float32)[:, None], CHUNK_LEN * ACTION, axis=1)
    return {
        "features": column,
        "tokens": column.astype(np.int64),
        "proprio": column.copy(),
        "actions": chunks,
    }


def test_a_recorder_keeps_episodes_in_order_with_the_action_that_follows():
    recorder = StepRecorder(CHUNK_LEN)
    nobody = np.zeros(0, np.int64)
    recorder.take(nobody, np.array([0, 1]), rows_of([10, 20], [0, 0]))
    recorder.take(np.array([0, 1]), nobody, rows_of([11, 21], [1, 2]))
    assert recorder.pop() is None
    cut = rows_of([12, 22, 30], [3, 4, 0])
    cut["actions"][0, ACTION:] = 0.0  # the episode ended after one of two control steps
    recorder.take(np.array([0, 1]), np.array([0]), cut)
    found = recorder.pop()
    assert found.features.ravel().tolist() == [10, 11, 12] and found.episode.tolist() == [0, 0, 0]
    assert found.actions[:, 0].tolist() == [1, 3, 0] and found.executed.tolist() == [2, 1, 0]
    recorder.take(nobody, np.array([0, 1]), rows_of([40, 50], [0, 0]))  # 30 had no step
    found = recorder.pop()
    assert found.features.ravel().tolist() == [20, 21, 22] and recorder.pop() is None


def test_a_recorder_leaves_out_episodes_with_numbers_that_are_not_finite():
    recorder = StepRecorder(CHUNK_LEN)
    both, nobody = np.array([0, 1]), np.zeros(0, np.int64)
    recorder.take(nobody, both, rows_of([10, 20], [0, 0]))
    broken = rows_of([11, 21], [1, 2])
    broken["proprio"][0, 0] = np.nan
    recorder.take(both, both, {k: np.concatenate([v, v]) for k, v in broken.items()})
    assert recorder.pop().features.ravel().tolist() == [20, 21]


def test_windows_start_from_the_states_that_they_are_given():
    data = toy_sequences((4, 5))
    windows = Windows(data, 2, 64, 3, 0, sequential=False)
    states = torch.arange(9.0)[:, None].repeat(1, 3) + 1.0
    windows.store(states)
    window, before = windows.next()
    rows = window.features[:, 0, 0]
    for first, end in data.bounds():
        for row in range(first, end - 2):
            here = rows == row
            assert here.any()
            assert (before[here] == (0.0 if row == first else float(row))).all()
