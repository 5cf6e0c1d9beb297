"""QwenOFT against the outputs of the reference implementation, and its checkpoint folders."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from openvla_checkpoints import gap
from PIL import Image
from safetensors.torch import load_file
from vla_checkpoints import copied

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla import FrozenVLA, load
from vla_gym.vla.qwen import images as qi
from vla_gym.vla.qwen.backend import QwenOFTBackend
from vla_gym.vla.qwen.files import find_files
from vla_gym.vla.qwen.model import QwenOFT

GOLDEN = Path(__file__).parents[1] / "golden" / "qwenoft"
#: Three observations of two cameras, mirrored.
FRAMES = np.asarray(Image.open(GOLDEN / "images.png")).reshape(3, 2, 256, 256, 3)
INSTRUCTIONS = json.loads((GOLDEN / "instructions.json").read_text())
PROPRIO = np.zeros((3, 8), np.float32)
QWENS = ("qwen25", "qwen3")
#: Tighter than needed for the same actions, so that an epsilon of 1e-5 instead of 1e-6 shows
#: (7.9e-5 and more).
TOLERANCE = 2e-5


def observe(frames):
    """The upright renders from which the policy's mirrored images (B, 2, 256, 256, 3) come."""
    upright = frames[:, :, :, ::-1]
    return {"agentview": upright[:, 0], "wrist": upright[:, 1]}


VIEWS = observe(FRAMES)


def rows(*chosen):
    return {name: view[list(chosen)] for name, view in VIEWS.items()}


def forward(vla, views=VIEWS, instructions=INSTRUCTIONS):
    with torch.no_grad():
        return vla.action_outputs(views, instructions, PROPRIO[: len(instructions)])


def backend(name):
    """The golden checkpoint as all tests share it."""
    return load(f"qwen-oft:{GOLDEN / name}")


@pytest.fixture(scope="module", params=QWENS)
def golden(request):
    """A backend and what the reference gave."""
    vla = backend(request.param)
    assert isinstance(vla, QwenOFTBackend) and isinstance(vla, FrozenVLA)
    return vla, np.load(GOLDEN / request.param / "reference.npz")


# ---------------------------------------------------------------------- against the reference


def test_patches_and_token_ids_are_the_reference_s(golden):
    vla, reference = golden
    patches = vla.images.patches(vla.images.pixels(VIEWS))
    np.testing.assert_array_equal(patches[:8].numpy(), reference["b3_pixel_values_head"])
    np.testing.assert_array_equal(patches.double().sum(1).numpy(), reference["b3_pixel_values_sum"])
    batch = vla.prompts.batch([vla.prompts.encode(text) for text in INSTRUCTIONS])
    np.testing.assert_array_equal(batch.ids.numpy(), reference["b3_input_ids"])
    np.testing.assert_array_equal(batch.mask.numpy(), reference["b3_attention_mask"])
    assert (reference["b3_image_grid_thw"] == [1, *vla.images.grid]).all()


def test_hidden_states_and_actions_are_the_reference_s(golden):
    vla, reference = golden
    hidden, normalized = forward(vla)
    # Measured 2.1e-6, 2.6e-6 and 1e-6.
    assert gap(hidden, reference["b3_queries"]) < TOLERANCE
    assert gap(normalized, reference["b3_normalized"]) < TOLERANCE
    for i, text in enumerate(INSTRUCTIONS):
        alone, _ = forward(vla, rows(i), [text])
        assert gap(alone[0], reference[f"b1_{i}_queries"]) < 1e-4
    output = vla.infer(VIEWS, INSTRUCTIONS, PROPRIO)
    assert output.hidden.shape == (3, vla.num_hidden_tokens, vla.hidden_size) == (3, 8, 32)
    assert output.hidden.dtype == output.actions.dtype == torch.float32
    wanted = reference["b3_actions"].clip(-1, 1)  # LIBERO's controller clips, too
    assert gap(output.actions[..., :6], wanted[..., :6]) < 1e-4
    np.testing.assert_array_equal(output.actions[..., 6], 1 - 2 * (wanted[..., 6] > 0.5))


