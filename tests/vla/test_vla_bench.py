"""``vla-gym bench --vla``, and policies with random weights."""

import json
from types import SimpleNamespace

import pytest
import torch
from openvla_checkpoints import CHECKPOINT, make_checkpoint
from vla_checkpoints import observe

from vla_gym import memory
from vla_gym.cli.bench import vla as bench
from vla_gym.cli.main import main
from vla_gym.errors import ConfigError, NotEnoughMemoryError
from vla_gym.vla import load
from vla_gym.vla.openvla import random_weights
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.random_weights import random_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cost") / "tiny")


@pytest.fixture(scope="module")
def tiny():
    return OpenVLAConfig.from_checkpoint(CHECKPOINT)


@pytest.mark.parametrize("kind", ["openvla", "openvla-oft"])
def test_random_policies_act(tiny, kind):
    vla = random_policy(kind, config=tiny)
    output = vla.infer(*observe(vla, 2))
    assert output.actions.shape == (2, vla.horizon, 7) and output.actions.isfinite().all()
    assert output.hidden.std() > 0.1
    assert not any(p.is_meta or p.requires_grad for p in vla.model.parameters())


def test_random_policies_say_what_is_wrong(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="openvla or openvla-oft, got 'pi0'"):
        random_policy("pi0")
    with pytest.raises(ConfigError, match="does not take these options: horizon"):
        random_policy("openvla", config=tiny, horizon=3)
    monkeypatch.setattr(memory, "free_memory", lambda _: 10**9)
    with pytest.raises(NotEnoughMemoryError, match="15.3 GB on cpu, which has 1.0 GB"):
        random_policy("openvla-oft", dtype=torch.bfloat16)


def test_bench_writes_speeds(folder, tmp_path, capsys):
    file = tmp_path / "report.json"
    spec = f"openvla-oft:{folder}?pad_prompt_to=30&head=token"
    arguments = ["--vla", spec, "--batch-sizes", "1", "3", "--json", str(file)]
    arguments += ["--repeats", "2", "--warmup", "0"]
    assert main(["bench", *arguments]) == 0
    report = json.loads(file.read_text())
    assert report["vla"] == "tiny" and report["horizon"] == 8
    assert [row["batch"] for row in report["batches"]] == [1, 3]
    for row in report["batches"]:
        assert row["chunks_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["peak_mb"] is None
    assert "chunks/s" in capsys.readouterr().out


def test_bench_without_a_path_takes_random_weights(tiny, monkeypatch):
    asked = []

    def small(kind, **options):
        asked.append((kind, options))
        return random_policy(kind, config=tiny)

    monkeypatch.setattr(random_weights, "random_policy", small)
    config = bench.VLABenchConfig("openvla-oft?num_views=1", dtype="bfloat16")
    assert bench.load_vla(config).name == "openvla-oft-random"
    wanted = {"device": "cpu", "dtype": torch.bfloat16, "compile": False, "num_views": 1}
    assert asked == [("openvla-oft", wanted)]


def test_bench_says_what_is_wrong(folder):
    for options, message in (
        ({"batch_sizes": (0,)}, "batch_sizes must be positive"),
        ({"repeats": 0}, "repeats"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench.VLABenchConfig("mini", **options)
    with pytest.raises(ConfigError, match="does not take these options"):
        bench.load_vla(bench.VLABenchConfig(f"openvla-oft:{folder}?views=2"))
    with pytest.raises(ConfigError, match="device 'gpu' is not there"):
        bench.load_vla(bench.VLABenchConfig("openvla", device="gpu"))


def test_observations_take_the_instructions_in_turn(folder):
    vla = load(f"openvla-oft:{folder}")
    images, texts, proprio = bench.observations(vla, 3, ["a", "b"])
    assert texts == ["a", "b", "a"] and proprio.shape == (3, 8)
    assert images["wrist"].shape == (3, 256, 256, 3) and str(images["wrist"].dtype) == "uint8"
    small = SimpleNamespace(image_size=8, cameras=("front",), proprio_size=5)
    images, _, proprio = bench.observations(small, 2, ["a"])
    assert list(images) == ["front"] and proprio.shape == (2, 5)
