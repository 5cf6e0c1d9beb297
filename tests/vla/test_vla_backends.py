"""What all backends of checkpoints have in common: protocol, errors, dtypes, LoRA, LIBERO."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vla_checkpoints import NAMES, backend_and_folder, observe

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rl_token import RLTokenEncoder, RLTokenModelConfig
from vla_gym.vla import FrozenVLA
from vla_gym.vla.checkpoint_files import Checkpoint, weight_files
from vla_gym.vla.lora import LoraAdapters, LoraSettings
from vla_gym.vla.registry import backend_class
from vla_gym_trainers.on_policy.flow_policy import FlowPolicy
from vla_gym_trainers.on_policy.policy import ValueHead
from vla_gym_trainers.on_policy.student import checkpoint_layers
from vla_gym_trainers.on_policy.vla_policy import GaussianPolicy, TokenPolicy


@pytest.fixture(scope="module")
def make(checkpoints):
    """A function that loads a checkpoint anew."""

    def loaded(name, folder=None, **options):
        backend, tiny = backend_and_folder(name, checkpoints)
        return backend_class(backend).from_pretrained(folder or tiny, **options)

    return loaded


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_infer_follows_the_protocol(make, name):
    vla = make(name)
    assert isinstance(vla, FrozenVLA) and vla.name
    images, texts, proprio = observe(vla)
    batch = vla.infer(images, texts, proprio)
    assert batch.hidden.shape == (3, vla.num_hidden_tokens, vla.hidden_size)
    assert batch.actions.shape == (3, vla.horizon, 7)
    assert batch.hidden.dtype == batch.actions.dtype == torch.float32
    assert batch.actions.abs().max() <= 1.0 and batch.actions.std() > 0.01
    assert not batch.hidden.requires_grad
    assert not any(p.requires_grad for p in vla.model.parameters())
    torch.manual_seed(5)
    assert torch.equal(vla.infer(images, texts, proprio).actions, batch.actions)
    for order in ([2], [1, 0]):
        rows = {view: image[order] for view, image in images.items()}
        part = vla.infer(rows, [texts[i] for i in order], proprio[order])
        torch.testing.assert_close(part.hidden, batch.hidden[order], rtol=0, atol=1e-5)
        torch.testing.assert_close(part.actions, batch.actions[order], rtol=0, atol=1e-5)


def test_wrong_observations_are_refused(make, name):
    vla = make(name)
    images, texts, proprio = observe(vla)
    two = {view: image[:2] for view, image in images.items()}
    cases = [
        ({"wrist": images["wrist"]}, texts, proprio, r"cameras .*, got \['wrist'\]"),
        (images | {"agentview": images["agentview"].astype("f4")}, texts, proprio, "float32"),
        (images | {"agentview": images["agentview"][:, :-1]}, texts, proprio, "image_size=|square"),
        (images | {"agentview": images["agentview"][0]}, texts, proprio, "agentview"),
        (two, texts, proprio, "2 images"),
        (images, texts[:2], proprio, "2 instructions"),
    ]
    if name != "openvla":  # which sees one camera
        cases += [(images | {"wrist": two["wrist"]}, texts, proprio, "as many images")]
    if name in ("mini", "smolvla", "pi0", "pi05", "openvla-oft"):  # the others read none
        cases += [(images, texts, proprio[:, :7], r"got \(3, 7\)")]
    for *inputs, words in cases:
        with pytest.raises(ConfigError, match=words):
            vla.infer(*inputs)


#: Tensors that are missing, unexpected and of another shape; the last by the network's name too.
KEYS = {
    "smolvla": ("state_proj.bias", "surplus.weight", "action_out_proj.bias"),
    "pi0": ("state_proj.bias", "surplus.weight", "action_out_proj.bias"),
    "pi05": ("time_mlp_in.bias", "surplus.weight", "action_out_proj.bias"),
    "qwen3": ("fc2.bias", "fc9.bias", "visual.merger.linear_fc1.bias"),
    "openvla-oft": ("projector.fc2.bias", "projector.fc4.bias", "projector.fc3.bias"),
}
PREFIXES = {"qwen3": "action_model.model."} | dict.fromkeys(("smolvla", "pi0", "pi05"), "model.")


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_do_not_fit_are_listed(make, name, checkpoints, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(backend_and_folder(name, checkpoints)[1], folder)
    checkpoint = Checkpoint(folder)
    tensors = {key: checkpoint.tensor(key).clone() for key in checkpoint.shapes}
    missing, surplus, reshaped = KEYS[name]
    prefix = PREFIXES.get(name, "")
    del tensors[prefix + missing]
    tensors[prefix + surplus] = torch.zeros(2)
    tensors[next(key for key in tensors if key.endswith(reshaped))] = torch.zeros(11)
    for file in [*weight_files(folder), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        make(name, folder)
    for words in ("1 missing", missing, "1 unexpected", surplus, f"{reshaped} (11,) instead of"):
        assert words in str(caught.value)


#: Beginnings of the names of what stays in float32.
FLOAT32 = {
    "smolvla": ("state_proj", "action_"),
    "pi0": ("embed_action_time", "action_out_proj"),
    "pi05": ("embed_action_time", "action_out_proj"),
    "qwen25": ("action_model",),
    "openvla-oft": (),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_bfloat16_stays_close(make, name):
    half, whole = make(name, dtype=torch.bfloat16), make(name)
    for key, parameter in half.model.named_parameters():
        wanted = torch.float32 if key.startswith(FLOAT32[name]) else torch.bfloat16
        assert parameter.dtype == wanted, key
    inputs = observe(whole)
    found, wanted = half.infer(*inputs), whole.infer(*inputs)
    assert found.hidden.dtype == found.actions.dtype == torch.float32
    # 8 bits of mantissa through a few layers, on states of unit size.
    assert (found.hidden - wanted.hidden).abs().mean() < 0.05 < wanted.hidden.std()


#: Modules without adapters, and where the others are.
LORA = {
    "smolvla": ((), ""),
    "pi0": ((), ""),
    "pi05": ((), ""),
    "qwen25": (("visual", "action_model"), "vlm.language_model.layers"),
    "qwen3": (("visual", "action_model"), "vlm.language_model.layers"),
    "openvla-oft": (("vision_backbone", "projector", "action_head"), "language_model"),
}


def loss(vla, name, inputs):
    """Something with gradients."""
    if name == "openvla-oft":
        return vla.token_outputs(*inputs).logits.square().mean()
    if name.startswith("qwen"):
        return vla.action_outputs(*inputs)[1].square().mean()
    return vla.flow_outputs(*inputs).integrate(vla.num_steps)[1].square().mean()


@pytest.mark.parametrize("name", LORA)
def test_lora_adapts_saves_loads_and_merges(make, name, tmp_path):
    pytest.importorskip("peft")
    vla, other = make(name), make(name)
    inputs, (exclude, inside) = observe(vla), LORA[name]

    @torch.no_grad()
    def states(backend):
        if name == "openvla-oft":  # the output layer has adapters as well
            return backend.token_outputs(*inputs).logits
        return backend.infer(*inputs).hidden

    before = states(vla)
    adapters = LoraAdapters.add(vla, LoraSettings(r=2, alpha=4, exclude=exclude))
    assert torch.equal(states(vla), before)
    counts = adapters.counts
    assert 0 < counts.trainable == sum(p.numel() for p in adapters.parameters()) < counts.total / 2
    adapted = [n for n, _ in vla.model.named_parameters() if "lora_B" in n]
    assert all(n.startswith(inside) for n in adapted)
    loss(vla, name, inputs).backward()
    reached = [n for n in adapted if vla.model.get_parameter(n).grad is not None]
    assert sum(vla.model.get_parameter(n).grad.abs().max() > 0 for n in reached) > 20 or (
        inside and reached == adapted
    )
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.add_(0.02)
    changed = states(vla)
    assert (changed - before).abs().max() > 1e-3
    adapters.save(tmp_path)
    LoraAdapters.load(other, tmp_path)
    assert torch.equal(states(other), changed)
    adapters.merge()
    torch.testing.assert_close(states(vla), changed, rtol=1e-4, atol=1e-4)


KINDS = {
    "smolvla": (FlowPolicy, {}),
    "pi0": (FlowPolicy, {"stochastic_steps": 2}),
    "pi05": (FlowPolicy, {"stochastic_steps": 2}),
    "qwen25": (GaussianPolicy, {"sigmas": (0.1,) * 7}),
    "qwen3": (GaussianPolicy, {"sigmas": (0.1,) * 7}),
    "openvla-oft": (GaussianPolicy, {"sigmas": (0.1,) * 7, "correlation": 0.5}),
}


@pytest.mark.parametrize("name", KINDS)
def test_is_trained_by_its_own_kind_of_policy(make, name):
    """Greedy is what it does by itself; ratios begin at 1; gradients reach its network."""
    vla = make(name)
    vla.model.requires_grad_(True)
    policy_class, options = KINDS[name]
    policy = policy_class(vla, value_head=ValueHead(vla.hidden_size), **options)
    images, texts, proprio = observe(vla)
    inputs = {**images, "proprio": proprio, "task_id": np.zeros(3, np.int64)}, texts
    torch.testing.assert_close(
        policy.act(*inputs).actions, vla.infer(images, texts, proprio).actions, atol=1e-5, rtol=0
    )
    act = policy.act(*inputs, np.arange(3)[:, None])
    assert act.values.shape == (3,) and act.value_input.shape == (3, vla.hidden_size)
    log_probs = policy.distribution(*inputs)[0].log_prob(act.sample)
    assert torch.equal(log_probs, act.log_probs)
    mask = policy.factor_mask(torch.tensor([0, 1, vla.horizon]))
    assert mask.flatten(1).sum(dim=1)[0] == 0 and mask[2].all()
    log_probs[mask].mean().backward()
    reached = [n for n, p in vla.model.named_parameters() if p.grad is not None and p.grad.any()]
    assert len(reached) > 20


@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05"])
def test_denoising_steps_that_are_computed_again_give_the_same_gradients(make, name):
    found = []
    for again in (False, True):
        vla = make(name)
        vla.model.requires_grad_(True)
        if again:
            checkpoint_layers(vla)
        loss(vla, name, observe(vla)).backward()
        found.append([p.grad for p in vla.model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_head_that_is_not_there_cannot_be_trained(make):
    for name, wrong in (("smolvla", GaussianPolicy), ("qwen3", FlowPolicy), ("pi0", TokenPolicy)):
        with pytest.raises(ConfigError, match="cannot be trained .* docs/vla.md"):
            wrong(make(name), **({"sigmas": (0.1,) * 7} if wrong is GaussianPolicy else {}))


@pytest.mark.parametrize(("name", "chunk_len"), [("pi0", 3), ("qwen3", None), ("openvla", None)])
def test_in_the_environment(make, name, chunk_len):
    """Two environments, the tiny policy and an RL-token encoder of its sizes."""
    vla = make(name)
    torch.manual_seed(0)
    sizes = RLTokenModelConfig(vla.hidden_size, vla.num_hidden_tokens, dim=16, width=16)
    envs = gym.make_vec(
        "vla_gym:LiberoVLA-goal-v0",
        num_envs=2,
        vla=vla,
        rl_token=RLTokenEncoder(sizes).eval(),
        chunk_len=chunk_len,
        assets="lite",
        task_ids=[1, 7],
        workers=0,
    )
    try:
        obs, _ = envs.reset(seed=0)
        length = chunk_len or vla.horizon
        for _ in range(2):
            assert obs["vla_action"].shape == (2, length, 7) and obs["rl_token"].shape == (2, 16)
            assert np.isfinite(obs["rl_token"]).all()
            obs, _, _, _, infos = envs.step(obs["vla_action"])
        assert (np.asarray(infos["executed_steps"]) == length).all()
    finally:
        envs.close()