def test_a_fixed_prompt_length_changes_nothing():
    wanted = forward(backend("qwen25"))
    vla = QwenOFTBackend.from_pretrained(GOLDEN / "qwen25", pad_to=450)
    passes = []
    vla.model.register_forward_pre_hook(lambda _, args: passes.append(args[1]))
    found = forward(vla)
    assert gap(found[0], wanted[0]) < 1e-5 and gap(found[1], wanted[1]) < 1e-5
    assert [batch.ids.shape for batch in passes] == [(3, 450)]
    with pytest.raises(ConfigError, match="pad_to=450 is too short"):
        forward(vla, rows(0), ["put the bowl on the plate " * 20])


def test_post_norm_states_of_qwen3_are_noticed(golden):
    vla, reference = golden
    pre_norm = not vla.model.has_final_norm
    folder = GOLDEN / ("qwen3" if pre_norm else "qwen25")
    assert pre_norm == (vla.model.vlm.config.model_type == "qwen3_vl")
    if pre_norm:  # what transformers 5 gives for both
        other = QwenOFTBackend.from_pretrained(folder, final_norm=True)
        assert gap(forward(other)[0], reference["b3_queries"]) > 1.0


# ---------------------------------------------------------------------- parts


def test_vision_segments_as_a_batch_equal_transformers_loop(golden, monkeypatch):
    vla, reference = golden
    monkeypatch.setattr(QwenOFT, "_batch_segments", lambda *_: None)
    folder = GOLDEN / ("qwen25" if vla.model.has_final_norm else "qwen3")
    assert gap(forward(QwenOFTBackend.from_pretrained(folder))[0], forward(vla)[0]) < 1e-5


def test_windows_of_unequal_size_go_through_transformers_loop(monkeypatch):
    uneven = {"image_resize": "none"}  # 256 -> 252 pixels: 9 x 9 tokens, windows of 4 x 4
    vla = QwenOFTBackend.from_pretrained(GOLDEN / "qwen25", **uneven)
    assert vla.images.grid == (18, 18)
    kinds = [type(block.attn).__name__ for block in vla.model.vlm.visual.blocks]
    assert kinds == ["Qwen2_5_VLVisionAttention"] * 2 + ["EqualSegmentAttention"]
    hidden = forward(vla)[0]
    monkeypatch.setattr(QwenOFT, "_batch_segments", lambda *_: None)
    assert gap(forward(QwenOFTBackend.from_pretrained(GOLDEN / "qwen25", **uneven))[0], hidden) < (
        1e-5
    )


def test_a_size_that_qwen_takes_no_images_of():
    settings = qi.QwenImageSettings.from_pretrained(GOLDEN / "qwen3" / "vlm_pretrained")
    with pytest.raises(WeightsError, match=r"size \(1, 201\).*aspect ratio"):
        qi.QwenImages(settings, size=(1, 201))


def test_area_resize_is_opencv_s():
    cv2 = pytest.importorskip("cv2")
    images = FRAMES.reshape(-1, 256, 256, 3)
    rng = np.random.default_rng(0)
    images = np.concatenate([images, rng.integers(0, 256, (2, 256, 256, 3), dtype=np.uint8)])
    for size in (224, 160):
        wanted = [cv2.resize(i, (size, size), interpolation=cv2.INTER_AREA) for i in images]
        found = qi.area_resize(images, (size, size))
        difference = np.abs(found.astype(int) - np.stack(wanted))
        # Halves are rounded either way, as float32 sums come out.
        assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_the_gripper_opens_at_minus_one():
    normalized = torch.zeros(5, 7)
    normalized[:, 6] = torch.tensor([-3.0, 0.0, 0.49, 0.5, 1.2])
    assert backend("qwen3").to_env(normalized)[:, 6].tolist() == [1, 1, 1, -1, -1]
    assert normalized[0, 6] == -3.0


