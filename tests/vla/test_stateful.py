"""The protocol of stateful VLAs, and what keeps their states by environment."""

import pickle

import numpy as np
import pytest
import torch
from memory_vla import GRUVLA, STATE
from mini_vla import random_inputs
from on_policy_toys import tiny_vla
from trees import assert_same
from world_model_toys import OneView

from vla_gym.errors import ConfigError
from vla_gym.vla import FrozenVLA, StatefulVLA, VLAOutput, load
from vla_gym.vla.files import resolve_weights
from vla_gym.vla.stateful import VLAMemory, is_stateful, require_stateful
from vla_gym_trainers.rl_token.vla_states import infer_hidden


@pytest.fixture
def vla():
    return GRUVLA(tiny_vla(), row_by_row=True)


def some(inputs, rows):
    """Some rows of images, instructions and proprioception."""
    images, texts, proprio = inputs
    picked = {name: array[rows] for name, array in images.items()}
    return picked, [texts[row] for row in rows], proprio[rows]


def test_infer_is_a_step_from_the_initial_state(vla):
    inputs = random_inputs(3)
    output, after = vla.infer_with_state(*inputs, vla.initial_state(3))
    assert_same(vla.infer(*inputs), output)
    again, twice = vla.infer_with_state(*inputs, after)
    assert (again.hidden != output.hidden).any() and (again.actions != output.actions).any()
    assert twice["frames"].tolist() == [2, 2, 2]


def test_a_class_path_loads_a_stateful_vla():
    path = resolve_weights("mini")
    vla = load(f"class:memory_vla:GRUVLA:{path}?seed=3")
    assert isinstance(vla, StatefulVLA) and isinstance(vla, FrozenVLA) and is_stateful(vla)
    inputs = random_inputs(2)
    assert_same(vla.infer(*inputs), GRUVLA(load("mini"), seed=3).infer(*inputs))


def test_who_has_no_state():
    mini = tiny_vla()
    assert not is_stateful(mini) and not isinstance(mini, StatefulVLA)
    with pytest.raises(ConfigError, match="A probe needs a stateful VLA, and 'mini' lacks initial"):
        require_stateful(mini, "A probe")
    memory = VLAMemory(mini)
    assert memory.at([0, 1]) is mini and memory.at([0], ended=[1]) is mini
    with pytest.raises(ConfigError, match="belongs to another VLA: expected {} of 'mini'"):
        memory.check({"h": np.zeros(STATE)})


def test_half_a_protocol_is_refused():
    """It would be played without its state."""

    class Half:
        name, horizon, num_hidden_tokens, hidden_size, image_size = "half", 8, 8, 32, 64

        def infer(self, images, instructions, proprio): ...

        def infer_with_state(self, images, instructions, proprio, state): ...

    with pytest.raises(ConfigError, match="'half' lacks initial_state, cameras"):
        VLAMemory(Half())


def test_states_are_carried_by_environment(vla):
    """Each environment's episode is what it would be alone, whatever rows come together."""
    memory, frames = VLAMemory(vla), random_inputs(6)
    state = vla.initial_state(1)
    alone = []
    for row in (0, 1, 2):
        output, state = vla.infer_with_state(*some(frames, [row]), state)
        alone.append(output)
    first = memory.at([7, 2], [True, True]).infer(*some(frames, [0, 3]))
    assert_same([part[:1] for part in first], alone[0])
    memory.at([2]).infer(*some(frames, [4]))
    second = memory.at([2, 7]).infer(*some(frames, [5, 1]))
    assert_same([part[1:] for part in second], alone[1])
    # The episode of 7 ends and another begins: its last frame is still seen in the first one.
    third = memory.at([7], [True], ended=[7]).infer(*some(frames, [0, 2]))
    assert_same([part[1:] for part in third], alone[2])
    assert_same([part[:1] for part in third], alone[0])
    assert [memory.save(i)["frames"] for i in (7, 2)] == [1, 3]


def test_an_episode_that_was_not_seen_from_its_beginning_is_refused(vla):
    memory = VLAMemory(vla)
    memory.at([0], [True])
    with pytest.raises(ConfigError, match="environment 1 from its beginning"):
        memory.at([0, 1], [False, False])
    with pytest.raises(ConfigError, match="environment 3 from its beginning"):
        memory.at([0], ended=[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_states_go_on_in_another_memory(vla, dtype):
    class Half(GRUVLA):
        def initial_state(self, n):
            return {name: rows.to(dtype) for name, rows in super().initial_state(n).items()}

        def infer_with_state(self, images, instructions, proprio, state):
            state = {"h": state["h"].float(), "frames": state["frames"].long()}
            output, after = super().infer_with_state(images, instructions, proprio, state)
            return output, {name: rows.to(dtype) for name, rows in after.items()}

    vla, frames = Half(tiny_vla()), random_inputs(2)
    memory, other = VLAMemory(vla), VLAMemory(vla)
    memory.at([0], [True]).infer(*some(frames, [0]))
    saved = pickle.loads(pickle.dumps(memory.save(0)))
    assert all(type(array) is np.ndarray for array in saved.values()) and saved["h"].any()
    expected = memory.at([0]).infer(*some(frames, [1]))
    other.load(5, saved)
    assert_same(other.at([5]).infer(*some(frames, [1])), expected)
    with pytest.raises(ConfigError, match="belongs to another VLA"):
        other.check({**saved, "h": np.zeros(STATE + 1)})
    assert not other.save(6)["h"].any()


def test_states_of_another_form_are_refused(vla):
    vla.initial_state = lambda n: {"h": torch.zeros(1, n)}
    with pytest.raises(ConfigError, match="2 rows each, got {'h': \\(1, 2\\)}"):
        VLAMemory(vla)
    del vla.initial_state
    memory = VLAMemory(vla)
    output = vla.infer(*random_inputs(1))
    wrong = VLAOutput(*output), {"h": torch.zeros(1, STATE + 1)}
    vla.infer_with_state = lambda *_: wrong
    with pytest.raises(ConfigError, match="like the one that it was given"):
        memory.at([0], [True]).infer(*random_inputs(1))


def test_states_for_the_rl_token_are_seen_one_after_the_other(vla):
    images, texts, proprio = random_inputs(3)
    stacked = np.stack([images["agentview"], images["wrist"]], axis=1)
    hidden = infer_hidden(vla, stacked, texts[0], proprio)
    state = vla.initial_state(1)
    for row in range(3):
        seen = {name: array[row : row + 1] for name, array in images.items()}
        args = seen, texts[:1], proprio[row : row + 1]
        output, state = vla.infer_with_state(*args, state)
        assert torch.equal(hidden[row], output.hidden[0].half())


def test_a_vla_of_one_view_is_shown_that_one_for_the_rl_token():
    images, texts, proprio = random_inputs(3)
    stacked = np.stack([images["agentview"], images["wrist"]], axis=1)
    assert infer_hidden(OneView(), stacked, texts[0], proprio).shape == (3, 1, 32)  # it checks


def test_hidden_states_that_float16_does_not_hold_are_refused(monkeypatch):
    images, texts, proprio = random_inputs(3)
    stacked = np.stack([images["agentview"], images["wrist"]], axis=1)
    output = VLAOutput(torch.full((3, 1, 32), 1e6), torch.zeros(3, 8, 7))
    monkeypatch.setattr(OneView, "infer", lambda *_: output)
    with pytest.raises(ConfigError, match="'one' made hidden states .* beyond 65,504"):
        infer_hidden(OneView(), stacked, texts[0], proprio)
