"""OpenVLA and OpenVLA-OFT against the outputs of the reference implementations."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from openvla_checkpoints import (
    CASES,
    CHECKPOINT,
    GOLDEN,
    Reference,
    gap,
    make_checkpoint,
    rewire,
)
from PIL import Image
from torch.nn import functional as F

from vla_gym.vla import FrozenVLA, TokenVLA
from vla_gym.vla.base import TrainableTokenVLA
from vla_gym.vla.openvla import images as openvla_images
from vla_gym.vla.openvla import sequence, vision
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym.vla.tokens import ActionTokenizer

OFT, BASE = Reference("oft"), Reference("base")
IMAGES = np.load(GOLDEN / "preprocess" / "reference.npz")
PROMPTS = OFT.prompts
VOCABULARY = ActionTokenizer()


def levels(found, wanted):
    """The largest difference of uint8 images, and the share of numbers that differ."""
    difference = np.abs(np.asarray(found).astype(int) - wanted)
    return difference.max(), (difference > 0).mean()


@torch.no_grad()
def hidden_states(vla, case, chosen=(0, 1, 2)):
    """What the policy makes of the reference's pixels, prompts and proprioception."""
    rows = list(chosen)
    patches = vla.model.embed_pixels(OFT.pixels(CASES[case][0])[rows])
    observed = vla.observe(patches, OFT.arrays["state"][rows])
    return vla.decode(observed, [PROMPTS[i] for i in rows])


@torch.no_grad()
def generate(vla, chosen=(0, 1, 2)):
    patches = vla.model.embed_pixels(OFT.pixels(1)[list(chosen)])
    return vla.generate(patches, [PROMPTS[i] for i in chosen])


# ---------------------------------------------------------------------- against the reference


def test_hidden_states_are_the_reference_s(oft):
    case, vla = oft
    assert isinstance(vla, FrozenVLA) and isinstance(vla, TrainableTokenVLA)
    hidden = hidden_states(vla, case)
    assert hidden.shape == (3, 56, 16) == (3, vla.num_hidden_tokens, vla.hidden_size)
    assert gap(hidden, OFT.of(case, "hidden")) < 1e-4
    logits = vla.token_logits(hidden)
    assert logits.shape == (3, 8, 7, 256)
    # Bin 0, the lowest action, has the highest id.
    assert gap(logits.flip(-1).reshape(3, 56, 256), OFT.of(case, "logits_last256")) < 1e-3


def test_actions_are_the_reference_s(oft):
    case, vla = oft
    hidden = torch.from_numpy(OFT.of(case, "hidden"))
    with torch.no_grad():
        normalized = vla.normalized_actions(hidden)
    wanted = OFT.of(case, "actions")
    if case == "tokens_1img":
        tokens = vla.token_logits(hidden).argmax(-1)
        ids = VOCABULARY.bins_to_ids(tokens).reshape(3, 56)
        np.testing.assert_array_equal(ids, OFT.of(case, "token_ids"))
        found = vla.tokens_to_actions(tokens)
    else:
        assert gap(normalized, OFT.of(case, "normalized")) < 1e-4
        found = vla.to_env(normalized)
    assert gap(vla.normalizer.unnormalize(normalized), wanted) < 1e-4
    assert found.dtype == torch.float32
    assert gap(found[..., :6], wanted[..., :6].clip(-1, 1)) < 1e-4  # the controller clips, too
    # The policy's 1 opens, the environment's -1 opens.
    np.testing.assert_array_equal(found[..., 6], np.where(wanted[..., 6] > 0.5, -1, 1))


def test_proprioception_and_its_token_are_the_reference_s(policies):
    vla = policies["l1_2img_proprio"]
    state = torch.from_numpy(OFT.arrays["state"])
    found = vla.proprio_normalizer.normalize(state)
    assert gap(found, OFT.arrays["proprio_normalized"]) < 1e-6
    with torch.no_grad():
        patches = vla.model.embed_pixels(OFT.pixels(2)[:1])
        observed = vla.observe(patches, OFT.arrays["state"][:1])
        made = sequence.parallel_sequences(vla.model, observed, PROMPTS[:1], 56)
    assert gap(made.embeddings, OFT.arrays["l1_2img_proprio_0_inputs_embeds"]) < 1e-4
    assert made.lengths.tolist() == [OFT.arrays["l1_2img_proprio_0_seq_len"]]


def test_openvla_s_tokens_are_the_reference_s(base):
    assert isinstance(base, TokenVLA) and base.horizon == 1
    hidden, logits, tokens = generate(base)
    assert gap(hidden, BASE.of("", "hidden")) < 1e-4
    assert gap(logits.flip(-1), BASE.of("", "logits_last256")) < 1e-3
    np.testing.assert_array_equal(VOCABULARY.bins_to_ids(tokens), BASE.of("", "token_ids"))
    wanted = BASE.of("", "actions")
    found = base.tokens_to_actions(tokens[:, None])[:, 0]
    assert gap(found[:, :6], wanted[:, :6].clip(-1, 1)) < 1e-4
    np.testing.assert_array_equal(found[:, 6], np.where(wanted[:, 6] > 0.5, -1, 1))


def test_a_batch_of_mixed_prompt_lengths_equals_single_rows(oft):
    case, vla = oft
    assert len({len(ids) for ids in PROMPTS}) == 3
    together = hidden_states(vla, case)
    for i in range(3):
        assert gap(together[i], hidden_states(vla, case, (i,))[0]) < 1e-5


