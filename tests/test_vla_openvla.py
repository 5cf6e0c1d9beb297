"""OpenVLA and OpenVLA-OFT against the outputs of the reference implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from openvla_checkpoints import Reference, make_checkpoint

from vla_gym.vla import FrozenVLA, TokenVLA, load
from vla_gym.vla import openvla_sequence as sequence
from vla_gym.vla.base import TrainableTokenVLA
from vla_gym.vla.openvla import OpenVLABackend
from vla_gym.vla.tokens import ActionTokenizer

OFT, BASE = Reference("oft"), Reference("base")
PROMPTS = OFT.prompts
#: Cases of the reference: views, and the files that a checkpoint of that kind lacks.
CASES = {
    "l1_2img_proprio": (2, ()),
    "l1_1img": (1, ("proprio_projector",)),
    "tokens_1img": (1, ("proprio_projector", "action_head")),
}
VOCABULARY = ActionTokenizer()


def gap(found, wanted):
    return float(np.abs(np.asarray(found) - np.asarray(wanted)).max())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by case."""
    root = tmp_path_factory.mktemp("openvla")
    return {case: make_checkpoint(root / case, without) for case, (_, without) in CASES.items()}


@pytest.fixture(scope="module")
def policies(checkpoints):
    return {case: load(f"openvla-oft:{folder}") for case, folder in checkpoints.items()}


@pytest.fixture(scope="module", params=CASES)
def golden(request, policies):
    """A case's name and its backend."""
    return request.param, policies[request.param]


@pytest.fixture(scope="module")
def base(checkpoints):
    return OpenVLABackend.from_pretrained(checkpoints["tokens_1img"])


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


def test_hidden_states_are_the_reference_s(golden):
    case, vla = golden
    assert isinstance(vla, FrozenVLA) and isinstance(vla, TrainableTokenVLA)
    hidden = hidden_states(vla, case)
    assert hidden.shape == (3, 56, 16) == (3, vla.num_hidden_tokens, vla.hidden_size)
    assert gap(hidden, OFT.of(case, "hidden")) < 1e-4
    logits = vla.token_logits(hidden)
    assert logits.shape == (3, 8, 7, 256)
    # Bin 0, the lowest action, has the highest id.
    assert gap(logits.flip(-1).reshape(3, 56, 256), OFT.of(case, "logits_last256")) < 1e-3


def test_actions_are_the_reference_s(golden):
    case, vla = golden
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


def test_a_batch_of_mixed_prompt_lengths_equals_single_rows(golden):
    case, vla = golden
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
