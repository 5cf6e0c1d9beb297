"""Phases 2 and 3 on the toy: what a run leaves, going on bit for bit, phases out of order."""

import json
import shutil

import pytest
import torch
from explorer_toys import ADVERSARIAL, explore, fake_run
from on_policy_toys import tiny_vla
from run_logs import assert_same_weights, cut_off, rows_of
from safetensors.torch import load_file
from trees import assert_same
from world_model_toys import toy_sequences, watching_model

from vla_gym.errors import ConfigError
from vla_gym_trainers.cli import main
from vla_gym_trainers.explorer import player as players
from vla_gym_trainers.explorer import train as explorer_train
from vla_gym_trainers.explorer.config import AdversarialConfig, ExplorerConfig
from vla_gym_trainers.explorer.train import format_behaviours
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.train import make_vec

STEPS = {"total_steps": 200, "checkpoint_every": 60, "keep_checkpoints": 9}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "model"
    watching_model().save_pretrained(folder)
    return folder


def take_turns(folder, begun, **changes):
    """Run phase 3 from a run of phase 2, without the data of phase 1."""
    settings = {**ADVERSARIAL, "explorer": begun.run_dir, "teacher_share": 0.0, **changes}
    return explore(AdversarialConfig, folder, **settings)


@pytest.fixture(scope="module")
def explorer(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("explorer") / "run"
    return explore(ExplorerConfig, folder, teacher=str(model_folder), **STEPS)


def test_an_explorer_is_paid_by_the_world_model_and_logs_its_coverage(explorer):
    rows = [row for row in rows_of(explorer.run_dir) if "rollout/env_steps" in row]
    assert len(rows) > 2 and all(row["rollout/coverage"] > 0.0 for row in rows)
    for row in rows:
        assert {f"rollout/reward_{n}" for n in ("memory_divergence", "uncertainty")} <= row.keys()
        assert "rollout/reward_task" not in row and 0.0 <= row["rollout/success"] <= 1.0
    newest = RunDir(explorer.run_dir).checkpoints()[-1]
    assert {"policy.safetensors", "learner.pt"} <= {path.name for path in newest.iterdir()}
    assert (explorer.run_dir / "adapters").is_dir() and (explorer.run_dir / "tensorboard").is_dir()
    config = json.loads((explorer.run_dir / "config.json").read_text())
    assert config["lora_r"] == 8 and config["hidden_cameras"] == ["agentview"]


def test_a_cut_off_explorer_goes_on_bit_for_bit(explorer, model_folder, tmp_path):
    part = tmp_path / "part"
    cut_off(explorer.run_dir, part)
    explore(ExplorerConfig, part, teacher=str(model_folder), auto_resume=True, **STEPS)
    assert rows_of(part) == rows_of(explorer.run_dir)
    assert_same_weights(explorer.run_dir, part)


def test_phase_3_takes_turns_and_goes_on_bit_for_bit(explorer, model_folder, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = {"total_iterations": 4, "checkpoint_every": 60, "keep_checkpoints": 9}
    settings |= {"lora_r": 3}  # who acts is the explorer, whatever is said here
    take_turns(whole, explorer, **settings)
    rows = [row for row in rows_of(whole) if "rollout/env_steps" in row]
    assert len(rows) == 4 and rows[0]["rollout/reward_prediction_error"] > 0.0
    sizes = [row["world_model/replay_steps"] for row in rows]
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0] > 0
    # What the explorer was paid for is what the model is trained on.
    assert rows[0]["world_model/error_before"] == pytest.approx(
        rows[0]["rollout/reward_prediction_error"], rel=1e-4
    )
    assert rows[0]["world_model/error_after"] != rows[0]["world_model/error_before"]
    before = load_file(model_folder / "model.safetensors")
    after = load_file(whole / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("tokenizer.") for name in changed)

    cut_off(whole, part)
    shutil.rmtree(part / "model")
    (first,) = RunDir(part).checkpoints()
    assert {"f1.pt", "replay.npz", "policy.safetensors"} <= {p.name for p in first.iterdir()}
    # Who acts and learns is the explorer's, whose run is not needed any more.
    settings |= {"explorer": tmp_path / "gone", "auto_resume": True}
    text = (part / "config.json").read_text()
    (part / "config.json").write_text(text.replace(str(explorer.run_dir), str(tmp_path / "gone")))
    take_turns(part, explorer, **settings)
    assert rows_of(part) == rows_of(whole)
    assert_same(load_file(part / "model" / "model.safetensors"), after)
    assert_same_weights(whole, part)
    with pytest.raises(ConfigError, match="--explorer"):
        take_turns(tmp_path / "new", explorer, **settings)


def test_phase_3_is_held_to_the_explorer_that_it_began_with(explorer, tmp_path):
    take_turns(tmp_path / "run", explorer, kl_coef=0.1, total_iterations=1)
    reference = RunDir(tmp_path / "run").checkpoints()[-1] / "reference.safetensors"
    assert_same(load_file(reference), load_file(explorer.run_dir / "last.safetensors"))


def test_phases_out_of_order_are_one_clear_error_each(explorer, model_folder, tmp_path, one_error):
    error = one_error(main, "explorer", "--run-dir", str(tmp_path / "a"))
    assert "Phase 2 needs phase 1: add --teacher RUN" in error
    error = one_error(main, "adversarial", "--run-dir", str(tmp_path / "b"))
    assert "Phase 3 needs phase 2: add --explorer RUN" in error
    teacher = fake_run(tmp_path / "teacher", "tokenizer_steps")
    wrong = (
        ({"explorer": teacher}, "run of 'vla-gym-train explorer', this is one of 'world-model'"),
        ({"explorer": tmp_path / "none"}, "expected a run of .* this is none"),
        ({"explorer": fake_run(tmp_path / "ppo", "gae_lambda")}, "this is one of 'ppo'"),
    )
    for changes, text in wrong:
        with pytest.raises(ConfigError, match=text):
            explore(AdversarialConfig, tmp_path / "c", **changes)
    with pytest.raises(ConfigError, match="'vla-gym-train adversarial', this is one of 'world-mod"):
        make_vec(TD3RunConfig(explore_with=teacher))
    with pytest.raises(ConfigError, match="--teacher .*, this is one of 'explorer'"):
        explore(ExplorerConfig, tmp_path / "c", teacher=str(explorer.run_dir))
    with pytest.raises(ConfigError, match="expected a run of .*world-model.* this is none"):
        explore(ExplorerConfig, tmp_path / "c", teacher=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"has no data/train\.npz of phase 1"):
        explore(AdversarialConfig, tmp_path / "c", explorer=explorer.run_dir)
    with pytest.raises(ConfigError, match="give --teacher x"):
        ExplorerConfig(world_model="x")
    with pytest.raises(ConfigError, match="takes turns over whole episodes"):
        AdversarialConfig(ahead=1)
    assert not (tmp_path / "c").exists()


def test_settings_that_do_not_fit_an_explorer_are_one_clear_error_each():
    with pytest.raises(ConfigError, match="take policy gaussian, flow, own or tokens, not rl-tok"):
        ExplorerConfig(policy="rl-token", hidden_cameras=(), history=1)
    with pytest.raises(ConfigError, match="flow has no memory: give memory_size=0 and history=1"):
        ExplorerConfig(policy="flow")
    assert ExplorerConfig(policy="flow", memory_size=0, history=1).hidden_cameras
    for batch, share in ((1, 0.5), (16, 0.98), (8, 0.05)):
        with pytest.raises(ConfigError, match="at least one must be phase 1's and one the explor"):
            AdversarialConfig(world_batch_size=batch, teacher_share=share)
    assert AdversarialConfig(world_batch_size=1, teacher_share=0.0)


def test_a_world_model_that_cannot_be_filmed_is_refused_at_the_start(model_folder, tmp_path):
    teacher = f"class:explorer_toys:OwnWorldModel:{model_folder}"
    with pytest.raises(ConfigError, match="got OwnWorldModel: a class of your own gives rewards"):
        explore(ExplorerConfig, tmp_path / "run", teacher=teacher, total_steps=1)
    assert not RunDir(tmp_path / "run").checkpoints()


def test_windows_longer_than_episodes_are_refused_at_the_start(explorer, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="world_bptt_length must be at most 5, the steps of the"):
        take_turns(tmp_path / "a", explorer, total_iterations=1, world_bptt_length=6)
    monkeypatch.setattr(explorer_train, "_taught", lambda _: toy_sequences((2, 2)))
    with pytest.raises(ConfigError, match=r"the longest has 2: lower .* \(world_bptt_length in"):
        take_turns(tmp_path / "b", explorer, total_iterations=1, teacher_share=0.5)


@pytest.mark.parametrize("name", ["vla", "teacher"])
def test_a_class_that_an_explorers_run_names_is_not_imported(explorer, tmp_path, name):
    part, own = tmp_path / "part", "class:nowhere:Class:/path"
    shutil.copytree(explorer.run_dir, part)
    config = json.loads((part / "config.json").read_text())
    config |= {name: own} | ({"world_model": own} if name == "teacher" else {})
    (part / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"as its {name}, {own}: only .* add --{name} {own}"):
        AdversarialConfig(explorer=part).resolved()
    assert getattr(AdversarialConfig(explorer=part, **{name: own}).resolved(), name) == own


def test_who_loads_a_player_from_no_run_gets_one_clear_error(tmp_path):
    told = {None: "does not exist", "{": "is no valid JSON", "[1]": "expected `object`"}
    for text, words in told.items():
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"config\.json.* {words}"):
            players.load_player(tmp_path)


