"""SmolVLA, pi0 and pi0.5: parity with the original code, batches, noise, files, the whole way."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vla_checkpoints import GOLDEN, PROMPTS, observe

import vla_gym  # noqa: F401  (registers the environments)
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla import VLAOutput, load
from vla_gym.vla.base import FlowOutput
from vla_gym.vla.files import read_vlm_config
from vla_gym.vla.flow.backend import FlowInputs
from vla_gym.vla.flow.functions import resize_with_padding
from vla_gym.vla.flow.lerobot_files import PolicyConfig
from vla_gym.vla.flow.pi0 import Pi0Backend, make_config
from vla_gym.vla.flow.pi05 import Pi05Backend
from vla_gym.vla.flow.smolvla import SmolVLABackend

BACKENDS = {"smolvla": SmolVLABackend, "pi0": Pi0Backend, "pi05": Pi05Backend}
# Tighter than needed for the same actions, so that another epsilon shows; not so with pi0, whose
# times are in float32 here and in float64 in the original.
TOLERANCE = {"smolvla": 2e-5, "pi0": 1e-3, "pi05": 1e-5}


@pytest.fixture(params=BACKENDS)
def name(request):
    return request.param


@pytest.fixture
def vla(name):
    return load(f"{name}:{GOLDEN / name}")


def reference(name, rows=slice(None)):
    """Inputs of `flow`, the noise and the original's outputs, of some rows; cameras all have."""
    stored = np.load(GOLDEN / name / "reference.npz")
    data = {k: torch.from_numpy(v) for k, v in stored.items() if v.dtype.kind != "U"}
    images = data["images"][rows].float()
    if name == "smolvla":
        images = images[:, data["image_masks"][rows].all(dim=0)]
    inputs = {
        "pixels": images,
        "tokens": data["lang_tokens"][rows],
        "token_mask": data["lang_masks"][rows],
        # pi0.5's is in the prompt.
        "state": data["state"][rows] if "state" in data else torch.zeros(len(images), 32),
        "noise": data["noise"][rows],
    }
    return inputs, data["hidden"][:, rows], data["actions"][rows]


@torch.no_grad()
def sample(vla, inputs):
    inputs = dict(inputs)
    noise = inputs.pop("noise")
    return VLAOutput(*FlowOutput(vla.flow(FlowInputs(**inputs)), noise).integrate(vla.num_steps))


def test_outputs_are_those_of_the_original(vla, name):
    # The last row of SmolVLA's has one camera: the original masks the other, here it is left out.
    for rows in (slice(2), slice(2, 3)) if name == "smolvla" else (slice(None),):
        inputs, hidden, actions = reference(name, rows)
        out = sample(vla, inputs)
        assert out.hidden.dtype == out.actions.dtype == torch.float32
        torch.testing.assert_close(out.hidden, hidden[-1], rtol=0, atol=TOLERANCE[name])
        torch.testing.assert_close(out.actions, actions, rtol=0, atol=TOLERANCE[name])


def test_pi05_is_openpis_as_well_at_every_step():
    """openpi adds times up in float32: its states differ from lerobot's by 5e-5."""
    vla = Pi05Backend.from_pretrained(GOLDEN / "pi05")
    inputs, hidden, _ = reference("pi05")
    data = np.load(GOLDEN / "pi05" / "reference.npz")
    noise, steps = inputs.pop("noise"), []
    velocity = vla.flow(FlowInputs(**inputs))

    def watched(x, time):
        steps.append(velocity(x, time)[0])
        return velocity(x, time)

    with torch.no_grad():
        _, actions = FlowOutput(watched, noise).integrate(vla.num_steps)
    assert len(steps) == len(hidden) == 10
    torch.testing.assert_close(torch.stack(steps), hidden, rtol=0, atol=TOLERANCE["pi05"])
    for found, stored in ((torch.stack(steps), "openpi_hidden"), (actions, "openpi_actions")):
        torch.testing.assert_close(found, torch.from_numpy(data[stored]), rtol=0, atol=2e-4)


