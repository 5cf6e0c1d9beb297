"""The embedded VLA: preprocessing, tokens, network, checkpoints and cloning."""

import json
from dataclasses import replace

import mini_vla
import numpy as np
import pytest
import torch
from mini_vla import INSTRUCTIONS, random_inputs, small_config, write_demos
from run_logs import rows_of

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla import FrozenVLA, load
from vla_gym.vla.files import WEIGHTS_ROOT
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA, load_model
from vla_gym.vla.preprocess import area_downsample, proprio_features
from vla_gym.vla.tokens import WordTokenizer, build_vocabulary
from vla_gym_trainers.cloning import train as training
from vla_gym_trainers.cloning.data import load_demos, random_shift
from vla_gym_trainers.cloning.state import CloningState
from vla_gym_trainers.cloning.step import cloning_loss, flow_loss
from vla_gym_trainers.cloning.train import MiniConfig, train_mini
from vla_gym_trainers.runs.run import Run


def test_area_downsample_is_the_rounded_block_mean():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, 128, 128, 3), dtype=np.uint8)
    blocks = image.reshape(3, 64, 2, 64, 2, 3).astype(float).mean(axis=(2, 4))
    np.testing.assert_array_equal(area_downsample(image), np.floor(blocks + 0.5))
    assert area_downsample(np.full((256, 256, 3), 255, np.uint8)).min() == 255
    small = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert area_downsample(small) is small


@pytest.mark.parametrize(
    "bad",
    [np.zeros((100, 100, 3), np.uint8), np.zeros((128, 128, 3)), np.zeros((128, 64, 3), np.uint8)],
)
def test_area_downsample_refuses_other_images(bad):
    with pytest.raises(ConfigError, match="Expected"):
        area_downsample(bad)


