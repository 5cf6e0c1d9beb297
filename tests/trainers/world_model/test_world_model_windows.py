"""Alignment by row number, where windows begin and with which state, where gradients end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world_model_toys import cue_sequences, toy_model, toy_sequences

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.evaluate import evaluate, memory_states, stay_rate
from vla_gym_trainers.world_model.losses import Window, states_along, window_loss
from vla_gym_trainers.world_model.windows import Windows, check_length


def windows(length=4, batch_size=2, sequential=True, seed=0, data=None):
    data = toy_sequences() if data is None else data
    return Windows(data, length, batch_size, 8, seed, sequential=sequential)


@pytest.mark.parametrize("sequential", [True, False])
def test_the_token_predicted_at_a_step_is_the_next_frames(sequential):
    """Row i has features i, tokens i, i + 1, ...; the chunk executed in it is i + 1 everywhere."""
    data, batch = toy_sequences(), windows(sequential=sequential)
    first, last = data.bounds()[:, 0], data.bounds()[:, 1] - 1
    seen = set()
    for _ in range(40):
        window, _ = batch.next()
        batch.keep(torch.zeros(2, 4, 8))
        rows = window.features[..., 0].long().numpy()
        for row, valid, tokens, after, action, before in zip(
            rows.ravel(),
            window.valid.flatten().tolist(),
            window.tokens.flatten(0, 1).numpy(),
            window.next_tokens.flatten(0, 1).numpy(),
            window.actions.flatten(0, 1)[:, 0].tolist(),
            window.last_actions.flatten(0, 1)[:, 0].tolist(),
            strict=True,
        ):
            np.testing.assert_array_equal(tokens, data.tokens[row])
            if valid:
                seen.add(int(row))
                np.testing.assert_array_equal(after, data.tokens[row + 1])
                assert action == row + 1
                assert before == (0 if row in first else row)
            else:
                assert row == last.max() - 1 or row + 1 in last
    assert seen == set(range(len(data))) - set(last.tolist())


def test_sequential_windows_follow_each_other_and_carry_the_state():
    data, batch = toy_sequences(), windows(batch_size=1)
    ends = {int(first): int(end) for first, end in data.bounds()}
    carried, expected = 0.0, None
    for number in range(1, 30):
        window, state = batch.next()
        row = int(window.features[0, 0, 0])
        if row in ends:
            assert not state.any(), "an episode begins without memory"
            end, carried = ends[row], 0.0
        else:
            assert row == expected and (state == carried).all()
        expected, carried = row + 4, float(number)
        assert window.valid[0].tolist() == [row + k < end - 1 for k in range(4)]
        batch.keep(torch.full((1, 4, 8), carried))
    assert batch.episodes > 5


def test_random_windows_begin_with_what_the_last_one_there_left():
    data, batch = toy_sequences(), windows(batch_size=3, sequential=False)
    first = set(data.bounds()[:, 0].tolist())
    stored = np.zeros(len(data))
    for number in range(1, 60):
        window, state = batch.next()
        rows = window.features[..., 0].long().numpy()
        assert window.valid.all(), "no episode is shorter than a window here"
        np.testing.assert_array_equal(state[:, 0].numpy(), stored[rows[:, 0]])
        assert all(stored[row] == 0.0 for row in first)
        batch.keep(torch.full((3, 4, 8), float(number)))
        for row in rows.ravel():
            if row + 1 not in data.bounds()[:, 1] - 1:
                stored[row + 1] = number
    assert (stored > 0).sum() > 15


def test_states_of_windows_go_on_bit_for_bit():
    for sequential in (True, False):
        one, other = (windows(sequential=sequential, seed=seed) for seed in (0, 5))
        for number in range(7):
            one.next()
            one.keep(torch.full((2, 4, 8), float(number)))
        other.restore(*one.state())
        for number in range(9):
            (a, before), (b, after) = one.next(), other.next()
            assert torch.equal(before, after)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            for batch in (one, other):
                batch.keep(torch.full((2, 4, 8), 100.0 + number))
        assert one.episodes == other.episodes


def test_sequences_shorter_than_a_window_are_refused_or_masked():
    with pytest.raises(ConfigError, match="bptt_length=12 steps and one more, the longest has 12"):
        check_length(toy_sequences(), 12)
    window, _ = windows(length=11, batch_size=8).next()
    assert window.valid.sum(1).tolist() == [
        {0: 9, 10: 6, 17: 11}[int(row)] for row in window.features[:, 0, 0]
    ]


def test_gradients_end_where_a_window_begins():
    """Exactly zero across it, not zero inside: of the loss at step t by the features at step k."""
    data, model = toy_sequences((9,)), toy_model()
    data.features[:] = np.random.default_rng(0).normal(size=data.features.shape)
    model.requires_grad_(True)
    features = torch.from_numpy(data.features).requires_grad_()
    last = torch.from_numpy(data.last_actions())
    fields = (data.proprio, data.tokens, data.actions)
    proprio, tokens, actions = (torch.from_numpy(x) for x in fields)

    def window(rows: slice) -> Window:
        after = slice(rows.start + 1, rows.stop + 1)
        inputs = (features[rows], proprio[rows], tokens[rows], last[rows])
        rest = (actions[rows], tokens[after], torch.ones(4, dtype=torch.bool))
        return Window(*(x[None] for x in (*inputs, *rest)))

    first = states_along(model, window(slice(0, 4)), model.initial_state(1))
    assert first.requires_grad
    # All but the last step's loss is masked out.
    second = window(slice(4, 8))
    second = second._replace(valid=torch.tensor([[False, False, False, True]]))
    loss, _, states = window_loss(model, second, first[:, -1])
    loss.backward()
    moved = features.grad.abs().sum(1)
    assert (moved[:4] == 0.0).all() and (moved[4:8] > 0.0).all()
    assert not states.requires_grad and (first[:, -1] != 0.0).all()


def train(model, data):
    model.train().requires_grad_(True)
    batch = Windows(data, 3, 8, model.state_size, 0, sequential=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        window, state = batch.next()
        loss, _, states = window_loss(model, window, state)
        batch.keep(states)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


#: Of eight predictions three need the bit, and a guess costs log 2.
GUESS = 3 / 8 * np.log(2)


def test_learns_what_needs_memory_over_windows():
    """A bit shown at an episode's beginning decides tokens up to two windows of three later.

    So the state that is carried brings it there.
    """
    model = train(toy_model(memory_hidden=16), cue_sequences())
    test = cue_sequences(20, seed=1)
    results = evaluate(model, test, stay_rate(cue_sequences()))
    assert results["n_frames"] == 160 and results["n_episodes"] == 20
    assert results["memory"]["cross_entropy"] < 0.1 * GUESS
    assert results["memory"]["accuracy"] > 0.99
    assert results["no_memory"]["cross_entropy"] > 0.9 * GUESS
    assert results["memory_gain"]["low"] > 0.5 * GUESS
    rows = test.bounds()[:, 0]
    same = memory_states(model, test)[rows] == memory_states(model, test, reset=True)[rows]
    assert same.all(), "an episode's first step has no memory either way"
