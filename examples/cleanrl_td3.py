"""TD3+BC from the frozen VLA in one file, without a trainer: environment, networks, replay, loop.

    python examples/cleanrl_td3.py --task-id 5 --minutes 5

What `vla-gym-train td3` does, at its plainest: read it from top to bottom. One environment, one
thread, fp32; two critics; the actor is a correction of the VLA's chunk that starts at zero.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vla_gym  # noqa: F401  (registers the environments)


@dataclass
class Args:
    """TD3+BC on one task of libero_goal."""

    task_id: int = 5
    """Task of the suite."""
    seed: int = 0
    """Of networks, noise and layouts."""
    chunks: int = 10_000
    """Chunks to collect."""
    minutes: float = 8.0
    """Or stop after this time."""
    warm_up: int = 1500
    """First chunks, which play the VLA plus noise."""
    critic_warm_up: int = 1500
    """Gradient steps of the critics before the actor moves."""
    utd: int = 2
    """Critic steps a chunk; an actor step every second one."""
    gamma: float = 0.995
    """Discount per control step."""
    beta: float = 1.0
    """Weight of the squared distance to the VLA's chunk."""
    noise: float = 0.06
    """Largest exploration offset of a chunk; each episode draws its level."""
    eval_states: int = 20
    """Official states for the evaluation at the end."""
    save: Path | None = None
    """Where the actor goes (safetensors)."""


