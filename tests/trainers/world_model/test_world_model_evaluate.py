"""Figures by hand, and probes of states whose content is known."""

import math

import numpy as np
import pytest
import torch
from world_model_toys import cue_sequences, toy_model, toy_sequences

from vla_gym_trainers.world_model.evaluate import (
    _coarse,
    bootstrap,
    copy_cross_entropy,
    evaluate,
    memory_states,
    psnr,
    recall,
    stay_rate,
)


def test_copying_by_hand():
    same = np.array([[True, True, False, True], [False, False, False, False]])
    # Of 256 tokens: staying has 0.6, each of the others 0.4 / 255.
    flip = -math.log(0.4 / 255)
    expected = [(3 * -math.log(0.6) + flip) / 4, flip]
    assert copy_cross_entropy(0.6, 256, same).tolist() == pytest.approx(expected)
    # The fitted probability is the best one.
    data = cue_sequences(6)
    data.tokens[np.flatnonzero(data.episode == 2)] = 3
    rows = data.transitions()
    stays = data.tokens[rows] == data.tokens[rows + 1]
    best = copy_cross_entropy(stay_rate(data), 6, stays).mean()
    for other in (0.5, 1.5):
        assert copy_cross_entropy(other * stay_rate(data), 6, stays).mean() > best


def test_psnr_by_hand():
    truth = np.full((3, 4, 4, 3), 100, np.uint8)
    shown = truth.copy()
    shown[0] += 10
    shown[1, 0, 0, 0] += 1
    expected = [20 * math.log10(25.5), 10 * math.log10(255**2 * 48), 10 * math.log10(255**2 * 48)]
    assert psnr(shown, truth).tolist() == pytest.approx(expected)


def test_the_bootstrap_draws_whole_episodes():
    values, episode = np.array([1.0] * 50 + [0.0] * 50), np.repeat(np.arange(2), 50)
    found = bootstrap(values, episode)
    # Of two episodes one is drawn twice half of the time.
    assert found == {"mean": 0.5, "low": 0.0, "high": 1.0}
    many = bootstrap(values, np.arange(100))
    assert 0.38 < many["low"] < 0.43 and 0.57 < many["high"] < 0.62


def test_figures_of_a_model_are_those_of_a_loop():
    model, data = toy_model(), toy_sequences()
    found = evaluate(model, data, 0.3)
    last, losses, right = data.last_actions(), [], []
    for first, end in data.bounds():
        state = model.initial_state(1)
        for row in range(first, end):
            one = (torch.from_numpy(x[row : row + 1]) for x in (data.features, data.proprio, last))
            state = model.update(state, *one)
            if row + 1 < end:
                inputs = (torch.from_numpy(x[row : row + 1]) for x in (data.tokens, data.actions))
                log_p = model.logits(state, *inputs).log_softmax(-1)[0]
                after = data.tokens[row + 1]
                losses.append(-log_p[np.arange(4), after].mean().item())
                right.append((log_p.argmax(-1).numpy() == after).mean())
        final = memory_states(model, data)[end - 1]
        torch.testing.assert_close(state[0], final)
    assert found["n_frames"] == len(losses) == 26
    assert found["memory"]["cross_entropy"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["memory"]["accuracy"] == pytest.approx(np.mean(right))


def test_recall_tells_what_a_state_holds_of_an_earlier_frame(monkeypatch):
    """A state that keeps the coarse picture of four steps ago, and one that has the present one."""
    train, test = (toy_sequences((20,) * 12, seed) for seed in (0, 1))

    def states(_, data, *, reset):
        present = torch.from_numpy(_coarse(data.frames))
        return present if reset else present.roll(4, dims=0)

    monkeypatch.setattr("vla_gym_trainers.world_model.evaluate.memory_states", states)
    found = recall(toy_model(), train, test)
    assert list(found) == ["1", "4", "8", "16"]
    assert found["4"]["n_steps"] == 12 * 16 and found["4"]["n_episodes"] == 12
    assert found["4"]["memory"] > 0.99 and found["4"]["no_memory"] < 0.1
    assert found["4"]["memory_gain"]["low"] > 0.8
    assert found["8"]["memory"] < 0.1