def test_proprio_features_do_not_jump_where_axis_angle_flips():
    near = np.zeros((2, 8))
    near[0, 3:6] = [np.pi - 1e-4, 0.0, 0.0]
    near[1, 3:6] = [-np.pi + 1e-4, 0.0, 0.0]
    first, second = proprio_features(near)
    np.testing.assert_allclose(first, second, atol=3e-4)
    # A quarter turn about z: columns (0, 1, 0) and (-1, 0, 0).
    quarter = np.zeros((1, 8))
    quarter[0, 5] = np.pi / 2
    np.testing.assert_allclose(proprio_features(quarter)[0, 3:9], [0, 1, 0, -1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(proprio_features(np.zeros((1, 8)))[0, 3:9], [1, 0, 0, 0, 1, 0])


def test_tokenizer_handles_unknown_words_length_and_punctuation():
    tokenize = WordTokenizer(build_vocabulary(INSTRUCTIONS), max_words=8)
    ids = tokenize(["Put the_bowl, please!", "stove " * 20])
    assert ids.shape == (2, 8)
    assert ids[0].tolist()[:4] == [*tokenize(["put the bowl"])[0].tolist(), 1]
    assert (ids[0, 4:] == 0).all() and (ids[1] > 1).all()
    assert tokenize([""]).shape == (1, 1)


@pytest.mark.parametrize("head", ["l1", "token"])
def test_actions_are_environment_actions(head):
    model = MiniVLA(small_config())
    with torch.no_grad():
        model.action_head[-1].weight.mul_(100)
    backend = MiniBackend(model, head=head)
    assert isinstance(backend, FrozenVLA)
    actions = backend.infer(*random_inputs(4)).actions
    assert actions.abs().max() <= 1.0
    assert set(actions[..., 6].unique().tolist()) <= {-1.0, 1.0}


def test_image_sizes_agree_on_block_constant_images():
    backend = MiniBackend(MiniVLA(small_config()))
    images, texts, proprio = random_inputs(2, size=64)
    large = {key: value.repeat(2, 1).repeat(2, 2) for key, value in images.items()}
    huge = {key: value.repeat(4, 1).repeat(4, 2) for key, value in images.items()}
    expected = backend.infer(images, texts, proprio).hidden
    for other in (large, huge):
        assert torch.equal(backend.infer(other, texts, proprio).hidden, expected)


def test_save_and_load_round_trip_is_half_precision(tmp_path):
    model = MiniVLA(small_config(proprio_mean=[1.1] * 11)).eval()
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path).eval()
    assert again.queries.dtype == torch.float32
    assert again.config.proprio_mean == [1.1] * 11
    for before, after in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(after, before.half().float(), atol=0, rtol=0)
    before = load(tmp_path)
    assert before is load(str(tmp_path)) and before.hidden_size == 32
    MiniVLA(small_config()).save_pretrained(tmp_path)
    assert load(tmp_path) is not before  # what lies there now
    (tmp_path / "readme").symlink_to(tmp_path / "nowhere")
    assert load(tmp_path).hidden_size == 32


def test_broken_checkpoints_give_one_clear_error(tmp_path):
    MiniVLA(small_config()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for load_it in (load, load_model):  # the second: to go on training from
        with pytest.raises(WeightsError, match="corrupt"):
            load_it(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    weights.write_bytes(good[: len(good) // 2])
    with pytest.raises(WeightsError, match="Cannot read weights"):
        load(tmp_path)
    weights.write_bytes(good)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    with pytest.raises(WeightsError, match="missing: blocks.2"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    with pytest.raises(WeightsError, match="model_type 'other'"):
        load(tmp_path)


def test_chunks_stop_at_the_end_of_the_episode(tmp_path):
    write_demos(tmp_path, episodes=5, length=12)
    demos = load_demos(tmp_path, held_out_episodes=1)
    assert len(demos.images) == 120 and demos.train.sum() == 96
    index = np.array([0, 9, 11, 119])
    actions, valid = demos.chunks(index, 8)
    assert actions.shape == (4, 8, 7)
    assert valid.sum(1).tolist() == [8, 3, 1, 1]
    assert not demos.train[demos.held_out(100)].any()
    drawn = demos.sample(np.random.default_rng(0), 1000)
    assert demos.train[drawn].all() and 400 < (demos.task[drawn] == 0).sum() < 600


def test_load_demos_names_the_problem(tmp_path):
    with pytest.raises(ConfigError, match="vla-gym demos"):
        load_demos(tmp_path)
    (tmp_path / "bad_demo.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match=r"bad_demo\.hdf5"):
        load_demos(tmp_path)


def test_cloning_loss_by_hand():
    config = MiniConfig(gripper_loss_weight=0.5)
    target = torch.zeros(1, 2, 7)
    actions = torch.full((1, 2, 7), 0.2)
    logits = torch.zeros(1, 2, 7, 256)
    valid = torch.tensor([[True, False]])
    l1, entropy = cloning_loss(actions, logits, target, valid, config)
    # Only the first step counts: (6 * 0.2 + 0.5 * 0.2) / 7; uniform logits give log 256.
    assert l1.item() == pytest.approx(1.3 / 7)
    assert entropy.item() == pytest.approx(np.log(256), rel=1e-5)


def test_token_smoothing_spreads_a_bin_over_its_neighbours():
    config = MiniConfig(token_smoothing=2.0)
    target = torch.ones(1, 1, 7)  # the last bin: nothing lies beyond it
    logits = torch.randn(1, 1, 7, 256, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(1, 1, dtype=torch.bool)
    _, entropy = cloning_loss(torch.zeros(1, 1, 7), logits, target, valid, config)
    weights = np.exp(-0.5 * ((np.arange(256) - 255) / 2.0) ** 2)
    weights /= weights.sum()  # 0.33, 0.30, 0.20, 0.11, ...
    log_q = logits[0, 0].log_softmax(-1).numpy()
    assert entropy.item() == pytest.approx(-(log_q * weights).sum(1).mean(), rel=1e-5)
    with pytest.raises(ConfigError, match="token_smoothing"):
        MiniConfig(token_smoothing=-1.0)


def test_token_distillation_mixes_in_what_the_l1_head_does():
    config = MiniConfig(token_distillation=0.25)
    target, actions = torch.full((1, 1, 7), -1.0), torch.ones(1, 1, 7, requires_grad=True)
    logits = torch.randn(1, 1, 7, 256, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(1, 1, dtype=torch.bool)
    _, entropy = cloning_loss(actions, logits.requires_grad_(), target, valid, config)
    # A quarter of the label is the L1 head's bin 255, the rest the demonstration's bin 0.
    log_q = logits[0, 0].log_softmax(-1).detach()
    expected = -(0.75 * log_q[:, 0] + 0.25 * log_q[:, 255]).mean()
    assert entropy.item() == pytest.approx(expected.item(), rel=1e-5)
    entropy.backward()
    assert actions.grad is None  # the L1 head is not taught by the tokens
    with pytest.raises(ConfigError, match="token_distillation"):
        MiniConfig(token_distillation=1.5)


def test_random_shift_moves_whole_images():
    images = np.zeros((3, 2, 64, 64, 3), np.uint8)
    images[:, :, 32, 32] = 255
    shifted = random_shift(images, 3, np.random.default_rng(0))
    assert ((shifted == 255).sum(axis=(2, 3)) == 1).all()
    assert np.abs(np.argwhere(shifted == 255)[:, 2:4] - 32).max() <= 3
    assert random_shift(images, 0, np.random.default_rng(0)) is images


def run_config(tmp_path, **kwargs):
    values = {
        "demos": str(tmp_path),
        "run_dir": tmp_path / "run",
        "steps": 60,
        "batch_size": 16,
        "hidden_size": 32,
        "num_layers": 1,
        "learning_rate": 3e-3,
        "ema": 0.9,
        "held_out_episodes": 1,
    }
    return MiniConfig(**(values | kwargs))


@pytest.mark.parametrize("head", ["l1", "flow"])
def test_a_clone_follows_the_instruction(tmp_path, head):
    write_demos(tmp_path)
    sizes = {"steps": 150, "batch_size": 8, "learning_rate": 1e-2}
    result = train_mini(run_config(tmp_path, flow_layers=int(head == "flow"), **sizes))
    # Blind to the instruction: (0.8 + 0.5 * 1) / 7 = 0.19. Eight seeds, bf16 or not: 0.001-0.002.
    # The flow's begins at 1 + the actions' own square.
    assert result[f"val/{head}"] < {"l1": 0.02, "flow": 0.3}[head]
    backend = MiniBackend.from_pretrained(tmp_path / "run" / "model")
    assert backend.head == head
    images, _, proprio = random_inputs(16)
    for instruction, x, gripper in zip(INSTRUCTIONS, (-0.8, 0.8), (1.0, -1.0), strict=True):
        actions = backend.infer(images, [instruction] * 16, proprio).actions
        off, right = (actions[..., 0] - x).abs(), (actions[..., 6] == gripper).float()
        if head == "l1":  # those seeds: within 0.03 of 0.8
            assert off.max() < 0.3 and right.all()
        else:
            assert off.mean() < 0.3 and right.mean() > 0.95


def test_a_device_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="device 'nonsense' is not there"):
        train_mini(run_config(tmp_path, device="nonsense"))
    assert not (tmp_path / "run").exists()


def test_resumed_run_continues_where_it_stopped(tmp_path):
    write_demos(tmp_path)
    train_mini(run_config(tmp_path, steps=10))
    with pytest.raises(ConfigError, match="holds a run already"):
        train_mini(run_config(tmp_path, steps=15))
    result = train_mini(run_config(tmp_path, steps=15, resume=tmp_path / "run"))
    assert result["steps"] == 15
    weights = tmp_path / "run" / "checkpoints" / "000000015" / "cloning.pt"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(WeightsError, match="is no whole file of tensors"):
        train_mini(run_config(tmp_path, steps=20, resume=tmp_path / "run"))


def test_a_clone_is_saved_before_its_last_checkpoint(tmp_path, monkeypatch):
    """A run that goes on from there has no step left in which to save it."""
    write_demos(tmp_path)
    monkeypatch.setattr(CloningState, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_mini(run_config(tmp_path, steps=2))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.fixture
def rates(monkeypatch):
    """Successes of ten that the next closed-loop evaluations find."""
    rates = []

    def play(*_):
        return {"goal/0": {"successes": rates.pop(0), "episodes": 10, "mean_steps": 0.0}}

    monkeypatch.setattr(training, "_play_sampled", play)
    return rates


def best_of(result):
    return result["best_step"], result["best_success_rate"]


def test_a_run_that_goes_on_keeps_the_best_weights_so_far(tmp_path, monkeypatch, rates):
    """Killed after an evaluation and before a checkpoint is due; later given more steps."""
    write_demos(tmp_path)
    run, best = tmp_path / "run", tmp_path / "run" / "best" / "model.safetensors"
    config = run_config(tmp_path, steps=4, eval_episodes=10, eval_every=2, auto_resume=True)
    rates += [7, 3]
    show = Run.show
    monkeypatch.setattr(Run, "show", lambda _, step, **__: 1 / (3 - step))
    with pytest.raises(ZeroDivisionError):
        train_mini(config)
    monkeypatch.setattr(Run, "show", show)
    kept = best.read_bytes()
    assert best_of(train_mini(config)) == (2, 0.7) and best.read_bytes() == kept
    rates += [8]
    assert best_of(train_mini(replace(config, steps=5))) == (5, 0.8)
    kept = best.read_bytes()
    rates += [1, 2]
    result = train_mini(replace(config, steps=7))
    assert best_of(result) == (5, 0.8) and best.read_bytes() == kept and not rates
    again = train_mini(replace(config, steps=7))
    assert again["closed_loop"] == result["closed_loop"] and best_of(again) == (5, 0.8)
    found = [row["eval/success_rate"] for row in rows_of(run) if "eval/success_rate" in row]
    assert found == [0.7, 0.3, 0.8, 0.1, 0.2]


def test_an_earlier_checkpoint_brings_its_weights_back(tmp_path, rates):
    write_demos(tmp_path)
    run = tmp_path / "run"
    config = run_config(tmp_path, eval_episodes=10, eval_every=2, keep_checkpoints=9)
    rates += [6, 9]
    train_mini(replace(config, steps=2))
    kept = [(run / name / "model.safetensors").read_bytes() for name in ("best", "model")]
    train_mini(replace(config, steps=4, resume=run))
    back = replace(config, steps=2, resume=run / "checkpoints" / "000000002")
    assert best_of(train_mini(back)) == (2, 0.6)
    for name, weights in zip(("best", "model"), kept, strict=True):
        assert (run / name / "model.safetensors").read_bytes() == weights, name


def test_nothing_to_evaluate_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(mini_vla, "INSTRUCTIONS", ["wave", "put the bowl on the moon"])
    write_demos(tmp_path)
    with pytest.raises(ConfigError, match="no instruction in .* is of one: give eval_episodes=0"):
        train_mini(run_config(tmp_path, steps=1, eval_episodes=1))
    assert not (tmp_path / "run").exists()


def test_a_clone_that_goes_on_from_weights_has_their_sizes(tmp_path):
    write_demos(tmp_path)
    MiniVLA(small_config()).save_pretrained(tmp_path / "start")
    begun = run_config(tmp_path, steps=1, init_from=str(tmp_path / "start"))
    for name, own in {"hidden_size": 32, "num_layers": 2, "flow_layers": 0}.items():
        sizes = {"hidden_size": 32, "num_layers": 2} | {name: 3}
        with pytest.raises(ConfigError, match=f"start has {name}={own}, not 3: leave {name} or"):
            train_mini(replace(begun, **sizes))
    assert train_mini(replace(begun, hidden_size=192, num_layers=4))["steps"] == 1  # the defaults


def tiny_flow():
    torch.manual_seed(0)
    return MiniBackend(MiniVLA(small_config(flow_layers=1)))


def test_flow_loss_by_hand():
    """A head that always says 0: the mean square of what it should have said."""
    vla = tiny_flow()
    torch.nn.init.zeros_(vla.model.flow_head.out.weight)
    torch.nn.init.zeros_(vla.model.flow_head.out.bias)
    vla.model.config.action_mean, vla.model.config.action_std = [0.5] * 7, [2.0] * 7
    target = torch.full((3, 8, 7), 2.5)  # 1 when standardised
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[0, 4:] = False
    hidden = torch.zeros(3, 8, 32)
    loss = flow_loss(vla.model, hidden, target, valid, 5, np.random.default_rng(0))
    noise = np.random.default_rng(0).standard_normal((15, 8, 7), np.float32)
    error = np.square(1.0 - noise)[np.tile(valid.numpy(), (5, 1))]
    assert float(loss) == pytest.approx(float(error.mean()), rel=1e-5)


def test_flow_options_are_checked_and_change_what_they_say():
    inputs = random_inputs(2)
    model = tiny_flow().model
    usual = MiniBackend(model)
    assert usual.head == "flow" and usual.heads == ("flow", "l1", "token")
    acted = usual.infer(*inputs).actions
    assert torch.equal(MiniBackend(model, seed=0, num_steps=5).infer(*inputs).actions, acted)
    for other in ({"seed": 1}, {"num_steps": 3}, {"head": "l1"}):
        assert not torch.equal(MiniBackend(model, **other).infer(*inputs).actions, acted)
    with pytest.raises(ConfigError, match="num_steps must be in 1..1000, got 0"):
        MiniBackend(model, num_steps=0)
    with pytest.raises(ConfigError, match="'flow' or 'l1' or 'token', got 'diffusion'"):
        MiniBackend(model, head="diffusion")
    plain = MiniBackend(MiniVLA(small_config()))
    assert plain.head == "l1" and plain.heads == ("l1", "token")
    with pytest.raises(ConfigError, match="no flow head"):
        plain.flow_outputs(*inputs)


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="steps: expected `int` >= 1, got 0"):
        MiniConfig(steps=0)
    with pytest.raises(ConfigError, match="ema"):
        MiniConfig(ema=1.0)
    with pytest.raises(ConfigError, match="flow_loss_weight: expected `float` >= 0.0, got -1.0"):
        MiniConfig(flow_loss_weight=-1.0)
    with pytest.raises(ConfigError, match="flow_draws: expected `int` >= 1, got 0"):
        MiniConfig(flow_draws=0)
    with pytest.raises(ConfigError, match="eval_every=5 needs eval_episodes"):
        MiniConfig(eval_every=5)


@pytest.mark.parametrize("name", ["mini", "mini-few", "mini-flow"])
def test_shipped_weights_are_small_and_know_the_words_of_all_thirty_tasks(name):
    from vla_gym.suites import suite_tasks
    from vla_gym.vla.paraphrases import paraphrases

    for folder in WEIGHTS_ROOT.glob(f"{name}*"):
        size = sum(f.stat().st_size for f in folder.iterdir())
        assert size <= 10e6, folder
    vla = load(name)
    assert (vla.name, vla.horizon, vla.num_hidden_tokens, vla.image_size) == (name, 8, 8, 128)
    told = [
        task.instruction for suite in ("spatial", "object", "goal") for task in suite_tasks(suite)
    ]
    words = vla.tokenize(told + [other for text in told for other in paraphrases(text)])
    assert (words != 1).all()
    images, _, proprio = random_inputs(1)
    out = vla.infer(images, ["turn on the stove"], proprio)
    assert torch.isfinite(out.hidden).all() and out.actions.shape == (1, 8, 7)
    assert (
        load(name, head="token").infer(images, ["turn on the stove"], proprio).actions.abs().max()
        <= 1
    )
