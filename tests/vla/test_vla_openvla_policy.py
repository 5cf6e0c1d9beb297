"""OpenVLA and OpenVLA-OFT from observations to chunks and tokens, and tokens of mini."""

import copy

import numpy as np
import pytest
import torch
from mini_vla import small_config
from openvla_checkpoints import CASES, Reference, gap
from vla_checkpoints import observe

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.vla import TokenVLA
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA
from vla_gym.vla.openvla import images as openvla_images
from vla_gym.vla.openvla import sequence
from vla_gym.vla.openvla.autoregressive import OpenVLABackend
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym.vla.tokens import actions_to_bins, bins_to_actions, token_log_probs

OFT = Reference("oft")


# ---------------------------------------------------------------------- from observations


def test_infer_looks_at_the_views_and_the_proprioception_that_it_has(oft, base):
    case, vla = oft
    images, texts, proprio = observe(vla)
    count = CASES[case][0]
    assert vla.cameras == ("agentview", "wrist")[:count] and base.cameras == ("agentview",)
    pixels = vla.pixels(images, texts)
    for i in range(3):  # the views of a row stand next to each other, each prepared alone
        views = [images[name][i : i + 1] for name in vla.cameras]
        alone = openvla_images.preprocess(views, 56, "cpu")
        assert torch.equal(alone, pixels[i * count : (i + 1) * count])
    moved = vla.infer(images, texts, proprio + 0.2)
    found = gap(moved.hidden, vla.infer(images, texts, proprio).hidden)
    assert (found > 1e-3) == (case == "l1_2img_proprio")


def test_prompts():
    seen = []
    prompts = sequence.Prompts(lambda text: seen.append(text) or [5, 6], 32064)
    assert prompts(["Push the Plate"]) == [(1, 5, 6, 29871)]
    assert seen == ["In: What action should the robot take to push the plate?\nOut:"]
    assert sequence.Prompts(lambda _: [1, 7, 29871], 32064)(["x"]) == [(1, 7, 29871)]
    with pytest.raises(WeightsError, match="ids up to 40000"):
        sequence.Prompts(lambda _: [40000], 32064)(["x"])


def test_a_fixed_prompt_length_changes_nothing(checkpoints, monkeypatch):
    folder = checkpoints["l1_2img_proprio"]
    vla = OpenVLAOFTBackend.from_pretrained(folder, pad_prompt_to=40)
    images, texts, proprio = observe(vla)
    wanted = OpenVLAOFTBackend.from_pretrained(folder).infer(images, texts, proprio)
    passes, run = [], vla._run_layers
    monkeypatch.setattr(
        vla, "_run_layers", lambda *args, **named: passes.append(named) or run(*args, **named)
    )
    found = vla.infer(images, texts, proprio)
    assert gap(found.hidden, wanted.hidden) < 1e-5
    assert gap(found.actions, wanted.actions) < 1e-5
    assert [named["mask"].shape for named in passes] == [(3, 1, 1, 1 + 32 + 1 + 39 + 57)]
    with pytest.raises(ConfigError, match="pad_prompt_to=40: raise it"):
        vla.infer(images, ["put the bowl on the plate " * 10] * 3, proprio)


def test_a_compiled_policy_computes_the_same(checkpoints, monkeypatch):
    """Traced as for a GPU and run without code generation, which takes minutes here."""
    compiled, modes = [], []

    def trace(function, mode):
        compiled.append(function)
        modes.append(mode)
        return torch_compile(function, backend="aot_eager", fullgraph=True)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", trace)
    folder = checkpoints["l1_1img"]
    options = {"pad_prompt_to": 30, "compile_mode": "reduce-overhead"}
    vla = OpenVLAOFTBackend.from_pretrained(folder, compile=True, **options)
    assert len(compiled) == 2 and modes == ["reduce-overhead"] * 2
    images, texts, proprio = observe(vla)
    plain = OpenVLAOFTBackend.from_pretrained(folder).infer(images, texts, proprio)
    assert gap(vla.infer(images, texts, proprio).hidden, plain.hidden) < 1e-5
    other = copy.deepcopy(vla)  # runs its own network, as a student that is trained must
    with torch.no_grad():
        other.model.projector.fc3.weight.mul_(2.0)
    assert gap(other.infer(images, texts, proprio).hidden, plain.hidden) > 1e-3
    with pytest.raises(ConfigError, match="compile_mode.*: expected 'default' or"):
        OpenVLAOFTBackend.from_pretrained(folder, compile=True, compile_mode="fast")


