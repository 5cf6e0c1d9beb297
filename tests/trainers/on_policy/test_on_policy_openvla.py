"""The same trainers on a tiny OpenVLA-OFT checkpoint in the published layout."""

import copy
import math

import numpy as np
import pytest
import torch
from on_policy_toys import toy_factories
from openvla_checkpoints import make_checkpoint
from run_logs import rows_of
from safetensors.torch import load_file

from vla_gym.errors import WeightsError
from vla_gym.rollout.vla_policy import VLAPolicy, vla_identity
from vla_gym.vla import load
from vla_gym.vla.lora import LoraAdapters
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.tables import policy_name
from vla_gym_trainers.evaluation.trained import trained_vla
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.train import train

pytest.importorskip("peft")
SMALL = {
    "num_envs": 4,
    "episodes_per_env": 1,
    "num_minibatches": 1,
    "micro_batch_size": 4,
    "lora_r": 2,
    "learning_rate": 1e-3,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "eval_every": 0,
    "progress": False,
    "total_steps": 80,
}


def test_two_updates_with_lora(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "oft", ("action_head", "proprio_projector"))
    spec = f"openvla-oft:{checkpoint}"
    vla = load(spec)
    before = {k: v.clone() for k, v in vla.model.state_dict().items()}
    config = PPOConfig(vla=spec, run_dir=tmp_path / "run", **SMALL)
    train(config, envs=toy_factories(config, size=256, tasks=(0,), goal=-0.05))
    learnt = [row for row in rows_of(tmp_path / "run") if row.get("train/updates", 0) > 0]
    assert len(learnt) >= 2
    for row in learnt:
        losses = [row[f"train/{x}"] for x in ("policy_loss", "entropy", "reference_kl", "kl")]
        assert np.isfinite(losses).all() and 0 < row["train/entropy"] <= math.log(256) + 1e-3
    assert all(torch.equal(v, before[k]) for k, v in vla.model.state_dict().items())
    adapters = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
    assert all(v.any() for k, v in adapters.items() if "lora_B" in k) and len(adapters) > 20

    # What was trained loads by name: the VLA with the run's adapters.
    name = trained_vla(tmp_path / "run", spec)
    assert name == f"{spec}?adapters={tmp_path}/run/adapters"
    merged, student = load(name), copy.deepcopy(vla)
    LoraAdapters.load(student, tmp_path / "run" / "adapters")
    rng = np.random.default_rng(0)
    images = {
        camera: rng.integers(0, 256, (2, 256, 256, 3), np.uint8)
        for camera in ("agentview", "wrist")
    }
    seen = images, ["open the drawer", "put the bowl on the plate"], np.zeros((2, 8), np.float32)
    with torch.no_grad():
        own, theirs, old = (m.token_outputs(*seen).logits for m in (merged, student, vla))
    torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-3)
    assert (own - old).abs().max() > 1e-3
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    assert all(torch.equal(v, before[k]) for k, v in load(spec).model.state_dict().items())
    digest = vla_identity(name)["options"]["adapters"]
    assert len(digest) == 64 and vla_identity(name)["sha256"] == vla_identity(spec)["sha256"]
    # eval (and play, by the same function) takes the run itself.
    played = EvalConfig(policy=str(tmp_path / "run")).make_policy()
    assert played.identity == VLAPolicy(name, head="token").identity | {"run": "run"}
    assert f"oft (adapters {digest[:8]}), token head" in policy_name(played.identity)
    with torch.no_grad():
        assert torch.equal(played.vla.infer(*seen).actions, merged.infer(*seen).actions)
    with pytest.raises(WeightsError, match="No adapters in /nowhere"):
        load(f"{spec}?adapters=/nowhere")
