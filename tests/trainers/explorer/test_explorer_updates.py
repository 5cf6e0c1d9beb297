"""The world model's part of phase 3: what it learns from, how much, and what it does not forget."""

import numpy as np
import pytest
import torch
from world_model_toys import cue_sequences, toy_model, toy_sequences

from vla_gym_trainers.explorer.config import AdversarialConfig
from vla_gym_trainers.explorer.updates import WorldModelUpdates, trimmed

CONFIG = {
    "world_batch_size": 8,
    "world_bptt_length": 4,
    "world_learning_rate": 1e-2,
    "world_updates": 30,
    "teacher_share": 0.0,
}


def updates_of(taught=None, **changes):
    config = AdversarialConfig(**{**CONFIG, **changes})
    return WorldModelUpdates(toy_model(), config, taught)


def test_cycles_lower_the_error_on_the_explorers_data():
    updates = updates_of()
    data = cue_sequences(8)
    tokenizer = {k: v.clone() for k, v in updates.model.tokenizer.state_dict().items()}
    first = updates.cycle(data, 0)
    second = updates.cycle(None, 1)
    assert first["world_model/error_after"] < 0.7 * first["world_model/error_before"]
    assert second["world_model/loss"] < first["world_model/loss"]
    assert "world_model/error_before" not in second
    assert all(
        torch.equal(v, tokenizer[k]) for k, v in updates.model.tokenizer.state_dict().items()
    )


def test_gradients_are_taken_in_training_mode_alone():
    """CuDNN refuses the backward pass of a GRU that is in evaluation mode."""
    updates, modes = updates_of(world_updates=2), set()
    updates.model.gru.register_forward_hook(
        lambda gru, *_: modes.add((gru.training, torch.is_grad_enabled()))
    )
    updates.cycle(cue_sequences(4), 0)
    assert modes == {(True, True), (False, False)} and not updates.model.training


def test_phase_1s_data_keep_the_model_from_forgetting():
    known, new = cue_sequences(8), cue_sequences(8, seed=1)
    new.tokens[:] = 5  # elsewhere all is otherwise
    new.features[:] = 3.0
    errors = {}
    for share in (0.0, 0.5):
        updates = updates_of(known if share else None, teacher_share=share)
        updates._error(known)
        teaching = updates_of()
        teaching.cycle(known, 0)
        updates.model.load_state_dict(teaching.model.state_dict())
        for number in range(3):
            updates.cycle(new, number)
        errors[share] = updates._error(known)
    assert errors[0.5] < 0.8 * errors[0.0]


def test_a_replay_keeps_the_newest_whole_episodes():
    one, two = toy_sequences((4, 3)), toy_sequences((5,))
    found = trimmed([one, two], 8)
    assert found.episode.tolist() == [1] * 3 + [2] * 5 and len(found.frames) == 8
    assert trimmed([one, two], 9).episode.tolist() == [0] * 4 + [1] * 3 + [2] * 5
    assert len(trimmed([one, two], 2)) == 5  # the newest one stays
    assert len(trimmed([one.without_frames(), two.without_frames()], 8)) == 8


def test_without_long_episodes_or_updates_nothing_is_learnt():
    for changes in ({"world_bptt_length": 9}, {"world_updates": 0}):
        updates = updates_of(**changes)
        before = {k: v.clone() for k, v in updates.model.state_dict().items()}
        found = updates.cycle(toy_sequences((5, 4)), 0)
        assert all(torch.equal(v, before[k]) for k, v in updates.model.state_dict().items())
        assert found["world_model/error_after"] == found["world_model/error_before"]
        assert found["world_model/replay_steps"] == 7.0


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_cycle_is_a_function_of_seed_and_number(share):
    taught = cue_sequences(4, seed=2) if share else None
    ends = []
    for number in (3, 3, 4):
        updates = updates_of(taught, teacher_share=share, world_updates=2)
        updates.cycle(cue_sequences(4), number)
        ends.append(np.concatenate([p.detach().numpy().ravel() for p in updates._parameters]))
    assert (ends[0] == ends[1]).all() and (ends[0] != ends[2]).any()
