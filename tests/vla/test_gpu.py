"""On a GPU: the same numbers as on the CPU, compiled or not, and images drawn by it."""

import copy
import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from on_policy_toys import tiny_policy, tiny_vla, toy_envs, toy_rollout
from openvla_checkpoints import gap, make_checkpoint
from stable_baselines3.common.logger import configure
from toy_env import ToyReach
from toy_memory_env import ProprioVLA
from vla_checkpoints import observe

from vla_gym.vla import load
from vla_gym.vla.openvla.oft import OpenVLAOFTBackend
from vla_gym_trainers import TD3BC, TD3Config
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.td3.cuda_graph import GraphedStep
from vla_gym_trainers.td3.ring import ChunkReplaySamples
from vla_gym_trainers.td3.updates import GradientSteps

GPU = "cuda"
pytestmark = pytest.mark.gpu


def test_mini_computes_what_it_does_on_the_cpu():
    seen = observe(load("mini"))
    wanted, found = load("mini").infer(*seen), load("mini", GPU).infer(*seen)
    assert found.hidden.device.type == torch.device(GPU).type
    assert gap(found.hidden.cpu(), wanted.hidden) < 1e-3
    assert gap(found.actions[..., :6].cpu(), wanted.actions[..., :6]) < 1e-3


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_openvla_oft_compiled_equals_eager_and_the_cpu(tmp_path, mode):
    folder = make_checkpoint(tmp_path / "oft")
    options = {"device": GPU, "dtype": torch.float32}
    eager = OpenVLAOFTBackend.from_pretrained(folder, **options)
    compiled = OpenVLAOFTBackend.from_pretrained(folder, compile=True, compile_mode=mode, **options)
    on_cpu = OpenVLAOFTBackend.from_pretrained(folder)
    kept = []
    for seed in range(4):  # a CUDA graph is recorded in the second pass and replayed from the third
        seen = observe(on_cpu, seed=seed)
        wanted, found = on_cpu.infer(*seen), compiled.infer(*seen)
        assert gap(eager.infer(*seen).hidden.cpu(), wanted.hidden) < 1e-3
        assert gap(found.hidden.cpu(), wanted.hidden) < 1e-3
        kept.append((found.hidden, wanted.hidden))
    for found, wanted in kept:  # no later pass has overwritten them
        assert gap(found.cpu(), wanted) < 1e-3


def test_an_on_policy_update_equals_the_cpu_s():
    generator, policies, metrics = torch.Generator().manual_seed(0), {}, {}
    rollout = toy_rollout(policy=tiny_policy(value=True))
    data, arrays = rollout.data, rollout.arrays
    rng = np.random.default_rng(0)
    for name in ("agentview", "wrist"):
        arrays[name][:] = rng.integers(0, 256, arrays[name].shape, np.uint8)
    data["valid"][:], data["executed"][:] = True, tiny_vla().horizon
    data["instruction"][:] = rollout.instruction_id("open the middle drawer of the cabinet")
    data["sample"][:] = torch.from_numpy(rng.integers(0, 256, data["sample"].shape, np.uint8))
    data["log_probs"][:] = -np.log(256)
    advantages = torch.randn(data.shape, generator=generator)
    returns = torch.rand(data.shape, generator=generator)
    for device in ("cpu", GPU):
        policies[device] = policy = tiny_policy(value=True)
        for module in (*policy.networks().values(), policy.value_head):
            torch.nn.Module.to(module, device)
        learner = Learner(policy, PPOConfig(learning_rate=1e-3, entropy_coef=0.01, seed=3))
        metrics[device] = learner.update(rollout, advantages, data["valid"], returns)
    for name, value in metrics["cpu"].items():
        assert metrics[GPU][name] == pytest.approx(value, rel=1e-2, abs=1e-4), name
    assert metrics["cpu"]["train/updates"] == 4
    before = tiny_policy(value=True).state_dict()
    after = {device: policy.state_dict() for device, policy in policies.items()}
    for name, wanted in after["cpu"].items():
        # Adam makes a full step of a gradient that is rounding alone: few numbers may differ.
        assert gap(wanted, before[name]) > 0.0
        assert float((after[GPU][name] - wanted).abs().mean()) < 1e-4, name


def test_a_recurrent_policy_plays_and_learns_as_on_the_cpu():
    settings = {"policy": "rl-token", "rl_token": "mean", "memory_size": 6, "chunk_len": 2}
    settings |= {"value_clip": None, "memory_start": "recomputed", "bptt_length": 4, "kl_coef": 0.1}
    rollouts, metrics = {}, {}
    for device in ("cpu", GPU):
        config = PPOConfig(**settings, device=device)
        parts = make_networks(config, ProprioVLA())
        learner = Learner(parts.policy, config)  # whose reference has the heads of before
        generator = torch.Generator().manual_seed(0)
        for head in (parts.policy.actor.actor.head, parts.policy.value_head.head.fc2):
            head.weight.data.copy_(torch.randn(head.weight.shape, generator=generator))
        envs = toy_envs(chunk_len=2)
        out = Rollout(parts.policy, 4, 16, None)
        rollouts[device] = rollout = RolloutCollector(envs).collect(parts.policy, out, seed=3)
        envs.close()
        parts.policy.begin(rollout.data, ProcessGroup())
        targets = torch.ones(rollout.data.shape), rollout.data["valid"], rollout.data["rewards"]
        metrics[device] = learner.update(rollout, *targets)
    for name in ("memory", "log_probs", "next_values"):
        wanted, found = (rollouts[device].data[name] for device in ("cpu", GPU))
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    for name, value in metrics["cpu"].items():
        assert metrics[GPU][name] == pytest.approx(value, rel=1e-2, abs=1e-3), name