def test_a_run_of_another_phase_does_not_go_on(explorer, one_error):
    error = one_error(main, "adversarial", "--resume", str(explorer.run_dir))
    assert "is of 'vla-gym-train explorer', not of 'adversarial': use that command" in error


def test_who_plays_a_blind_explorer_hides_the_same_cameras(explorer, monkeypatch):
    from test_explorer_actions import shown

    monkeypatch.setattr(players, "load", lambda *_, **__: tiny_vla())
    for seed in (None, 3):
        chunks = []
        for change in ("none", "agentview", "wrist"):
            player = players.load_player(explorer.run_dir, seed=seed)
            chunks.append([player.act(*shown(step, change)) for step in range(2)])
        assert (chunks[0][0] == chunks[1][0]).all() and (chunks[0][1] == chunks[1][1]).all()
        assert (chunks[0][0] != chunks[2][0]).any() and chunks[0][0].shape == (2, 4, 7)


def test_evaluation_plays_the_explorer_and_not_its_plain_vla(explorer, monkeypatch):
    from vla_gym_trainers.evaluation.policy_config import PolicyConfig

    monkeypatch.setattr(players, "load", lambda *_, **__: tiny_vla())
    played = PolicyConfig(policy=str(explorer.run_dir)).make_policy()
    assert isinstance(played, players.PolicyPlayer) and played.identity["kind"] == "trained"
    assert (explorer.run_dir / "vla").is_dir(), "which would be played without"
    with pytest.raises(ConfigError, match="acts in chunks of 4, not of 8"):
        PolicyConfig(policy=str(explorer.run_dir), chunk_len=8).make_policy()


def test_a_table_of_behaviours():
    row = {"prediction_error": 0.5, "uncertainty": 0.25, "memory_divergence": 0.1}
    row |= {"coverage": 0.01, "object_coverage": 0.0}
    lines = format_behaviours({"random": row}, {"random": {**row, "prediction_error": 0.75}})
    assert lines[1].split() == "random 0.5000 0.2500 0.1000 0.0100 0.0000 0.7500".split()
