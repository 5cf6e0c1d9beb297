"""The steps of gpu_check.py: each yields the figures that it measures, one after another."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

TEXT = "open the middle drawer of the cabinet"
COMPILE_MODES = {"forward-compiled": None, "forward-graphs": "reduce-overhead"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where to measure, and what with."""

    device: str = "cuda"
    """Torch device."""
    tiny: bool = False
    """Tiny networks and few repeats, to test this script."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one of CUDA's."""
        return torch.device(self.device).type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Return the mean time of a call, after one call outside the clock."""
        run()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        self.synchronize()
        return (time.perf_counter() - begin) / repeats

    def peak_gb(self) -> float | None:
        """Return the most memory that tensors held since the last call, in 10^9 bytes."""
        if not self.on_gpu:
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def policy(self, **options: Any) -> Any:
        """Return OpenVLA-OFT with random weights."""
        from vla_gym.vla.openvla.config import OpenVLAConfig, _llama, _Text
        from vla_gym.vla.openvla.random_weights import random_policy

        config = OpenVLAConfig()
        if self.tiny:
            first, second = (
                replace(tower, width=32, depth=2, num_heads=2, mlp_width=64)
                for tower in config.towers
            )
            text = _Text(
                hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2
            )
            config = OpenVLAConfig((first, second), text=_llama(text))
        return random_policy("openvla-oft", device=self.device, config=config, **options)


def peaks(on: Device) -> tuple[float, float]:
    """Measure the device: TFLOP/s of a large matrix product, TB/s of a copy (read and write)."""
    dtype = torch.bfloat16 if on.on_gpu else torch.float32
    side, count = (512, 2**24) if on.tiny else (8192, 2**30)
    a = torch.randn(side, side, device=on.device, dtype=dtype)
    product = on.seconds(lambda: a @ a, 20)
    source = torch.zeros(count, device=on.device, dtype=dtype)
    target = torch.empty_like(source)
    copy = on.seconds(lambda: target.copy_(source), 20)
    return 2 * side**3 / product / 1e12, 2 * source.nbytes / copy / 1e12


def forward(on: Device, step: str) -> Iterator[Row]:
    """Chunks a second beside the roofline of FLOP (counted while it runs) and bytes of weights.

    ``ms`` is all that an environment waits for, ``network_ms`` without images' preprocessing on
    the CPU; ``bound_ms`` is the most of arithmetic and reading the weights once, at the speeds that
    a matrix product and a copy reach on this device.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from vla_gym.cli.bench.vla import VLABenchConfig, measure_batch, observations

    tflops, tb_s = peaks(on)
    yield {"matmul_tflop_s": tflops, "copy_tb_s": tb_s}
    options = (
        {"compile": True, "compile_mode": COMPILE_MODES[step]} if step in COMPILE_MODES else {}
    )
    vla = on.policy(**options)
    parts = (vla.model, vla.proprio_projector)  # the action head is in the model
    weights = sum(p.nbytes for part in parts for p in part.parameters())
    config = VLABenchConfig("openvla-oft", on.device, repeats=2 if on.tiny else 10)
    see = vla.pixels
    for batch in (1, 2) if on.tiny else (1, 8, 32):
        arguments = observations(vla, batch, [TEXT])
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            vla.infer(*arguments)
        tflop = counter.get_total_flops() / 1e12
        whole = measure_batch(vla, batch, [TEXT], config)
        pixels = see(*arguments[:2])
        vla.pixels = lambda *_, pixels=pixels: pixels
        network = measure_batch(vla, batch, [TEXT], config)["ms"]
        vla.pixels = see
        bound = 1e3 * max(tflop / tflops, weights / 1e12 / tb_s)
        yield {
            **whole,
            "network_ms": network,
            "tflop": tflop,
            "weights_gb": weights / 1e9,
            "bound_ms": bound,
            "of_bound": bound / network,
        }


def grpo(on: Device, _: str) -> Iterator[Row]:
    """Seconds and memory of GRPO's update with LoRA, one view, tokens, for micro-batch sizes."""
    from vla_gym_trainers.on_policy.config import GRPOConfig

    vla = on.policy(num_views=1, head="token")
    for checkpointing in (False, True):
        for micro in (1, 2) if on.tiny else (1, 4, 16):
            row: Row = {"gradient_checkpointing": checkpointing, "micro_batch_size": micro}
            try:
                row |= grpo_update(on, vla, GRPOConfig(**row, num_minibatches=1))
            except torch.OutOfMemoryError:
                row["failed"] = "out of memory"
            gc.collect()
            torch.cuda.empty_cache()  # does nothing on a CPU
            on.peak_gb()
            yield row


