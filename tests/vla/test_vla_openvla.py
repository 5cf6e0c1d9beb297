"""OpenVLA and OpenVLA-OFT against the outputs of the reference implementations."""

import multiprocessing
from dataclasses import replace

import numpy as np
import torch
from openvla_checkpoints import CASES, GOLDEN, Reference, gap

from vla_gym.vla import FrozenVLA, TokenVLA
from vla_gym.vla.base import TrainableTokenVLA
from vla_gym.vla.openvla import images as openvla_images
from vla_gym.vla.openvla import sequence
from vla_gym.vla.tokens import bins_to_actions

OFT, BASE = Reference("oft"), Reference("base")
IMAGES = np.load(GOLDEN / "preprocess" / "reference.npz")
PROMPTS = OFT.prompts


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
    wanted = OFT.of(case, "actions")
    if case == "tokens_1img":
        tokens = vla.token_logits(hidden).argmax(-1)
        normalized = bins_to_actions(tokens)
        ids = vla.model.action_ids(tokens).reshape(3, 56)
        np.testing.assert_array_equal(ids, OFT.of(case, "token_ids"))
        found = vla.tokens_to_actions(tokens)
    else:
        normalized = vla.action_head(hidden)
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
        after = [[sequence.NOTHING] * 56 + [sequence.STOP]]
        made = sequence.make_sequences(vla.model, observed, PROMPTS[:1], after, 56)
    assert gap(made.embeddings, OFT.arrays["l1_2img_proprio_0_inputs_embeds"]) < 1e-4
    assert made.lengths.tolist() == [OFT.arrays["l1_2img_proprio_0_seq_len"]]


def test_openvla_s_tokens_are_the_reference_s(base):
    assert isinstance(base, TokenVLA) and base.horizon == 1
    hidden, logits, tokens = generate(base)
    assert gap(hidden, BASE.of("", "hidden")) < 1e-4
    assert gap(logits.flip(-1), BASE.of("", "logits_last256")) < 1e-3
    np.testing.assert_array_equal(base.model.action_ids(tokens), BASE.of("", "token_ids"))
    wanted = BASE.of("", "actions")
    found = base.tokens_to_actions(tokens[:, None])[:, 0]
    assert gap(found[:, :6], wanted[:, :6].clip(-1, 1)) < 1e-4
    np.testing.assert_array_equal(found[:, 6], np.where(wanted[:, 6] > 0.5, -1, 1))


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


def test_a_forked_process_goes_on_with_jpegs():
    """Threads are not forked along: it would wait for those of its parent."""
    frames = IMAGES["images"]
    openvla_images.jpeg_roundtrip(frames)
    child = multiprocessing.get_context("fork").Process(
        target=openvla_images.jpeg_roundtrip, args=(frames,)
    )
    child.start()
    child.join(60.0)
    ended = child.exitcode
    child.kill()
    assert ended == 0


# ---------------------------------------------------------------------- options


def test_the_stop_token_can_be_left_out(oft, monkeypatch):
    """What RLinf trains with."""
    case, vla = oft
    monkeypatch.setattr(vla, "options", replace(vla.options, append_stop=False))
    assert gap(hidden_states(vla, case), OFT.of(case, "hidden")) > 0.1


def test_jpeg_and_crop_can_be_left_out():
    upright, wanted = IMAGES["images"][:, ::-1, ::-1], IMAGES["centercrop224"]
    for options in ({"jpeg": False}, {"crop": False}):
        assert levels(openvla_images.preprocess([upright], 224, "cpu", **options), wanted)[1] > 0.3