# ---------------------------------------------------------------------- tokens


def test_bins_are_numpy_digitize_s():
    """The reference: numpy.digitize against 256 edges."""
    values = np.concatenate([np.linspace(-1.2, 1.2, 997), np.linspace(-1, 1, 256)])
    edges = np.linspace(-1, 1, 256)
    bins = actions_to_bins(torch.from_numpy(values))
    np.testing.assert_array_equal(bins, np.digitize(values.clip(-1, 1), edges) - 1)
    assert bins.min() == 0 and bins.max() == 255
    centres = (edges[1:] + edges[:-1]) / 2
    decoded = bins_to_actions(torch.arange(256))
    assert gap(decoded, [*centres, centres[-1]]) < 1e-7 and len(decoded.unique()) == 255
    inside = torch.from_numpy(values.clip(-1, 1))
    assert gap(bins_to_actions(bins), inside) <= 1 / 255 + 1e-6


def test_log_probabilities_are_of_the_reference_s_logits(policies):
    vla = policies["tokens_1img"]
    logits = vla.token_logits(torch.from_numpy(OFT.of("tokens_1img", "hidden")))
    ids = torch.from_numpy(OFT.of("tokens_1img", "token_ids"))
    for temperature in (1.0, 1.6):
        last256 = torch.from_numpy(OFT.of("tokens_1img", "logits_last256"))
        wanted = (last256 / temperature).log_softmax(-1).gather(-1, ids[..., None] - 31744)
        tokens = (31999 - ids).reshape(3, 8, 7)
        found = token_log_probs(logits, tokens, temperature)
        assert gap(found.reshape(3, 56), wanted[..., 0]) < 1e-4


@pytest.mark.parametrize("name", ["openvla-oft", "openvla", "mini"])
def test_tokens_are_drawn_and_scored_alike(policies, base, name):
    mini = MiniBackend(MiniVLA(small_config()), head="token")
    vla = {"openvla-oft": policies["tokens_1img"], "openvla": base, "mini": mini}[name]
    assert isinstance(vla, TokenVLA) and vla.head == "token" and "token" in vla.heads
    assert VLAPolicy(vla, head="token", temperature=1.0).identity["head"] == "token"
    inputs, shape = observe(vla), (3, vla.horizon, 7)
    greedy, _ = vla.act_tokens(*inputs, temperature=0.0)
    assert torch.equal(vla.tokens_to_actions(greedy), vla.infer(*inputs).actions)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    draws = [vla.act_tokens(*inputs, temperature=1.6, generator=g) for g in generators]
    tokens, log_probs = draws[0]
    assert tokens.shape == log_probs.shape == shape and tokens.dtype == torch.int64
    assert 0 <= tokens.min() <= tokens.max() < 256
    assert torch.equal(tokens, draws[1][0]) and not torch.equal(tokens, draws[2][0])
    scored = vla.token_log_probs(*inputs, tokens, temperature=1.6)
    assert gap(scored, log_probs) < 1e-4
    assert gap(vla.token_log_probs(*inputs, tokens), scored) > 1e-3
    with pytest.raises(ConfigError, match=rf"tokens \(3, {vla.horizon}, 7\), got \(3, .*, 3\)"):
        vla.token_log_probs(*inputs, tokens[..., :3])


@pytest.mark.parametrize("name", ["openvla-oft", "openvla"])
def test_gradients_of_log_probabilities_reach_the_network(checkpoints, name):
    backend = {"openvla-oft": OpenVLAOFTBackend, "openvla": OpenVLABackend}[name]
    vla = backend.from_pretrained(checkpoints["tokens_1img"])
    vla.model.requires_grad_(True)
    inputs = observe(vla)
    tokens, _ = vla.act_tokens(*inputs, generator=torch.Generator().manual_seed(0))
    vla.token_log_probs(*inputs, tokens).sum().backward()
    without = [n for n, p in vla.model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_actions_to_tokens_undoes_tokens_to_actions(policies):
    vla = policies["tokens_1img"]
    tokens = torch.arange(255)[:, None, None].expand(255, 8, 7).contiguous()
    again = vla.actions_to_tokens(vla.tokens_to_actions(tokens))
    assert torch.equal(again[..., :6], tokens[..., :6])
    # The gripper is a switch: 0 closes, 1 opens.
    assert set(again[..., 6].unique().tolist()) == {127, 255}