def grpo_update(on: Device, vla: Any, config: Any) -> Row:
    """Play a made-up rollout with the policy, and learn from it twice: the second one is timed."""
    from vla_gym_trainers.on_policy.learner import Learner
    from vla_gym_trainers.on_policy.networks import make_networks
    from vla_gym_trainers.on_policy.rollout import Rollout
    from vla_gym_trainers.on_policy.targets import grpo_targets

    policy, rng = make_networks(config, vla).policy, np.random.default_rng(0)
    rollout = Rollout(policy, 8, 1 if on.tiny else 2, 1, group_size=config.group_size)
    data, arrays = rollout.data, rollout.arrays
    for name in vla.cameras:
        arrays[name][:] = rng.integers(0, 256, arrays[name].shape, np.uint8)
    data["valid"][:], data["executed"][:] = True, vla.horizon
    data["instruction"][:] = rollout.instruction_id(TEXT)
    data["terminated"][::2, -1], data["truncated"][1::2, -1] = True, True
    data["rewards"][::2, -1] = 1.0
    acting = 0.0
    for slot in range(rollout.num_chunks):
        seen = {name: arrays[name][:, slot] for name in rollout.observation}
        begin = time.perf_counter()
        act = policy.act(seen, [TEXT] * 8, rng.integers(0, 2**31, (8, 2)))
        data["sample"][:, slot], data["log_probs"][:, slot] = act.sample.cpu(), act.log_probs.cpu()
        acting += time.perf_counter() - begin
    targets = grpo_targets(rollout, baseline=config.baseline, aggregation=config.aggregation)
    learner = Learner(policy, config)
    on.peak_gb()
    metrics: dict[str, float] = {}
    seconds = on.seconds(
        lambda: metrics.update(learner.update(rollout, targets.advantages, targets.keep)), 1
    )
    return {
        "chunks": data["valid"].sum().item(),
        "trained": sum(p.numel() for p in learner.parameters),
        "act_s": acting,
        "update_s": seconds,
        "chunks_per_s": data["valid"].sum().item() / seconds,
        "grad_norm": metrics["train/grad_norm"],
        "peak_gb": on.peak_gb(),
    }


def td3(on: Device, _: str) -> Iterator[Row]:
    """The frozen VLA's features of 8 environments, and TD3+BC's updates on them.

    A block as ``train`` does it, and single steps, on a GPU as CUDA graphs too.
    """
    from gymnasium import Env, spaces
    from stable_baselines3.common.logger import configure

    from vla_gym.cli.bench.vla import observations
    from vla_gym.rl_token import RLTokenEncoder, RLTokenModelConfig
    from vla_gym.wrappers.vla_features import look
    from vla_gym_trainers import TD3BC, TD3Config
    from vla_gym_trainers.td3.updates import GradientSteps

    vla, num_envs = on.policy(), 8
    sizes = RLTokenModelConfig(vla.hidden_size, vla.num_hidden_tokens)
    encoder = RLTokenEncoder(sizes).to(on.device).eval().requires_grad_(False)

    class Spaces(Env[Any, Any]):
        """What the algorithm reads off an environment."""

        action_space = spaces.Box(-1.0, 1.0, (vla.horizon, vla.action_size), np.float32)
        observation_space = spaces.Dict(
            rl_token=spaces.Box(-np.inf, np.inf, (encoder.dim,), np.float32),
            vla_action=action_space,
            proprio=spaces.Box(-np.inf, np.inf, (vla.proprio_size,), np.float32),
            task_id=spaces.Discrete(10),
        )

    config = TD3Config(critic_warmup_steps=1, train_freq=1 if on.tiny else TD3Config.train_freq)
    images, texts, proprio = observations(vla, num_envs, [TEXT])
    on.peak_gb()
    vla_s = on.seconds(
        lambda: look(vla, encoder, vla.horizon, images, texts, proprio), 2 if on.tiny else 10
    )
    tokens, chunks = look(vla, encoder, vla.horizon, images, texts, proprio)
    model = TD3BC("RLTokenPolicy", Spaces(), config, device=on.device)
    model.set_logger(configure(None, []))
    rng = np.random.default_rng(0)
    for _step in range(64):
        noise = rng.normal(0, 1, tokens.shape).astype(np.float32)
        seen: Row = {"rl_token": tokens + noise, "vla_action": chunks, "proprio": proprio}
        seen["task_id"] = np.arange(num_envs)
        for i in range(num_envs):  # the stub is one environment, the block is of eight
            one = {key: value[i : i + 1] for key, value in seen.items()}
            done = np.array([True])
            model.replay_buffer.add(one, one, chunks[i : i + 1], np.zeros(1), done, [{}])
    block = num_envs * config.train_freq
    update_s = on.seconds(lambda: model.train(block), 1)
    row: Row = {
        "num_envs": num_envs,
        "features_ms": 1e3 * vla_s,
        "features_chunks_per_s": num_envs / vla_s,
        "gradient_steps": int(block * config.utd_ratio),
        "update_s": update_s,
        "peak_gb": on.peak_gb(),
    }
    batch, repeats = model.replay_buffer.sample(config.batch_size), 2 if on.tiny else 100
    row["sample_ms"] = 1e3 * on.seconds(
        lambda: model.replay_buffer.sample(len(batch.dones)), repeats
    )
    for use_graphs in (False, True) if on.on_gpu else (False,):
        steps = GradientSteps(model.policy, config, model._rng, use_graphs)
        for name, step in ("critic", steps.critic), ("actor", partial(steps.actor, bc_weight=1.0)):
            on.seconds(partial(step, batch), 4)  # records the graph
            name += "_graph_ms" if use_graphs else "_ms"
            row[name] = 1e3 * on.seconds(partial(step, batch), repeats)
    yield row