def test_one_view():
    one = QwenOFTBackend.from_pretrained(GOLDEN / "qwen25", num_views=1)
    out = one.infer({"agentview": VIEWS["agentview"]}, INSTRUCTIONS, PROPRIO)
    assert out.actions.shape == (3, 8, 7) and one.cameras == ("agentview",)


# ---------------------------------------------------------------------- folders and errors


def starvla(tmp_path, name="qwen3", **vla_data):
    """The golden checkpoint in starVLA's layout; returns the run's folder and the VLM's."""
    run, source = tmp_path / "run", GOLDEN / name
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(source / "vlm_pretrained", tmp_path / "vlm")
    shutil.copy(source / "dataset_statistics.json", run)
    config = yaml.safe_load((source / "framework_config.yaml").read_text())
    config["datasets"]["vla_data"]["obs_image_size"] = config["datasets"]["vla_data"].pop(
        "image_size"
    )
    config["datasets"]["vla_data"] |= vla_data
    config["framework"]["qwenvl"]["base_vlm"] = "./playground/Pretrained_models/Qwen3-VL-4B"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    weights = load_file(source / "model.safetensors")
    torch.save(weights, run / "checkpoints" / "steps_100_pytorch_model.pt")
    return run, tmp_path / "vlm"


def test_starvla_s_layout_gives_the_same_policy(tmp_path):
    run, vlm = starvla(tmp_path)
    reference = np.load(GOLDEN / "qwen3" / "reference.npz")
    file = run / "checkpoints" / "steps_100_pytorch_model.pt"
    for path in (run, file):
        vla = load(f"qwen-oft:{path}", base_vlm=str(vlm), norm_mode="q99")
        assert vla.name == "run"
        assert gap(forward(vla)[0], reference["b3_queries"]) < 1e-4
    out = vla.infer(VIEWS, INSTRUCTIONS, PROPRIO)
    assert gap(out.actions[..., :6], reference["b3_actions"].clip(-1, 1)[..., :6]) < 1e-4
    # Its own client scales by minimum and maximum.
    scaled = load(f"qwen-oft:{run}", base_vlm=str(vlm)).infer(VIEWS, INSTRUCTIONS, PROPRIO).actions
    stats = json.loads((run / "dataset_statistics.json").read_text())["franka"]["action"]
    low, high = (np.array(stats[name])[:6] for name in ("min", "max"))
    wanted = (reference["b3_normalized"].clip(-1, 1)[..., :6] + 1) / 2 * (high - low) + low
    assert gap(scaled[..., :6], wanted.clip(-1, 1)) < 1e-4

    with pytest.raises(WeightsError, match="give base_vlm="):
        QwenOFTBackend.from_pretrained(run)
    shutil.copy(file, file.with_name("steps_200_pytorch_model.pt"))
    with pytest.raises(ConfigError, match="steps_100_pytorch_model.pt, steps_200"):
        QwenOFTBackend.from_pretrained(run, base_vlm=str(vlm))  # load() has it already
    second = file.with_name("steps_200_pytorch_model.pt")
    assert find_files(second, str(vlm)).weights == second


def test_alphabrain_s_older_names_are_read(tmp_path):
    folder = copied(GOLDEN / "qwen3", tmp_path / "qwen3")
    (folder / "vlm_pretrained").rename(folder / "qwen_pretrained")
    weights = load_file(folder / "model.safetensors")
    old = {name.replace("qwen_vl_interface.", "vlm."): value for name, value in weights.items()}
    torch.save(old, folder / "pytorch_model.pt")
    (folder / "model.safetensors").unlink()
    vla = QwenOFTBackend.from_pretrained(folder)
    wanted = np.load(GOLDEN / "qwen3" / "reference.npz")["b3_queries"]
    assert gap(forward(vla)[0], wanted) < 1e-4