def test_a_batch_of_openvla_equals_single_rows(base):
    hidden, logits, tokens = generate(base)
    for i in range(3):
        one_hidden, one_logits, one_tokens = generate(base, (i,))
        assert gap(hidden[i], one_hidden[0]) < 1e-5
        assert gap(logits[i], one_logits[0]) < 1e-4  # of size 30
        assert tokens[i].tolist() == one_tokens[0].tolist()


def test_images_are_tensorflow_s():
    """Crop, JPEG and normalisation exact; lanczos3 sums in another order."""
    frames = IMAGES["images"]
    np.testing.assert_array_equal(openvla_images.jpeg_roundtrip(frames), IMAGES["jpeg_roundtrip"])
    shrunk = openvla_images.lanczos_resize(torch.from_numpy(frames), 224)
    assert levels(shrunk, IMAGES["resized224_nojpeg"]) < (1, 0.03)
    cropped = openvla_images.center_crop(torch.from_numpy(IMAGES["resized224"]))
    np.testing.assert_array_equal(cropped, IMAGES["centercrop224"])
    upright = frames[:, ::-1, ::-1]
    whole = openvla_images.preprocess([upright], 224, "cpu")
    assert levels(whole, IMAGES["centercrop224"]) < (1, 0.03)
    pixels = openvla_images.normalize_pixels(torch.from_numpy(IMAGES["centercrop224"]))
    assert gap(pixels[0, :, ::32], IMAGES["pixel_values_0_rows"]) < 1e-6
    means = pixels.double().mean((2, 3))
    assert gap(means, IMAGES["pixel_values_checksum"][0]) < 1e-6


# ---------------------------------------------------------------------- known traps


TRAPS = {
    "causal attention": lambda _: {"causal": True, "mask": None},
    "padding that is not hidden": lambda _: {"mask": None},
    "states of the placeholders themselves": lambda named: {"rows": named["rows"] + 1},
}


@pytest.mark.parametrize("trap", TRAPS)
def test_wrong_attention_or_rows_are_noticed(oft, monkeypatch, trap):
    case, vla = oft
    rewire(monkeypatch, vla, TRAPS[trap])
    assert gap(hidden_states(vla, case), OFT.of(case, "hidden")) > 0.1


def test_what_is_around_the_placeholders_matters(oft, monkeypatch):
    case, vla = oft
    wanted = OFT.of(case, "hidden")
    with monkeypatch.context() as patch:
        patch.setattr(
            vla, "options", replace(vla.options, append_stop=False)
        )  # what RLinf trains with
        assert gap(hidden_states(vla, case), wanted) > 0.1
    monkeypatch.setattr(sequence, "_NOTHING", 1)  # their ids, not multiplied by zero
    assert gap(hidden_states(vla, case), wanted) > 0.1


def test_attention_in_both_directions_is_noticed_in_openvla(base, monkeypatch):
    rewire(monkeypatch, base, lambda _: {"causal": False, "mask": None})
    hidden, _, tokens = generate(base)
    assert gap(hidden, BASE.of("", "hidden")) > 1.0
    assert (VOCABULARY.bins_to_ids(tokens).numpy() != BASE.of("", "token_ids")).any()


def test_llama_2_s_own_epsilon_is_noticed(tmp_path):
    text = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    folder = make_checkpoint(tmp_path / "eps", text_config=text | {"rms_norm_eps": 1e-5})
    hidden = hidden_states(OpenVLAOFTBackend.from_pretrained(folder), "l1_2img_proprio")
    assert gap(hidden, OFT.of("l1_2img_proprio", "hidden")) > 2e-4
    # Published checkpoints leave it out.
    assert OpenVLAConfig().text.rms_norm_eps == 1e-6


def test_another_gelu_or_swapped_towers_are_noticed(policies, monkeypatch):
    vla, wanted = policies["l1_2img_proprio"], OFT.of("l1_2img_proprio", "hidden")
    with monkeypatch.context() as patch:
        patch.setattr(vision.F, "gelu", partial(F.gelu, approximate="tanh"))
        assert gap(hidden_states(vla, "l1_2img_proprio"), wanted) > 1.5e-4
    embed = vla.model.embed_pixels
    for axis in (1, 2):  # agentview and wrist; DINOv2 and SigLIP
        with monkeypatch.context() as patch:
            patch.setattr(
                vla.model,
                "embed_pixels",
                lambda x, axis=axis: embed(
                    x.reshape(len(x), 2, 2, 3, 56, 56).flip(axis).view_as(x)
                ),
            )
            assert gap(hidden_states(vla, "l1_2img_proprio"), wanted) > 0.1


def test_other_ways_to_make_the_images_are_noticed(monkeypatch):
    frames, upright = IMAGES["images"], IMAGES["images"][:, ::-1, ::-1]
    wanted = IMAGES["centercrop224"]
    for options in ({"jpeg": False}, {"crop": False}):
        assert levels(openvla_images.preprocess([upright], 224, "cpu", **options), wanted)[1] > 0.3
    # Not turned, or turned upside down alone.
    for wrong in (frames, frames[:, :, ::-1]):
        assert levels(openvla_images.preprocess([wrong], 224, "cpu"), wanted)[1] > 0.3
    slow = openvla_images.simplejpeg.decode_jpeg
    monkeypatch.setattr(openvla_images.simplejpeg, "decode_jpeg", lambda data, **_: slow(data))
    found = openvla_images.jpeg_roundtrip(frames)
    assert levels(found, IMAGES["jpeg_roundtrip"])[1] > 0.3
    pillow = [
        Image.fromarray(frame).resize((224, 224), Image.Resampling.LANCZOS) for frame in frames
    ]
    assert levels(np.stack(pillow), IMAGES["resized224_nojpeg"])[0] > 1
