"""What a chunk costs, the roofline, and ``vla-gym bench --vla``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from openvla_checkpoints import CHECKPOINT, make_checkpoint, observe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vla_gym.cli.bench import vla as bench
from vla_gym.cli.main import main
from vla_gym.errors import ConfigError, NotEnoughMemoryError
from vla_gym.vla import checkpoint_files, load
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.cost import Cost, CountsCost, watched_cost
from vla_gym.vla.openvla import random_weights
from vla_gym.vla.openvla.autoregressive import OpenVLABackend
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.heads import L1ActionHead, ProprioProjector
from vla_gym.vla.openvla.model import OpenVLAModel
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym.vla.openvla.random_weights import random_policy
from vla_gym.vla.openvla_cost import autoregressive_cost, parallel_cost

FULL = {"horizon": 8, "stop": True, "itemsize": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cost") / "tiny")


@pytest.fixture(scope="module")
def tiny():
    return OpenVLAConfig.from_checkpoint(CHECKPOINT, Checkpoint(CHECKPOINT).shapes)


def test_the_roofline_is_the_larger_of_two_times():
    bound_by_arithmetic = Cost({"a": 1e12, "b": 3e12}, 8e9)
    assert bound_by_arithmetic.roofline(1, 1e12, 1e12) == pytest.approx(0.25)
    assert bound_by_arithmetic.roofline(10, 1e12, 1e12) == pytest.approx(0.25)
    bound_by_memory = Cost({"a": 1e9}, 8e12)
    assert bound_by_memory.roofline(10, 1e12, 4e12) == pytest.approx(5.0)
    with pytest.raises(ConfigError, match="positive"):
        bound_by_memory.roofline(1, 0.0, 1e12)


@pytest.mark.parametrize("head", ["l1", "token"])
def test_counted_operations_are_those_that_run(folder, monkeypatch, head):
    vla = OpenVLAOFTBackend.from_pretrained(folder, head=head)
    assert isinstance(vla, CountsCost)
    check_count(vla, monkeypatch)


def test_counted_operations_of_openvla_are_those_that_run(folder, monkeypatch):
    check_count(OpenVLABackend.from_pretrained(folder), monkeypatch)


def check_count(vla, monkeypatch):
    inputs = observe(1)
    pixels = vla.pixels(inputs[0], inputs[1])
    monkeypatch.setattr(vla, "pixels", lambda *_: pixels)  # preprocessing is not counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        vla.infer(*inputs)
    # The rotary tables' products are left out.
    assert vla.cost(inputs[1][0]).total_flops == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_cost_of_the_published_size():
    """Beside an independent count by hand: 0.74 + 0.07 + 7.97 TFLOP, 14.8 GB; 4.92, 14.5."""
    config = OpenVLAConfig()
    two = parallel_cost(config, views=2, prompt=31, proprio=True, l1=True, **FULL)
    assert two.flops["vision towers"] / 1e12 == pytest.approx(0.74, abs=0.005)
    assert two.flops["projector"] / 1e12 == pytest.approx(0.07, abs=0.005)
    # That count has all rows of the last layer: 2.5 % more.
    assert two.flops["language model"] / 1e12 == pytest.approx(7.97 * 0.975, rel=3e-3)
    assert two.weight_bytes / 1e9 == pytest.approx(14.8, abs=0.05)
    one = parallel_cost(config, views=1, prompt=31, proprio=False, l1=False, **FULL)
    assert one.total_flops / 1e12 == pytest.approx(4.92 * 0.98, rel=5e-3)
    assert one.weight_bytes / 1e9 == pytest.approx(14.5, abs=0.05)
    slow = autoregressive_cost(config, 31, 2)
    assert slow.total_flops / 1e12 == pytest.approx(4.1, abs=0.1)
    assert slow.weight_bytes / 1e9 == pytest.approx(13 * 7, abs=2)


def test_weights_that_a_pass_reads():
    config = OpenVLAConfig()
    with torch.device("meta"):
        model = OpenVLAModel(config)
        heads = [L1ActionHead(4096), ProprioProjector(8, 4096)]
    for tower in model.vision_backbone.children():
        tower.drop_unused()
    parts = [model.vision_backbone, model.projector, model.llama.layers, *heads]
    size = sum(p.numel() for part in parts for p in part.parameters())
    found = parallel_cost(config, views=2, prompt=31, proprio=True, l1=True, **FULL)
    assert found.weight_bytes == pytest.approx(2 * size, rel=1e-4)


def test_other_backends_are_watched():
    vla = load("mini")
    images, texts, proprio = bench.observations(vla, 1, ["open the drawer"])
    cost = watched_cost(vla, images, texts[0], proprio)
    assert cost.counted == "run" and cost.total_flops > 1e7
    assert cost.weight_bytes == 4 * sum(p.numel() for p in vla.model.parameters())


@pytest.mark.parametrize("kind", ["openvla", "openvla-oft"])
def test_random_policies_act(tiny, kind):
    vla = random_policy(kind, config=tiny)
    output = vla.infer(*observe(2))
    assert output.actions.shape == (2, vla.horizon, 7) and output.actions.isfinite().all()
    assert output.hidden.std() > 0.1
    assert not any(p.is_meta or p.requires_grad for p in vla.model.parameters())


def test_random_policies_say_what_is_wrong(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="openvla or openvla-oft, got 'pi0'"):
        random_policy("pi0")
    with pytest.raises(ConfigError, match="do not take this"):
        random_policy("openvla", config=tiny, horizon=3)
    monkeypatch.setattr(checkpoint_files, "free_memory", lambda _: 10**9)
    with pytest.raises(NotEnoughMemoryError, match="15.3 GB on cpu, which has 1.0 GB"):
        random_policy("openvla-oft", dtype=torch.bfloat16)


def test_bench_writes_speeds_and_roofline(folder, tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["--vla", f"openvla-oft:{folder}", "--batch-sizes", "1", "3", "--json", str(file)]
    arguments += ["--repeats", "2", "--warmup", "0", "--peak-tflops", "1", "--bandwidth-tb", "0.1"]
    assert main(["bench", *arguments, "--options", "pad_prompt_to=30", "head=token"]) == 0
    report = json.loads(file.read_text())
    assert report["vla"] == "tiny" and report["horizon"] == 8
    assert [row["batch"] for row in report["batches"]] == [1, 3]
    cost = Cost(report["cost"]["flops"], report["cost"]["weight_bytes"])
    for row in report["batches"]:
        assert row["chunks_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["roofline"] == pytest.approx(cost.roofline(row["batch"], 1e12, 1e11))
        assert row["share"] == pytest.approx(row["chunks_per_s"] / row["roofline"])
        rate = row["chunks_per_s"] * cost.total_flops / 1e12
        assert row["tflops_per_s"] == pytest.approx(rate) and row["peak_mb"] is None
    shown = capsys.readouterr().out
    assert "TFLOP" in shown and "from the config" in shown


def test_bench_without_a_path_takes_random_weights(tiny, monkeypatch):
    asked = []

    def small(kind, **options):
        asked.append((kind, options))
        return random_policy(kind, config=tiny)

    monkeypatch.setattr(random_weights, "random_policy", small)
    config = bench.VLABenchConfig("openvla-oft", dtype="bfloat16", options=("num_views=1",))
    assert bench.load_vla(config).name == "openvla-oft-random"
    wanted = {"device": "cpu", "dtype": torch.bfloat16, "compile": False, "num_views": 1}
    assert asked == [("openvla-oft", wanted)]


def test_bench_says_what_is_wrong(folder):
    for options, message in (
        ({"batch_sizes": (0,)}, "batch_sizes must be positive"),
        ({"repeats": 0}, "repeats"),
        ({"peak_tflops": 1.0}, "both peak_tflops and bandwidth_tb"),
        ({"peak_tflops": -1.0, "bandwidth_tb": 1.0}, "must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench.VLABenchConfig("mini", **options)
    for option, message in (("head", "name=value"), ("views=2", "does not take these options")):
        with pytest.raises(ConfigError, match=message):
            bench.load_vla(bench.VLABenchConfig(f"openvla-oft:{folder}", options=(option,)))


def test_observations_take_the_instructions_in_turn(folder):
    vla = load(f"openvla-oft:{folder}")
    images, texts, proprio = bench.observations(vla, 3, ["a", "b"])
    assert texts == ["a", "b", "a"] and proprio.shape == (3, 8)
    assert images["wrist"].shape == (3, 256, 256, 3) and images["wrist"].dtype == np.uint8


def test_gpu_script_measures_every_variant(tiny, monkeypatch, tmp_path):
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_vla_gpu.py"
    spec = importlib.util.spec_from_file_location("bench_vla_gpu", file)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(script)

    def small(kind, compile=False, **options):
        if options.get("num_views") == 1 and compile:
            raise NotEnoughMemoryError("too large")
        return random_policy(kind, config=tiny, **options)  # compiling is another test's matter

    monkeypatch.setattr(random_weights, "random_policy", small)
    out = tmp_path / "report"
    arguments = ["--out", str(out), "--device", "cpu", "--batches", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_vla_gpu.py", *arguments, "--no-render"])
    script.main()
    variants = json.loads(out.with_suffix(".json").read_text())["variants"]
    assert list(variants) == list(script.VARIANTS)
    failed = variants.pop("tokens, graphs")
    assert failed["error"] == "NotEnoughMemoryError: too large"
    assert all(part["batches"][0]["chunks_per_s"] > 0 for part in variants.values())
    assert variants["graphs"]["config"]["compile"] == "True"
    page = out.with_suffix(".md").read_text()
    assert page.count("| 1 |") == len(variants) and "too large" in page
