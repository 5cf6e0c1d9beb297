"""The on-policy toy seen through a tiny VLA and a tiny RL token that TD3+BC fine-tunes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import td3_toys
import torch
from on_policy_toys import tiny_vla, toy_envs
from toy_token_env import GAMMA, TEXTS, ToyTokenEnv

import vla_gym.wrappers.vector_base as vector_wrapper
from vla_gym.rl_token import RLTokenDecoder, RLTokenEncoder, RLTokenModelConfig
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym_trainers import TD3BC

CHUNK_LEN = 4
SMALL: dict[str, Any] = {
    **td3_toys.SMALL,
    "gamma": GAMMA,
    "buffer_size": 60,
    "train_freq": 4,
    "utd_ratio": 0.5,
    "ahead": 0,
    "vla_update_freq": 8,
    "vla_batch_size": 8,
    "vla_micro_batch_size": 3,
    "vla_learning_rate": 1e-3,
    "encoder_learning_rate": 1e-3,
    "lora_r": 4,
}


class SavableToy(ToyTokenEnv):
    """Can be saved and brought back, begins at an official state, and says so."""

    suite = "toy"
    NAMES = ("x", "elapsed", "task", "episode", "_seed_value", "_next", "init_state_id")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        self.init_state_id = int((options or {}).get("init_state_id", -1))
        return super().reset(seed=seed, options=options)

    def _info(self, success: bool, executed: int) -> dict[str, Any]:
        return {**super()._info(success, executed), "init_state_id": self.init_state_id}

    def render_facts(self) -> dict[str, Any]:
        return {"gl_renderer": None, "visual_profile": None}

    def get_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.NAMES}

    def set_state(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, value in state.items():
            setattr(self, name, value)
        return self._observe()


def know_toy_tasks(monkeypatch: Any) -> None:
    """Let ``set_state`` of the VLA's wrapper find the toy's instructions."""
    monkeypatch.setattr(
        vector_wrapper, "get_task", lambda _, task: SimpleNamespace(instruction=TEXTS[task])
    )


def save_token(folder: Path, decoder: bool = True) -> RLTokenEncoder:
    """Write a tiny RL token and load its encoder."""
    torch.manual_seed(5)
    config = RLTokenModelConfig(32, 8, 16, 16, 1, 1, num_heads=2, linear_path=True)
    RLTokenEncoder(config).save_pretrained(folder, RLTokenDecoder(config) if decoder else None)
    return RLTokenEncoder.from_pretrained(folder)


def make_env(vla: Any, encoder: Any, num_envs: int = 2, **settings: Any) -> FrozenVLAObservation:
    chunk_len, size = settings.pop("stride", CHUNK_LEN), settings.pop("size", 64)
    envs = toy_envs(num_envs, kind=SavableToy, chunk_len=chunk_len, size=size)
    settings = {"keep_inputs": True, "chunk_len": CHUNK_LEN, **settings}
    return FrozenVLAObservation(envs, vla, encoder, **settings)


def player_envs(num_envs: int) -> LiberoVectorEnv:
    return toy_envs(num_envs, kind=SavableToy, autoreset_mode="DISABLED")


def make_model(folder: Path, *, token: str = "decoder", env: Any = None, **changes: Any) -> TD3BC:
    """Make an untrained one; ``token``: with a ``decoder``, ``encoder`` alone, or the ``mean``."""
    encoder = None if token == "mean" else save_token(folder, token == "decoder")
    return td3_toys.td3_bc(env or make_env(tiny_vla(), encoder), seed=3, **{**SMALL, **changes})