def mlp(inputs: int, outputs: int, norm: bool = False) -> nn.Sequential:
    """Two hidden layers of 256."""
    layers: list[nn.Module] = []
    for width in (inputs, 256):
        layers += [nn.Linear(width, 256), *([nn.LayerNorm(256)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, outputs))


class Actor(nn.Module):
    """mu(x, a~) = clip(a~ + scale * tanh(f(x, a~))), one correction for a whole chunk."""

    def __init__(self, state_dim: int, chunk_len: int, scale: torch.Tensor) -> None:
        """Start at the VLA: f's last layer is zero."""
        super().__init__()
        self.f, self.chunk_len = mlp(state_dim + 7 * chunk_len, 7), chunk_len
        nn.init.zeros_(self.f[-1].weight)
        nn.init.zeros_(self.f[-1].bias)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Return (B, 7 C)."""
        correction = self.scale * torch.tanh(self.f(torch.cat([x, reference], 1)))
        return (reference + correction.repeat(1, self.chunk_len)).clamp(-1, 1)


def main(args: Args) -> None:  # noqa: C901  (one file, read from top to bottom)
    """Collect, learn, evaluate."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    env = gym.make(
        "LiberoVLA-goal-v0", task_ids=args.task_id, gamma=args.gamma, disable_env_checker=True
    )
    chunk_len = env.action_space.shape[0]
    size = 7 * chunk_len
    scale = torch.tensor([1, 1, 1, 0.3, 0.3, 0.3, 1.0])
    chunk_scale = scale.repeat(chunk_len)

    def flat(obs: dict) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([obs["rl_token"], obs["proprio"]]), obs["vla_action"].reshape(-1)

    # Replay: plain arrays. `discounts` holds gamma ** executed_steps, 0 after a success; a time
    # limit is no end: its discount is like any other.
    if args.eval_states:
        env.reset(options={"init_state_id": args.eval_states - 1})  # an error now, if there is none
    obs, _ = env.reset(seed=args.seed)
    state_dim = len(flat(obs)[0])
    widths = {"x": state_dim, "ref": size, "a": size, "x2": state_dim, "ref2": size}
    data = {key: np.zeros((args.chunks, width), np.float32) for key, width in widths.items()}
    rewards, discounts = np.zeros(args.chunks, np.float32), np.zeros(args.chunks, np.float32)

    actor = Actor(state_dim, chunk_len, scale)
    critics = nn.ModuleList(mlp(state_dim + size, 1, norm=True) for _ in range(2))
    actor_target, critics_target = deepcopy(actor), deepcopy(critics)
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
    critic_optimizer = torch.optim.Adam(critics.parameters(), 3e-4)
    mean, std = torch.zeros(state_dim), torch.ones(state_dim)

    def batch(filled: int) -> dict[str, torch.Tensor]:
        rows = rng.integers(filled, size=256)
        got = {key: torch.from_numpy(value[rows]) for key, value in data.items()}
        got |= {"r": torch.from_numpy(rewards[rows]), "d": torch.from_numpy(discounts[rows])}
        return got | {key: ((got[key] - mean) / std).clamp(-8, 8) for key in ("x", "x2")}

    def q_values(nets: nn.ModuleList, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return torch.stack([net(torch.cat([x, a], 1))[:, 0] for net in nets])

    def polyak(source: nn.Module, target: nn.Module) -> None:
        with torch.no_grad():
            for new, old in zip(source.parameters(), target.parameters(), strict=True):
                old.lerp_(new, 0.01)

    def critic_step(b: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            noise = (0.02 * torch.randn(256, size)).clamp(-0.05, 0.05) * chunk_scale
            a2 = (actor_target(b["x2"], b["ref2"]) + noise).clamp(-1, 1)
            target = b["r"] + b["d"] * q_values(critics_target, b["x2"], a2).min(0).values
            target = target.clamp(0, 1)  # the return of a reward of 1 at the end
        loss = F.mse_loss(q_values(critics, b["x"], b["a"]), target.expand(2, -1))
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        polyak(critics, critics_target)

    def actor_step(b: dict[str, torch.Tensor]) -> None:
        a = actor(b["x"], b["ref"])
        q = q_values(critics, b["x"], a).mean(0)
        distance = (((a - b["ref"]) / chunk_scale) ** 2).sum(1).mean()
        loss = -q.mean() / q.detach().abs().mean().clamp(min=0.02) + args.beta * distance
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        polyak(actor, actor_target)

    def act(obs: dict) -> np.ndarray:
        x, reference = (torch.from_numpy(part).float()[None] for part in flat(obs))
        with torch.no_grad():
            chunk = actor(((x - mean) / std).clamp(-8, 8), reference)
        return chunk.numpy().reshape(chunk_len, 7)

    started, level, recent = time.perf_counter(), rng.uniform(), []
    for step in range(args.chunks):
        if time.perf_counter() - started > 60 * args.minutes:
            break
        # One offset for the whole chunk: white noise would be averaged out by the controller.
        offset = args.noise * level * rng.standard_normal(7) * scale.numpy()
        plan = obs["vla_action"] if step < args.warm_up else act(obs)
        action = np.clip(plan + offset, -1, 1).astype(np.float32)
        after, reward, terminated, truncated, info = env.step(action)
        data["x"][step], data["ref"][step] = flat(obs)
        data["x2"][step], data["ref2"][step] = flat(after)
        data["a"][step], rewards[step] = action.reshape(-1), reward
        discounts[step] = 0.0 if terminated else info["discount"]
        obs = after
        if terminated or truncated:
            recent.append(info["success"])
            print(f"chunk {step + 1}: success {np.mean(recent[-50:]):.2f} (last 50, with noise)")
            obs, _ = env.reset()
            level = rng.uniform()

        filled = step + 1
        if filled == args.warm_up:
            x = torch.from_numpy(data["x"][:filled])
            mean, std = x.mean(0), x.std(0)
            std = std + 0.05 * std.max()  # what hardly varies is noise: do not blow it up
            for _ in range(args.critic_warm_up):
                critic_step(batch(filled))
        elif filled > args.warm_up:
            for i in range(args.utd):
                b = batch(filled)
                critic_step(b)
                if i % 2 == 1:
                    actor_step(b)

    for name, policy in (("VLA", lambda o: o["vla_action"]), ("TD3+BC", act)):
        won = 0
        for state in range(args.eval_states):
            obs, _ = env.reset(options={"init_state_id": state})
            done = False
            while not done:
                obs, _, terminated, truncated, _ = env.step(policy(obs))
                done = terminated or truncated
            won += terminated
        print(f"{name}: {won} of {args.eval_states} official states")
    env.close()
    if args.save is not None:
        from safetensors.torch import save_file

        save_file({"mean": mean, "std": std, **actor.state_dict()}, args.save)


if __name__ == "__main__":
    main(tyro.cli(Args))
