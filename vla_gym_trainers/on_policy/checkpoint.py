"""All that a PPO or GRPO run depends on, saved between two rollouts and brought back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from vla_gym.errors import WeightsError
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.policy import TokenPolicy
from vla_gym_trainers.runs.result_card import write_json

#: Raised when the content changes, so that an old checkpoint is refused, not misread.
FORMAT = 1


def parameter_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return a policy's ``state_dict()`` as the content of a safetensors file."""
    return save({k: v.contiguous() for k, v in state.items()})


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Read a file of :func:`parameter_bytes`.

    Raises:
        WeightsError: If the file is missing or damaged.
    """
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is no whole file of parameters: {error}") from error


def save_checkpoint(
    folder: Path,
    learner: Learner,
    reference: TokenPolicy | None,
    run_state: Mapping[str, Any],
) -> None:
    """Write a checkpoint while no rollout is under way.

    ``policy.safetensors`` and ``reference.safetensors`` hold what is trained, ``learner.pt`` the
    optimiser and the learner's generator, ``state.json`` what the run itself keeps. Environments
    need no state: the next rollout begins new episodes by its own seed.

    Args:
        folder: Where; see ``RunDir.new_checkpoint``.
        learner: The learner.
        reference: Of the KL penalty, or None.
        run_state: Plain JSON types; :func:`load_checkpoint` returns it.
    """
    (folder / "policy.safetensors").write_bytes(parameter_bytes(learner.policy.state_dict()))
    if reference is not None:
        (folder / "reference.safetensors").write_bytes(parameter_bytes(reference.state_dict()))
    # Into Python's file: of its own, torch loses why a write failed (a full disk).
    with open(folder / "learner.pt", "wb") as file:
        torch.save(learner.state_dict(), file)
    write_json(folder / "state.json", {"format": FORMAT, "run": dict(run_state)})


def load_checkpoint(
    folder: Path, learner: Learner, reference: TokenPolicy | None
) -> dict[str, Any]:
    """Bring learner, policy and reference to where a checkpoint was written.

    Returns:
        ``run_state``.

    Raises:
        WeightsError: If a file is missing, damaged or of another format.
        ConfigError: If the parameters do not fit the policy.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise WeightsError(f"{folder} has format {state['format']}, expected {FORMAT}.")
        numbers = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{folder} is no whole checkpoint: {error}") from error
    learner.policy.load_state_dict(load_parameters(folder / "policy.safetensors"))
    if reference is not None:
        reference.load_state_dict(load_parameters(folder / "reference.safetensors"))
    learner.load_state_dict(numbers)
    run_state: dict[str, Any] = state["run"]
    return run_state
