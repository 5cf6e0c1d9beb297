"""The model: rows, memory, files, and classes of somebody's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from trees import assert_same
from world_model_toys import ACTION, CHUNK_LEN, FEATURES, TellingVLA, toy_model

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.world_model.model import GRUWorldModel
from vla_gym_trainers.world_model.protocol import WorldModel, load_world_model


class OwnModel(GRUWorldModel):
    """Somebody's own class."""


class NoModel:
    """Lacks everything but the way to be loaded."""

    @classmethod
    def from_pretrained(cls, path: Path, device: str = "cpu") -> NoModel:
        del path, device
        return cls()


def inputs(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    proprio = torch.rand(count, 8, generator=generator)
    proprio[:, 3] += 3.0
    return {
        "features": torch.randn(count, FEATURES, generator=generator),
        "proprio": proprio,
        "last_action": torch.randn(count, CHUNK_LEN * ACTION, generator=generator),
    }


def test_a_row_depends_on_its_own_row_alone():
    model = toy_model(memory_num_layers=2)
    assert isinstance(model, WorldModel) and model.state_size == 8 * 2
    state, given = torch.randn(5, model.state_size), inputs(5)
    tokens = torch.randint(6, (5, 4))
    after = model.update(state, **given)
    logits = model.logits(after, tokens, given["last_action"])
    assert after.shape == state.shape and logits.shape == (5, 4, 6)
    for i in range(5):
        one = model.update(state[i : i + 1], **{k: v[i : i + 1] for k, v in given.items()})
        torch.testing.assert_close(one[0], after[i])
        alone = model.logits(one, tokens[i : i + 1], given["last_action"][i : i + 1])
        torch.testing.assert_close(alone[0], logits[i])


def test_the_state_is_that_of_a_gru_and_begins_at_zero():
    model = toy_model(memory_num_layers=2)
    state = model.initial_state(3)
    assert state.shape == (3, 16) and not state.any()
    steps = [inputs(3, seed) for seed in range(4)]
    for step in steps:
        state = model.update(state, **step)
    # torch's own recurrence over the same inputs.
    seen = []
    model.gru.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for step in steps:
        model.update(model.initial_state(3), **step)
    _, last = torch.nn.GRU.forward(model.gru, torch.cat(seen, dim=1))
    torch.testing.assert_close(state, last.transpose(0, 1).flatten(1))


def test_without_memory_only_the_present_step_counts():
    model, given = toy_model(memory_enabled=False), inputs(4)
    one = model.update(torch.randn(4, 8), **given)
    torch.testing.assert_close(one, model.update(model.initial_state(4), **given))
    with_memory = toy_model()
    assert not torch.allclose(
        with_memory.update(torch.ones(4, 8), **given),
        with_memory.update(with_memory.initial_state(4), **given),
    )


def test_features_are_the_mean_hidden_state():
    model = toy_model()
    views = {n: np.full((2, 4, 4, 3), i, np.uint8) for i, n in enumerate(("agentview", "wrist"))}
    blind = dict.fromkeys(("other",), np.zeros(0))  # a view that this VLA does not look at
    features = model.features(views | blind, ["open", "close it"], np.zeros((2, 8), np.float32))
    expected = [[0.0, 1 / 255, 4 / 20], [0.0, 1 / 255, 8 / 20]]
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-6)
    other = TellingVLA()
    other.hidden_size = 5
    with pytest.raises(ConfigError, match="3 features of the VLA 'mini', got 'telling' with 5"):
        model.use_vla(other)


def test_a_vla_that_is_a_module_does_not_become_a_part_of_the_model(tmp_path):
    class Module(torch.nn.Module, TellingVLA):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.zeros(1))

    model, own = toy_model(), Module()
    before = model.state_dict().keys()
    model.use_vla(own)
    assert model.vla is own and model.state_dict().keys() == before
    model.save_pretrained(tmp_path)
    GRUWorldModel.from_pretrained(tmp_path)


def test_proprioception_has_no_jump_where_the_hand_points_down():
    """The axis-angle flips its sign there; the state must not move."""
    model, given = toy_model(), {key: value[:1].repeat(2, 1) for key, value in inputs(1).items()}
    given["proprio"][:, 3:6] = torch.tensor([[np.pi - 1e-4, 0.0, 0.0], [-np.pi + 1e-4, 0.0, 0.0]])
    after = model.update(model.initial_state(2), **given)
    torch.testing.assert_close(after[0], after[1], atol=1e-3, rtol=0)


def test_files_give_the_same_model(tmp_path):
    model = toy_model(memory_num_layers=2)
    model.fit_scale(np.random.rand(20, FEATURES).astype(np.float32), inputs(20)["proprio"].numpy())
    model.save_pretrained(tmp_path)
    found = load_world_model(tmp_path)
    assert isinstance(found, GRUWorldModel) and found.sizes == model.sizes
    assert not any(p.requires_grad for p in found.parameters()) and not found.training
    assert_same(found.state_dict(), model.state_dict())
    states = [m.update(m.initial_state(2), **inputs(2)) for m in (model, found)]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "vla_gym_mini"}, "holds no world model"),
        ({"memory_hidden": 9}, "7 of another shape: gru"),
        ({"colour": "red"}, "unknown keys \\['colour'\\]"),
        ({"width": 9}, "width divisible by num_heads"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, changes, text):
    toy_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(WeightsError, match=text):
        load_world_model(tmp_path)


def test_damaged_or_missing_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="config.json does not exist"):
        load_world_model(tmp_path)
    toy_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(WeightsError, match="corrupt"):
        load_world_model(tmp_path)


def test_a_class_of_ones_own_but_never_from_a_file(tmp_path):
    toy_model().save_pretrained(tmp_path)
    spec = f"class:{__name__}:OwnModel:{tmp_path}"
    assert type(load_world_model(spec)) is OwnModel
    with pytest.raises(ConfigError, match="comes from a file"):
        load_world_model(spec, allow_class=False)
    with pytest.raises(WeightsError, match="NoModel lacks members of the protocol"):
        load_world_model(f"class:{__name__}:NoModel:{tmp_path}")
    with pytest.raises(ConfigError, match="Cannot import"):
        load_world_model(f"class:{__name__}:Missing:{tmp_path}")


def test_the_vla_that_a_file_names_is_no_class(tmp_path):
    model = toy_model(vla="class:os:system:/tmp")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="comes from a file"):
        _ = load_world_model(tmp_path).vla