def td3_batch(device):
    """Return 32 transitions, some of them demonstrations."""
    rng, space = np.random.default_rng(0), ToyReach().observation_space
    space.seed(0)
    rows = [space.sample() for _ in range(64)]
    stacked = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in space.keys()}
    stacked["task_id"] = stacked["task_id"][:, None]
    here, there = (
        {key: v[part].to(device) for key, v in stacked.items()} for part in (np.s_[:32], np.s_[32:])
    )
    column = torch.from_numpy(rng.uniform(0, 1, (4, 32, 1)).astype("f4")).to(device)
    actions = here["vla_action"].flatten(1)
    shown = torch.where(column[0] > 0.5, 0.5 * actions, torch.nan)
    return ChunkReplaySamples(here, actions, there, *column, demonstrated=shown)


@pytest.mark.parametrize("bf16", [False, True])
def test_td3_updates_equal_the_cpu_s(bf16):
    # Without draws: a generator on a GPU makes other numbers.
    config = TD3Config(
        target_policy_noise=0.0, reference_dropout=0.0, actor_ema=0.9, bf16=bf16, use_task_id=True
    )
    metrics, states = {}, {}
    torch.manual_seed(0)
    first = TD3BC("RLTokenPolicy", ToyReach(), config, seed=1).policy
    for name, device, use_graphs in (
        ("cpu", "cpu", False),
        ("eager", GPU, False),
        ("graph", GPU, True),
    ):
        model = TD3BC("RLTokenPolicy", ToyReach(), config, seed=1, device=device)
        model.policy.load_state_dict(copy.deepcopy(first.state_dict()))
        steps = GradientSteps(model.policy, config, torch.Generator(device), use_graphs)
        batch, metrics[name] = td3_batch(device), []
        for number in range(8):  # from the fourth on as a graph
            found = steps.critic(batch) | steps.actor(batch, 0.5**number)
            metrics[name].append({key: value.item() for key, value in found.items()})
        states[name] = {k: v.cpu() for k, v in model.policy.state_dict().items()}
    exact = 5e-2 if bf16 else 1e-3
    for name in ("eager", "graph"):
        for found, wanted in zip(metrics[name], metrics["cpu"], strict=True):
            assert found == pytest.approx(wanted, rel=exact, abs=exact / 10), name
        for key, wanted in states["cpu"].items():
            difference = float((states[name][key].float() - wanted.float()).abs().mean())
            assert difference < exact / 10, (name, key)
    for key, wanted in states["eager"].items():
        torch.testing.assert_close(states["graph"][key], wanted, atol=1e-4, rtol=1e-3)


def test_a_recorded_step_draws_anew_and_checks_shapes():
    def step(x, rng):
        return {"y": x["x"] + torch.rand(x["x"].shape, device=GPU, generator=rng)}

    eager, recorded = torch.Generator(GPU), torch.Generator(GPU)
    graphed = GraphedStep(partial(step, rng=recorded), recorded)
    kept = []
    for number in range(6):
        x = {"x": torch.full((3,), float(number), device=GPU)}
        kept.append((graphed(x)["y"], step(x, eager)["y"]))
    for found, wanted in kept:  # no later call has overwritten them
        torch.testing.assert_close(found, wanted)
    assert eager.get_state().equal(recorded.get_state())
    with pytest.raises(ValueError, match=r"of shapes \[\(3,\)\], got \[\(2,\)\]"):
        graphed({"x": torch.zeros(2, device=GPU)})


@pytest.mark.parametrize("actor", ["residual", "plain"])
def test_td3_learns_and_goes_on_from_a_file(tmp_path, actor):
    config = TD3Config(
        learning_starts=32, critic_warmup_steps=8, batch_size=32, net_arch=(32,), actor=actor
    )
    model = TD3BC("RLTokenPolicy", ToyReach(), config, seed=1, device=GPU).learn(96)
    model.save(tmp_path / "model.zip")
    loaded = TD3BC.load(tmp_path / "model.zip", ToyReach(), device=GPU)
    loaded.replay_buffer = copy.deepcopy(model.replay_buffer)
    before = copy.deepcopy(model.policy.state_dict())
    for continued in (model, loaded):
        continued.set_logger(configure(None, []))
        continued.train(8, 32)
        moved = continued.policy.state_dict()["actor.head.weight"] - before["actor.head.weight"]
        assert float(moved.abs().max()) > 1e-4
    for key, value in model.policy.state_dict().items():
        torch.testing.assert_close(loaded.policy.state_dict()[key], value, atol=1e-4, rtol=1e-3)
    # What a graph has recorded is not what counts.
    kept = copy.deepcopy(model.policy.state_dict())
    model.set_parameters(str(tmp_path / "model.zip"))
    model.config.tau = 0.0
    model.train(8, 16)
    for key, value in model.policy.state_dict().items():
        if key.startswith("critic_target"):
            assert value.equal(before[key]) and not value.equal(kept[key])
    model.lr_schedule = lambda _: 0.0
    kept = copy.deepcopy(model.policy.state_dict())
    model.train(8, 16)
    for key, value in model.policy.state_dict().items():
        assert value.equal(kept[key]), key


def test_images_are_drawn_by_the_gpu():
    command = [sys.executable, "-m", "vla_gym.cli.probes", "gl"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"no EGL context: {run.stderr[-500:]}"
    renderer = json.loads(run.stdout.splitlines()[-1])
    assert "NVIDIA" in renderer, f"{renderer} draws: `vla-gym doctor` says how to mend it"