def test_pi05_writes_the_state_into_the_prompt():
    """Text, tokens and actions of lerobot's processors; two older ways to write the prompt."""
    folder = GOLDEN / "pi05"
    data = np.load(folder / "reference.npz")
    texts, proprio = [str(text) for text in data["texts"]], data["proprio"]
    for count, key in ((8, "prompts"), (32, "prompts_padded"), (0, "prompts_stateless")):
        vla = load(f"pi05:{folder}?state_in_prompt={count}")
        assert vla.prompts(texts, proprio) == data[key].tolist()
    # Edges of bins: the lower quantile itself is 0, below it -1, from the upper one on 255.
    vla = load(f"pi05:{folder}")
    low, high = (
        load_file(folder / "policy_preprocessor_step_3_normalizer_processor.safetensors")[
            f"observation.state.{name}"
        ].numpy()
        for name in ("q01", "q99")
    )
    for row, bins in ((low, "0"), (low - 1e-3, "-1"), (high, "255"), (high + 9.0, "255")):
        (prompt,) = vla.prompts(["go"], row[None])
        assert prompt == f"Task: go, State: {' '.join([bins] * 8)};\nAction: "
    tokens, mask = vla.tokenize(vla.prompts(texts, proprio))
    np.testing.assert_array_equal(tokens.numpy(), data["lang_tokens"])
    np.testing.assert_array_equal(mask.numpy(), data["lang_masks"])
    assert vla.tokenize(["the " * 300])[0].shape == (1, 200)
    actions = vla.flow_to_env(torch.from_numpy(data["actions"]))
    np.testing.assert_allclose(actions.numpy(), data["env_actions"].clip(-1, 1), atol=1e-6)
    with pytest.raises(ConfigError, match="state_in_prompt.*: expected 8 or 32 or 0, got 7"):
        load(f"pi05:{folder}?state_in_prompt=7")


def test_gradients_reach_every_parameter_of_pi05():
    """But for what comes after the last keys and values of the VLM, which nothing reads."""
    vla = Pi05Backend.from_pretrained(GOLDEN / "pi05")
    vla.model.requires_grad_(True)
    vla.flow_outputs(*observe(vla)).integrate(vla.num_steps)[1].square().sum().backward()
    last = "model.vlm.language_model.layers.2."
    unread = [f"{last}{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_")]
    unread.append("model.vlm.language_model.norm")
    for name, parameter in vla.model.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached != name.startswith(tuple(unread)), name