def test_configuration_decides_chunk_image_size_and_prompt(tmp_path):
    folder = copied(GOLDEN / "qwen25", tmp_path / "qwen25")
    file = folder / "framework_config.yaml"
    config = yaml.safe_load(file.read_text())
    config["framework"]["action_model"] |= {"future_action_window_size": 3}
    config["datasets"]["vla_data"] = {}
    file.write_text(yaml.safe_dump(config))
    files = find_files(folder)
    assert (files.chunk_len, files.image_size, files.cot_prompt) == (4, None, None)
    vla = QwenOFTBackend.from_pretrained(folder)
    assert vla.horizon == vla.num_hidden_tokens == 4
    glass = "\N{LEFT-POINTING MAGNIFYING GLASS}"
    assert vla.prompts.text("go") == (
        f"go Please predict the next 4 robot actions: <action>{glass * 4}<action>."
    )
    mirrored = vla.images.pixels(VIEWS)[0, 0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(mirrored, qi.area_resize(FRAMES[:1, 0], (224, 224))[0])
    # starVLA's newer configurations name the horizon itself.
    run, vlm = starvla(tmp_path, "qwen25")
    config["framework"]["action_model"] |= {"action_horizon": 5, "future_action_window_size": 8}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert find_files(run, vlm).chunk_len == 5


def test_a_tokenizer_without_padding_token_is_refused(monkeypatch):
    tokenizer = copy.deepcopy(backend("qwen3").prompts._tokenizer)
    tokenizer.pad_token = None
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    with pytest.raises(WeightsError, match="no padding token"):
        QwenOFTBackend.from_pretrained(GOLDEN / "qwen3")


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(WeightsError, match="expected framework_config.yaml"):
        QwenOFTBackend.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no statistics 'libero_goal'.*franka"):
        QwenOFTBackend.from_pretrained(GOLDEN / "qwen3", unnorm_key="libero_goal")
    with pytest.raises(ConfigError, match="Expected a mode of q99"):
        QwenOFTBackend.from_pretrained(GOLDEN / "qwen3", norm_mode="q98")
    with pytest.raises(ConfigError, match="image_resize.*: expected 'bicubic' or"):
        QwenOFTBackend.from_pretrained(GOLDEN / "qwen3", image_resize="lanczos")
    with pytest.raises(ConfigError, match="num_views.*: expected 1 or 2"):
        QwenOFTBackend.from_pretrained(GOLDEN / "qwen3", num_views=3)
    with pytest.raises(ConfigError, match="Expected 8 action tokens"):
        backend("qwen3").infer(rows(0), ["put the <|image_pad|> down"], PROPRIO[:1])
    with pytest.raises(ConfigError, match="does not take these options"):
        load(f"qwen-oft:{GOLDEN / 'qwen3'}", views=2)

    folder = copied(GOLDEN / "qwen3", tmp_path / "qwen3")
    config = folder / "framework_config.yaml"
    text = config.read_text()
    for old, new, message in (
        ("name: QwenOFT", "name: QwenGR00T", "framework 'QwenGR00T'"),
        ("future_action_window_size: 7", "window: 7", "length of a chunk"),
        ("[224, 224]", "${size}", r"image_size: expected .*, got '\$\{size\}'"),
        ("[224, 224]", "[224]", "two sizes"),
        ("framework:", "framework: [", "is not valid YAML"),
    ):
        config.write_text(text.replace(old, new))
        with pytest.raises(WeightsError, match=message):
            QwenOFTBackend.from_pretrained(folder)
    config.write_text(text)
    vlm = json.loads((folder / "vlm_pretrained" / "config.json").read_text())
    (folder / "vlm_pretrained" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(WeightsError, match="model_type 'llama'"):
        QwenOFTBackend.from_pretrained(folder)
    (folder / "vlm_pretrained" / "config.json").write_text(json.dumps(vlm))
    settings = folder / "vlm_pretrained" / "tokenizer_config.json"
    good = settings.read_text()
    settings.write_text(json.dumps(json.loads(good) | {"model_max_length": {}}))
    with pytest.raises(WeightsError, match="Cannot load the tokenizer"):
        QwenOFTBackend.from_pretrained(folder)
    settings.write_text(good)
    (folder / "vlm_pretrained" / "preprocessor_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="preprocessor_config.json"):
        QwenOFTBackend.from_pretrained(folder)
