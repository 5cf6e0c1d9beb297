"""The VLA trained through the RL token: what moves, what is stale, what is kept and refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_toys import (
    CHUNK_LEN,
    SMALL,
    know_toy_tasks,
    make_env,
    make_model,
    player_envs,
    save_token,
)
from on_policy_toys import moved, tiny_vla
from openvla_checkpoints import make_checkpoint
from run_logs import rows_of
from toy_token_env import TEXTS
from trees import assert_same

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym.errors import ConfigError
from vla_gym.rl_token import load_rl_token
from vla_gym.vla import FrozenVLA, load
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers import TD3BC
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.evaluation.trained import load_trained
from vla_gym_trainers.runs.sb3_vec_env import sb3_vec_env
from vla_gym_trainers.td3.checkpoint import load_checkpoint, save_checkpoint
from vla_gym_trainers.td3.finetune import VLAFineTuner
from vla_gym_trainers.td3.train import TD3RunConfig, train_td3


def learned(folder: Path, chunks: int = 24, **settings: Any) -> tuple[TD3BC, VLAFineTuner]:
    model = make_model(folder, **settings).learn(chunks)
    return model, model.fine_tuner


def collected(folder: Path, **settings: Any) -> tuple[TD3BC, VLAFineTuner]:
    """Some chunks, and the VLA as it was loaded; the actor corrects what it says."""
    model, tuner = learned(folder, **settings, vla_update_freq=10**6)
    # The untrained actor's last layer is 0: nothing that it looks at would have a gradient.
    head = model.policy.actor.head.weight
    torch.nn.init.normal_(head, std=0.5, generator=torch.manual_seed(0))
    return model, tuner


def step(model: TD3BC) -> dict[str, float]:
    return model.fine_tuner.step(model.policy, model.replay_buffer, model._rng)


def tensors(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("what", "anchor"), [("lora", 0.0), ("full", 1.0)])
def test_gradients_reach_exactly_what_is_trained(tmp_path: Path, what: Any, anchor: float) -> None:
    model, tuner = collected(tmp_path, vla_trainable=what, anchor_weight=anchor)
    policy = model.policy
    kept = [policy.critic, policy.critic_target, policy.normalizer]
    kept += [tuner._frozen.model, tuner._frozen_encoder, tuner._decoder]
    before, vla = [tensors(module) for module in kept], tensors(tuner.vla.model)
    encoder, actor = tensors(tuner.encoder), tensors(policy.actor)
    policy.critic_optimizer.zero_grad()
    for _ in range(3):
        assert np.isfinite(list(step(model).values())).all()
    for module, state in zip(kept, before, strict=True):
        assert not moved(module, state)
    assert all(p.grad is None for p in policy.critic.parameters())
    wanted = {name for name in vla if ("lora_" in name) == (what == "lora")}
    wanted = {name for name in wanted if "token_head" not in name}
    assert wanted and moved(tuner.vla.model, vla) == wanted
    names = {name for name, _ in tuner.encoder.named_parameters()}  # not the statistics
    assert moved(tuner.encoder, encoder) == names
    assert moved(policy.actor, actor) == {name for name, _ in policy.actor.named_parameters()}


def test_all_adapters_of_an_openvla_oft_are_reached(tmp_path: Path) -> None:
    vla = load(f"openvla-oft:{make_checkpoint(tmp_path / 'oft')}")
    env = make_env(vla, None, size=vla.image_size)
    model, tuner = collected(tmp_path, env=env, gradient_checkpointing=True)
    before = tensors(tuner.vla.model)
    for _ in range(2):
        assert step(model)["vla_grad_norm"] > 0.0
    adapters = {name for name in before if "lora_" in name}
    assert len(adapters) > 20 and moved(tuner.vla.model, before) == adapters


def test_critics_see_the_state_without_gradient(tmp_path: Path) -> None:
    """A plain actor that ignores its input leaves the VLA no way to the loss but x."""
    model, _ = collected(tmp_path, anchor_weight=0.0, actor="plain")
    torch.nn.init.zeros_(model.policy.actor.head.weight)
    assert step(model)["vla_grad_norm"] == 0.0


class Rightward(torch.nn.Module):
    """Critics that value moving to the right: the mean of the first number of all actions."""

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return action.reshape(len(x), CHUNK_LEN, -1)[:, :, :1].mean(dim=1)


def test_the_vla_follows_the_critics_and_beta_holds_it(tmp_path: Path) -> None:
    shifts = []
    for bc_weight in (0.0, 1.0):
        changes = {"bc_weight": bc_weight, "residual_scale": 0.0, "anchor_weight": 0.0}
        model, tuner = collected(tmp_path, **changes)
        model.policy.critic = Rightward()
        buffer, every = model.replay_buffer, np.arange(model.replay_buffer.size())
        before = buffer.observations["vla_action"][every, :, 0].copy()
        for _ in range(15):
            step(model)
        tuner.refresh(buffer, every)
        shifts.append((buffer.observations["vla_action"][every, :, 0] - before).mean())
    assert shifts[0] > 0.1 and shifts[0] > 2 * abs(shifts[1])


@pytest.mark.parametrize("token", ["encoder", "mean"])
def test_without_a_decoder_the_token_itself_is_the_anchor(tmp_path: Path, token: str) -> None:
    model, _ = collected(tmp_path, token=token)
    assert step(model)["vla_anchor"] == pytest.approx(0.0, abs=1e-9)
    assert step(model)["vla_anchor"] > 1e-9


def test_micro_batches_and_checkpointing_change_nothing_but_rounding(tmp_path: Path) -> None:
    found = []
    for micro, checkpointing in ((8, False), (3, False), (8, True)):
        changes = {"vla_micro_batch_size": micro, "gradient_checkpointing": checkpointing}
        found.append(step(collected(tmp_path, **changes)[0]))
    names = ("vla_loss", "vla_grad_norm", "vla_anchor", "vla_reference_rms")
    first, *others = ([one[name] for name in names] for one in found)
    assert all(first == pytest.approx(other, rel=1e-4) for other in others)


def test_stale_rows_are_shown_to_the_trained_vla_again(tmp_path: Path, monkeypatch: Any) -> None:
    env = make_env(tiny_vla(), save_token(tmp_path), stride=2)
    model, tuner = learned(tmp_path, chunks=48, env=env)
    buffer, version = model.replay_buffer, tuner.version
    assert version == 4  # chunks 24, 32, 40, 48, after 16 of warm-up
    every = np.arange(buffer.size())
    ages = version - buffer.observations["vla_version"][every, 0]
    assert ages.max() > 0 and ages.min() >= 0
    later = version - buffer.next_observations["vla_version"][every, 0]
    shown, look_once = [], tuner._look

    def counted(seen: np.ndarray, proprio: np.ndarray) -> Any:
        shown.extend(np.column_stack([seen, proprio]))
        return look_once(seen, proprio)

    monkeypatch.setattr(tuner, "_look", counted)
    stale = (ages > 0).sum() + (later > 0).sum()
    halves = [tuner.refresh(buffer, every[k::2]) for k in (0, 1)]
    assert 0 < sum(halves) < stale  # what the first one wrote into slots of the second is new
    # What is stored several times, as windows inside chunks are, is shown once.
    assert len(shown) == len(np.unique(shown, axis=0)) < stale
    for rows in (buffer.observations, buffer.next_observations):
        views, texts = tuner.inputs.unpack(buffer.inputs[rows["vla_input"][every].astype(int)])
        # What is stored is what the toy shows: its position as brightness, its task's text.
        level = np.clip(128 + 100 * rows["proprio"][every, 0], 0, 255).astype(np.uint8)
        for frames in views.values():
            assert (frames == level.reshape(-1, 1, 1, 1)).all()
        assert texts == [TEXTS[int(task)] for task in rows["task_id"][every].reshape(-1)]
        direct = look(tuner.vla, tuner.encoder, CHUNK_LEN, views, texts, rows["proprio"][every])
        for key, values in zip(("rl_token", "vla_action"), direct, strict=True):
            np.testing.assert_allclose(rows[key][every], values, atol=2e-5)
        assert (rows["vla_version"][every] == version).all()
    assert tuner.refresh(buffer, every) == 0
    # Acting goes on with what the newest VLA makes of the frames.
    assert (model._last_obs["vla_version"] == version).all()
    frozen = look(
        tuner._frozen, tuner._frozen_encoder, CHUNK_LEN, views, texts, rows["proprio"][every]
    )
    assert np.abs(frozen[0] - direct[0]).max() > 1e-3


def test_rows_may_be_stale_by_so_many_versions(tmp_path: Path) -> None:
    model, tuner = learned(tmp_path, chunks=40, max_token_staleness=2)
    tuner._set_version(10)
    rows = model.replay_buffer.observations
    rows["vla_version"][:3, 0] = 7, 8, 9
    model.replay_buffer.next_observations["vla_version"][:3] = 10
    assert tuner.refresh(model.replay_buffer, np.array([0, 1, 2, 2, 0])) == 1
    assert rows["vla_version"][:3, 0].tolist() == [10, 8, 9]
    tuner._set_version(100)
    model.update_debt, model.config.utd_ratio = 0.0, 1.0
    model.train(1, batch_size=200)  # of 40 transitions: most are drawn several times
    assert model.logger.name_to_value["train/vla_stale"] == 1.0


def test_what_the_vla_saw_is_kept_once_and_let_go(tmp_path: Path) -> None:
    model, _ = collected(tmp_path, chunks=80)
    buffer = model.replay_buffer
    assert buffer.size() == 60 < buffer.num_added
    every = np.arange(60)
    both = (buffer.observations, buffer.next_observations)
    seen = np.concatenate([buffer.inputs[rows["vla_input"][every].astype(int)] for rows in both])
    assert len(buffer.inputs) == len(np.unique(seen, axis=0)) < 80


def test_nothing_is_learned_while_nothing_is_stored(tmp_path: Path, monkeypatch: Any) -> None:
    """As when the workers have lost all that was played."""
    model = make_model(tmp_path)
    monkeypatch.setattr(model.replay_buffer, "add", lambda *_: None)
    model.learn(40)
    assert model.fine_tuner.version == model._n_updates == 0


@pytest.mark.parametrize("what", ["lora", "full"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: Any, what: Any) -> None:
    know_toy_tasks(monkeypatch)
    model, tuner = learned(tmp_path, chunks=40, vla_trainable=what)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_checkpoint(checkpoint, model, {})
    torch.manual_seed(77)
    env = sb3_vec_env(make_env(tiny_vla(), save_token(tmp_path)))
    other, _ = load_checkpoint(checkpoint, env)
    assert other.fine_tuner.version == tuner.version == 3
    for one in (model, other):
        one.learn(24, reset_num_timesteps=False)
    assert other.fine_tuner.version == tuner.version == 6
    assert_same(tuner.state_dict(), other.fine_tuner.state_dict())
    assert_same(model.policy.state_dict(), other.policy.state_dict())
    every = np.arange(60)
    assert_same(list(model.replay_buffer.rows(every)), list(other.replay_buffer.rows(every)))
    assert_same(model.replay_buffer.vla_inputs(every), other.replay_buffer.vla_inputs(every))
    tuner.load_state_dict(other.fine_tuner.state_dict())
    with pytest.raises(ConfigError, match="do not fit"):
        tuner.load_state_dict({**tuner.state_dict(), "vla": {}})


@pytest.mark.parametrize(("what", "eval_every"), [("full", 24), ("lora", 0)])
def test_a_run_and_its_saved_policy(tmp_path, monkeypatch, what, eval_every):
    """From the command's settings to a policy that loads and plays as the one in memory."""
    save_token(tmp_path / "token")
    tiny_vla().model.save_pretrained(tmp_path / "tiny")
    models: list[TD3BC] = []
    build = train_td3_module.build_model

    def parts(config: TD3RunConfig) -> tuple[Any, Any]:
        return load(config.vla), load_rl_token(config.rl_token)

    def build_model(config: TD3RunConfig, env: Any) -> TD3BC:
        models.append(build(config, env))
        return models[-1]

    def make_player(config: TD3RunConfig) -> RunPlayer:
        return RunPlayer(player_envs(2), CHUNK_LEN, *parts(config))

    monkeypatch.setattr(train_td3_module, "build_model", build_model)
    monkeypatch.setattr(train_td3_module, "make_vec", lambda c: sb3_vec_env(make_env(*parts(c))))
    monkeypatch.setattr(train_td3_module, "make_player", make_player)
    config = TD3RunConfig(
        run_dir=tmp_path / "run",
        vla=str(tmp_path / "tiny"),
        rl_token=str(tmp_path / "token"),
        task_ids=(0, 1),
        num_envs=2,
        total_timesteps=64,
        vla_trainable=what,
        eval_every=eval_every,
        eval_layouts=2,
        eval_states=2,
        action_scale=(1.0,) * 7,
        progress=False,
        **SMALL,
    )
    card = train_td3(config).card
    assert len(card["results"]["evaluation"]["policy"]["episodes"]) == 4
    tuner = models[0].fine_tuner
    assert tuner.version > 0
    folder = tmp_path / "run"
    assert (folder / "adapters").is_dir() is (what == "lora")
    assert (folder / "best_vla.pt").is_file() is bool(eval_every)
    assert any("train/vla_anchor" in row for row in rows_of(folder))
    policy = load_trained(folder)
    assert policy.identity["vla"]["name"] == "vla"
    env = player_envs(4)
    obs, infos = env.reset(seed=11)
    told = [
        {"instruction": text, "elapsed_steps": 0, "env_id": i}
        for i, text in enumerate(infos["instruction"])
    ]
    final = load_trained(folder / "policy.safetensors")._model
    mine = ActorPolicy(final, tuner.vla, tuner.encoder, CHUNK_LEN).act(obs, told)
    np.testing.assert_allclose(policy.act(obs, told), mine, atol=1e-5, rtol=0)
    assert_same(policy._encoder.state_dict(), tuner.encoder.state_dict())
    if what == "full":  # adapters are merged when they are saved
        assert_same(policy.vla.model.state_dict(), tuner.vla.model.state_dict())
    frozen = ActorPolicy(final, *parts(config), CHUNK_LEN).act(obs, told)
    assert np.abs(frozen - mine).max() > 1e-4
    asked = load_trained(folder, config.vla).act(obs, told)
    np.testing.assert_allclose(asked, frozen, atol=1e-5, rtol=0)
    env.close()
    for name in ("vla", "adapters"):
        shutil.rmtree(folder / name, ignore_errors=True)
    with pytest.raises(ConfigError, match="a run writes it when it ends"):
        load_trained(folder)  # the original would be another policy


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    encoder = save_token(tmp_path)
    for settings, message in (
        ({"ahead": 1}, "needs ahead 0, got 1"),
        ({"actor_ema": 0.9}, "leave one of the two out"),
        ({"guard_layouts": 5}, "guard_layouts"),
        ({"explore_with": tmp_path}, "leave out explore_with, or it"),
        ({"world_model": str(tmp_path)}, "leave out world_model, or it"),
    ):
        with pytest.raises(ConfigError, match=message):
            TD3RunConfig(**{"vla_update_freq": 8, "ahead": 0, **settings})
    with pytest.raises(ConfigError, match="keep_inputs=True"):
        make_model(tmp_path, env=make_env(tiny_vla(), encoder, keep_inputs=False))
    vla = copy.copy(tiny_vla())
    vla.head = "token"
    with pytest.raises(ConfigError, match="l1 head"):
        make_model(tmp_path, env=make_env(vla, encoder))
    half = copy.deepcopy(tiny_vla())
    half.model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="in 16 bits"):
        make_model(tmp_path, env=make_env(half, encoder), vla_trainable="full")

    make_checkpoint(tmp_path / "large")
    large = load(str(tmp_path / "large"))
    with pytest.raises(ConfigError, match="only adapters can be kept, not what full trains"):
        make_model(tmp_path, env=make_env(large, None), vla_trainable="full")

    class FrozenOnly(FrozenVLA):
        """Plays, and has no gradients."""

        def __init__(self) -> None:
            names = "name horizon num_hidden_tokens hidden_size image_size head infer".split()
            vars(self).update({name: getattr(tiny_vla(), name) for name in names})

    with pytest.raises(ConfigError, match="cannot be trained through the RL token.*action_outputs"):
        make_model(tmp_path, env=make_env(FrozenOnly(), encoder))