def test_noise_options_differ_and_can_be_replaced(name):
    spec = f"{name}:{GOLDEN / name}"
    fixed, other, zeros, own = (
        load(spec, **options)
        for options in ({}, {"seed": 1}, {"noise": "zeros"}, {"noise": "observation"})
    )
    seen = observe(fixed)
    base = fixed.infer(*seen)
    for vla in (other, zeros, own):
        assert (vla.infer(*seen).hidden - base.hidden).abs().max() > 0.1
    given = fixed.infer(*seen, noise=torch.zeros(3, *fixed.noise_shape))
    assert torch.equal(given.hidden, zeros.infer(*seen).hidden)
    views = np.stack(list(seen[0].values()), axis=1)
    drawn = own._noise(views, *seen[1:])
    assert torch.equal(own._noise(views[1:2], seen[1][1:2], seen[2][1:2])[0], drawn[1])
    assert drawn.shape == (3, 6, 32) and abs(drawn.mean()) < 0.2 and 0.8 < drawn.std() < 1.2
    assert not torch.equal(drawn[0], drawn[1])
    with pytest.raises(ConfigError, match=r"noise of shape \(3, 6, 32\)"):
        fixed.infer(*seen, noise=torch.zeros(3, 6, 7))
    for options, words in (
        ({"noise": "random"}, "noise .*: expected 'fixed'"),
        ({"num_steps": 0}, "num_steps.*: expected `int` >= 1"),
        ({"seed": -1}, "seed.*: expected `int` >= 0"),
        ({"seed": 2**64}, "seed"),
        ({"image_size": -1}, "image_size.*: expected `int` >= 1"),
        ({"sead": 1}, "sead"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(spec, **options)


def test_every_input_counts(vla):
    images, texts, proprio = observe(vla, batch=1)
    base = vla.infer(images, texts, proprio).hidden
    for view in images:
        changed = images | {view: np.ascontiguousarray(images[view][:, ::-1])}
        assert (vla.infer(changed, texts, proprio).hidden - base).abs().max() > 1e-3
    assert (vla.infer(images, PROMPTS[1:2], proprio).hidden - base).abs().max() > 1e-3
    assert (vla.infer(images, texts, proprio + 0.1).hidden - base).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["smolvla", "pi0"])
def test_preparation_is_lerobots(vla, name):
    """Turned by 180 degrees from the raw render, scaled, newline, mean and deviation, padding."""
    images, texts, proprio = observe(vla)
    raw = images["wrist"][:, ::-1]  # upside down, as robosuite returns it
    expected = raw[:, ::-1, ::-1].astype(np.float32) / 255.0 * 2.0 - 1.0
    pixels = vla.to_pixels(np.stack([images[view] for view in vla.files.views], axis=1))
    np.testing.assert_allclose(pixels[:, 1].permute(0, 2, 3, 1).numpy(), expected, atol=1e-6)
    tokens, mask = vla.tokenize(vla.prompts(texts, proprio))
    words = vla.tokenizer.convert_ids_to_tokens(tokens[1].tolist())
    first = [] if name == "smolvla" else ["<bos>"]
    assert words[: mask[1].sum()] == [*first, "turn", "on", "the", "stove", "\n"]
    assert set(words[mask[1].sum() :]) == {"<pad>"} and mask.dtype == torch.bool
    assert torch.equal(vla.tokenize(vla.prompts([texts[0] + "\n"], proprio))[0][0], tokens[0])
    long = vla.tokenize(["the " * 60])[0]
    assert long.shape == (1, 48)
    seen = {}
    original = vla.flow
    vla.flow = lambda inputs: seen.update(inputs=inputs) or original(inputs)
    try:
        with torch.no_grad():
            _, chunk = vla.flow_outputs(images, texts, proprio).integrate(vla.num_steps)
        actions = vla.infer(images, texts, proprio).actions
    finally:
        del vla.flow
    folder = GOLDEN / name
    pre = load_file(folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    post = load_file(folder / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    state = seen["inputs"].state
    mean, std = pre["observation.state.mean"], pre["observation.state.std"]
    torch.testing.assert_close(state[:, :8], (torch.from_numpy(proprio) - mean) / (std + 1e-8))
    assert state.shape == (3, 32) and (state[:, 8:] == 0).all()
    scaled = chunk[..., :7] * post["action.std"] + post["action.mean"]
    torch.testing.assert_close(actions, scaled.clamp(-1, 1), rtol=0, atol=1e-6)


def test_images_of_another_size_are_resized_and_padded():
    image = torch.arange(192).reshape(1, 3, 8, 8) / 256  # sums are exact
    same = resize_with_padding(image, 8, 8, centred=True)
    assert same is image
    double = resize_with_padding(image, 16, 16, centred=False)
    expected = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(double, expected)
    wide = resize_with_padding(image, 8, 12, centred=False)
    assert torch.equal(wide[..., 4:], image) and (wide[..., :4] == 0).all()
    middle = resize_with_padding(image, 8, 12, centred=True)
    assert torch.equal(middle[..., 2:10], image) and middle.sum() == image.sum()
    vla = load(f"pi0:{GOLDEN / 'pi0'}", image_size=56)
    assert vla.image_size == 56
    stacked = np.stack(list(observe(vla)[0].values()), axis=1)
    assert vla.to_pixels(stacked).shape == (3, 2, 3, 28, 28)


def statistics_file(folder):
    """Statistics of what goes into a policy."""
    (file,) = folder.glob("policy_preprocessor_step_*_normalizer_processor.safetensors")
    return file


@pytest.fixture
def copied(name, tmp_path):
    """A checkpoint's folder to change."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    return folder


def edit(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_older_checkpoints_load_as_well(copied, vla, name):
    """Statistics among the weights, names of a compiled policy, heads that nobody reads."""
    state = load_file(statistics_file(copied))
    for file in copied.glob("policy_*"):
        file.unlink()

    def change(tensors):
        for key in list(tensors):
            tensors[key.replace("model.", "model._orig_mod.", 1)] = tensors.pop(key)
        for kind, feature in (
            ("normalize_inputs", "observation.state"),
            ("unnormalize_outputs", "action"),
        ):
            for statistic in ("mean", "std") if name != "pi05" else ("q01", "q99"):
                key = f"{kind}.buffer_{feature.replace('.', '_')}.{statistic}"
                tensors[key] = state[f"{feature}.{statistic}"].clone()
        if name != "smolvla":
            prefix = "model.paligemma_with_expert."
            words = f"{prefix}paligemma.model.language_model.embed_tokens.weight"
            words = words.replace("model.", "model._orig_mod.", 1)
            # Some have the words' embeddings under the head's name only.
            tensors[f"{prefix}paligemma.lm_head.weight"] = tensors.pop(words)
            tensors[f"{prefix}gemma_expert.lm_head.weight"] = torch.zeros(320, 24)

    rewrite(copied, change)
    seen = observe(vla)
    # Weights lie at other addresses in the file: kernels may add up in another order.
    found, wanted = load(copied).infer(*seen).actions, vla.infer(*seen).actions
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_names_without_lerobots_prefix_load_as_well(copied, vla):
    """As openpi writes them."""

    def change(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    rewrite(copied, change)
    seen = observe(vla)
    found, wanted = load(copied).infer(*seen).actions, vla.infer(*seen).actions
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["pi05"])
def test_statistics_that_are_missing_or_of_another_size_are_named(copied):
    file = copied / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    save_file(load_file(file) | {"action.q99": torch.ones(6)}, file)
    with pytest.raises(WeightsError, match=r"action.q99 as 7 finite numbers, got shape \(6,\)"):
        load(copied)
    statistics_file(copied).unlink()
    with pytest.raises(WeightsError, match="lacks statistics of 'observation.state'.*state.q01"):
        load(copied)


@pytest.mark.parametrize(("name", "other"), [("pi0", "pi05"), ("pi05", "pi0")])
def test_weights_of_the_other_pi_are_refused(copied, name, other):
    shutil.copy(GOLDEN / other / "model.safetensors", copied)
    with pytest.raises(WeightsError) as caught:
        load(copied)
    missing, unexpected = str(caught.value).split("unexpected: ")
    pi05 = ("gemma_expert.model.norm.dense.weight", "time_mlp_in.bias")
    pi0 = ("gemma_expert.model.norm.weight", "state_proj.bias")
    for text, words in ((missing, ("missing",)), (unexpected, pi0 if name == "pi05" else pi05)):
        for word in words:
            assert word in text


@pytest.mark.parametrize("name", ["smolvla"])
@pytest.mark.parametrize(
    ("mode", "names"), [("MIN_MAX", ("min", "max")), ("QUANTILES", ("q01", "q99"))]
)
def test_other_normalisations(copied, mode, names):
    post = copied / "policy_postprocessor.json"
    post.write_text(re.sub(r'"ACTION": "[A-Z_]+"', f'"ACTION": "{mode}"', post.read_text()))
    low, high = torch.full((7,), -0.5), torch.full((7,), 0.25)
    file = copied / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    save_file({f"action.{names[0]}": low, f"action.{names[1]}": high}, file)
    x = torch.tensor([[-1.0] * 7, [1.0] * 7, [0.0] * 7])
    expected = torch.stack([low, high, (low + high) / 2])
    torch.testing.assert_close(load(copied).files.action.unnormalize(x), expected)
    post.write_text(post.read_text().replace(mode, "MEDIAN"))
    with pytest.raises(WeightsError, match="unknown normalisation 'MEDIAN'"):
        load(copied, seed=1)


def camera(name, side=256):
    return {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, side, side]}}


@pytest.mark.parametrize("name", ["pi0"])
@pytest.mark.parametrize(
    ("cameras", "renamed", "views", "size"),
    [
        ([camera("image2"), camera("image")], {}, ("wrist", "agentview"), 256),
        ([camera("image"), camera("wrist_image"), camera("empty_camera_0")], {},
         ("agentview", "wrist"), 256),
        ([camera("image", 360)], {}, ("agentview",), 360),
        ([camera("base_0_rgb", 224), camera("left_wrist_0_rgb", 224),
          camera("right_wrist_0_rgb", 224)], {}, ("agentview", "wrist"), 256),
        ([camera("top", 224), camera("hand", 224)], {"image": "top", "image2": "hand"},
         ("agentview", "wrist"), 256),
    ],
)  # fmt: skip
def test_cameras_of_published_policies(copied, cameras, renamed, views, size):
    state = {"observation.state": {"type": "STATE", "shape": [8]}}
    features = {k: v for one in cameras for k, v in one.items()}
    edit(copied / "config.json", input_features=features | state)
    pre = copied / "policy_preprocessor.json"
    data = json.loads(pre.read_text())
    data["steps"][0]["config"]["rename_map"] = {
        f"observation.images.{old}": f"observation.images.{new}" for old, new in renamed.items()
    }
    pre.write_text(json.dumps(data))
    vla = load(copied)
    assert vla.cameras == vla.files.views == views and vla.image_size == size


def test_other_policies_are_refused(copied, name):
    config = copied / "config.json"
    original = config.read_text()
    state = {"observation.state": {"type": "STATE", "shape": [6]}}
    cases = [
        ({"type": "act"}, "expected '" + name),
        ({"input_features": state | camera("image")}, "another robot"),
        ({"input_features": camera("laptop")}, "unknown camera 'observation.images.laptop'"),
        ({"input_features": {}}, "no camera"),
        ({"input_features": camera("image") | camera("agentview_image")}, "two of its cameras"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha True"),
    ]
    if name != "smolvla":
        cases += [
            ({"use_relative_actions": True}, "use_relative_actions True"),
            ({"paligemma_variant": "gemma_9b"}, "gemma_9b"),
        ]
    else:
        cases += [
            ({"attention_mode": "self_attn"}, "attention_mode 'self_attn'"),
            ({"num_expert_layers": 2}, "num_expert_layers 2"),
        ]
    for changes, words in cases:
        edit(config, **changes)
        with pytest.raises(WeightsError, match=words):
            load(f"{name}:{copied}")
        config.write_text(original)


@pytest.mark.parametrize("name", ["pi0"])
def test_images_that_are_normalised_are_refused(copied, name):
    for file in copied.glob("policy_p*processor.json"):
        file.write_text(file.read_text().replace('"VISUAL": "IDENTITY"', '"VISUAL": "MEAN_STD"'))
    edit(copied / "config.json", normalization_mapping={"VISUAL": "MEAN_STD"})
    with pytest.raises(WeightsError, match="normalization of images 'MEAN_STD'"):
        load(f"{name}:{copied}")


def test_a_copy_of_a_compiled_policy_runs_its_own_weights(name):
    """A compiled bound method would stay that of the original."""
    torch.compiler.set_stance("force_eager")
    try:
        vla = load(f"{name}:{GOLDEN / name}", compile=True)
        other, eager = copy.deepcopy(vla), copy.deepcopy(load(f"{name}:{GOLDEN / name}"))
        with torch.no_grad():
            for parameter in (*other.model.parameters(), *eager.model.parameters()):
                parameter.mul_(0.5)
        mine, its, same = (found.infer(*observe(vla)).actions for found in (vla, other, eager))
    finally:
        torch.compiler.set_stance("default")
    assert (mine - its).abs().max() > 1e-3
    torch.testing.assert_close(its, same, rtol=0, atol=1e-5)


def test_code_in_the_folder_of_a_backbone_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to transformers' question
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}'
    )
    (tmp_path / "configuration_mine.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    )
    with pytest.raises(WeightsError, match="trust_remote_code"):
        read_vlm_config(tmp_path, ("smolvlm",))
    assert not (tmp_path / "ran").exists()


def test_missing_files_of_the_backbone_are_named(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.move(copied / "vlm", tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="tokenizer.json of .*hf download"):
        load(copied)
    found = load(copied, vlm=str(tmp_path / "elsewhere"))
    assert found.tokenize(PROMPTS)[0].shape[0] == 3
    (tmp_path / "elsewhere" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json"):
        load(copied, vlm=str(tmp_path / "elsewhere"), seed=1)  # a model that was not loaded yet
    with pytest.raises(ConfigError, match="vlm='some/vlm' is no folder, nor in .*hf download"):
        load(copied, vlm="some/vlm")


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_full_size_pi_has_the_published_sizes(vla, name):
    """3.2 billion parameters without the expert's table of words and lm_heads; pi0.5: 3.35."""
    files = vla.files
    config, files.config = files.config, PolicyConfig(chunk_size=50)
    try:
        made = make_config(files)
    finally:
        files.config = config
    with torch.device("meta"):
        model = BACKENDS[name].network(made)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert shapes["action_out_proj.weight"] == (32, 1024)
    assert shapes["model.vlm.language_model.layers.17.mlp.up_proj.weight"] == (16384, 2048)
    assert shapes["model.dit.layers.17.self_attn.q_proj.weight"] == (2048, 1024)
    del shapes["model.dit.embed_tokens.weight"]
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    if name == "pi0":
        assert 3.2e9 < total < 3.3e9
    else:
        assert shapes["model.dit.norm.dense.weight"] == (3072, 1024)
        assert shapes["embed_action_time.time_mlp_in.weight"] == (1024, 1024)
        assert 3.3e9 < total < 3.4e9