def render(on: Device, _: str) -> Iterator[Row]:
    """``vla-gym bench`` of our vector environment: two cameras, one environment a worker."""
    for workers in (1,) if on.tiny else (1, 8, 16):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bench.json")
            size = (*("--image-size", "64"), *("--rounds", "1")) if on.tiny else ("--rounds", "3")
            command = [sys.executable, "-m", "vla_gym.cli.main", "bench", "--systems", "ours"]
            command += ["--workers", f"{workers}", "--num-envs", f"{workers}", "--starts", "0"]
            command += ["--assets", "lite" if on.tiny else "libero", *size, "--json", str(file)]
            subprocess.run(command, check=True, stdout=sys.stderr)
            report = json.loads(file.read_text())
        if report["failed"]:
            raise RuntimeError(str(report["failed"]))
        figures = report["systems"]["ours"]
        medians = {key: figures[key]["median"] for key in ("steps_per_s", "chunks_per_s", "cpu_ms")}
        yield {"workers": workers, **medians, "gl": report["machine"]["gl"].replace(" | ", ", ")}


def train(on: Device, step: str) -> Iterator[Row]:
    """Control steps a second of a trainer with the embedded VLA, from its first learning on.

    ``rollout_s``, ``forward_s`` and ``learn_s`` are in those ``seconds``; TD3+BC collects while it
    learns, GRPO by turns.
    """
    command, num_envs = step.removeprefix("train-"), 8 if on.tiny else 32
    options = ["--device", on.device, "--num-envs", f"{num_envs}", "--no-progress"]
    options += ["--assets", "lite" if on.tiny else "libero", "--visual-profile", "fast"]
    options += ["--workers", "1" if on.tiny else "16", "--max-minutes", "1.2", "--eval-states", "0"]
    if command == "td3":
        steps_of = "time/total_env_steps"
        options += ["--preset", "td3_libero", "--learning-starts", "64"]
        options += ["--critic-warmup-steps", "64"]
    else:
        steps_of = "step"
        options += ["--preset", "grpo_gaussian", "--episodes-per-env", "1", "--eval-every", "0"]
        options += ["--group-size", "2", "--task-ids", "0"] if on.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "vla_gym_trainers.cli", command, "--run-dir", folder]
        subprocess.run([*program, *options], check=True, stdout=sys.stderr)
        text = Path(folder, "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    learned = [i for i, row in enumerate(rows) if "time/learn" in row]
    if len(learned) < 2:
        raise RuntimeError(f"{command} wrote fewer than two rows with learning in its time")
    first, *later = rows[learned[0] : learned[-1] + 1]
    steps, seconds = later[-1][steps_of] - first[steps_of], later[-1]["wall_s"] - first["wall_s"]
    parts = ("rollout", "forward", "learn")
    yield {
        "num_envs": num_envs,
        "steps": steps,
        "seconds": seconds,
        "steps_per_s": steps / seconds,
        **{f"{part}_s": sum(row.get(f"time/{part}", 0.0) for row in later) for part in parts},
    }


def tests(_on: Device, _: str) -> Iterator[Row]:
    """``pytest -m gpu``."""
    file = "tests/vla/test_gpu.py"  # to collect all tests takes half a minute
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    sys.stderr.write(run.stdout + run.stderr)
    yield {"returncode": run.returncode, "summary": run.stdout.strip().splitlines()[-1]}
    if run.returncode:
        raise RuntimeError("pytest -m gpu failed")


STEPS: dict[str, Callable[[Device, str], Iterator[Row]]] = {
    **dict.fromkeys(("forward-eager", *COMPILE_MODES), forward),
    **{"grpo": grpo, "td3": td3, "render": render, "tests": tests},
    **dict.fromkeys(("train-td3", "train-grpo"), train),
}
