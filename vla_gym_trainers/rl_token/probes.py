"""What a VLA's RL token keeps of the scene, told by linear probes: ``vla-gym-train probe``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, OpenFraction, PositiveInt
from vla_gym.rl_token import RLTokenEncoder, load_rl_token
from vla_gym.vla import load
from vla_gym.vla.preprocess import proprio_features
from vla_gym_trainers.rl_token.collect_states import states_of_episodes
from vla_gym_trainers.rl_token.linear_probe import fit_linear_probe
from vla_gym_trainers.rl_token.vla_states import StatesConfig, VLAStates, held_out_count
from vla_gym_trainers.runs.result_card import machine_facts, make_card, write_json

#: What is probed: position of the first object of interest at all times; the same until it is
#: moved, when the arm's own position says nothing of it; distance from the grip site to it.
TARGETS = ("object_position", "resting_object_position", "gripper_distance")
# An object that is nearer than this (m) to where its episode began has not been moved.
RESTING = 0.01


@dataclass
class ProbeConfig(StatesConfig):
    """Probe an RL token for what it keeps of the scene, on layouts it was not trained on."""

    seed: Count = 1000
    """As in rl-token; another one than its, so that the layouts are others."""
    frame_stride: PositiveInt = 8
    """The VLA looks at every so many frames of expert episodes; layouts count more than frames."""
    rollout_episodes: Count = 2
    """Episodes a task of the VLA itself with noise, on other sampled layouts."""
    vla: str = "mini"
    """VLA whose hidden states are probed: mini, mini-few, <backend>:/path, or a folder."""
    rl_token: str | None = None
    """RL token: the name of the VLA it belongs to, or a folder; None: the VLA's."""
    test_share: OpenFraction = 0.25
    """Share of every task's episodes that the probes are tested on."""
    output: str | None = None
    """File that the result is written to as JSON; None: it is only printed."""

    def check(self) -> None:
        """Check the values; see the base."""
        super().check()
        counts = (self.expert_episodes, self.rollout_episodes)
        test = sum(held_out_count(count, self.test_share) for count in counts)
        if test < 1 or sum(counts) - test < 2:
            raise ConfigError(
                "Probes need at least three episodes a task of the expert or of the VLA: two to "
                "fit, one to test."
            )
        if self.output is not None and Path(self.output).is_dir():
            raise ConfigError(f"output {self.output} is a folder: name a .json file in it.")


def probe_rl_token(config: ProbeConfig) -> dict[str, Any]:
    """Play episodes, fit all probes and return (and write) the result card.

    Raises:
        ConfigError: If a value is out of range, or the RL token is another VLA's.
        WeightsError: If the VLA or the RL token cannot be loaded.
    """
    config.check()
    torch.set_num_threads(config.threads)
    vla = load(config.vla, device=config.device)
    token = config.rl_token or getattr(vla, "shipped_as", None) or config.vla
    encoder = load_rl_token(token, config.device)
    # Another VLA's token is refused before anything is played.
    encoder.encode(torch.zeros(1, vla.num_hidden_tokens, vla.hidden_size, device=config.device))
    states = states_of_episodes(vla, config)
    results = run_probes(states, encoder, states.held_out(config.test_share))
    environment = {**config.world_facts(), **machine_facts()}
    seeds: dict[str, int | None] = {"run": config.seed}
    card = make_card("probe", config=config, seeds=seeds, environment=environment, results=results)
    if config.output is not None:
        write_json(Path(config.output), card)
    return card


@torch.no_grad()
def encode_states(encoder: RLTokenEncoder, hidden: torch.Tensor) -> torch.Tensor:
    """Return the tokens (N, D) float32 on the CPU of hidden states (N, M, H), batch by batch."""
    encoder.eval()
    device = encoder.mean.device
    return torch.cat([encoder.encode(part.float().to(device)).cpu() for part in hidden.split(256)])


def probe_features(
    states: VLAStates, encoder: RLTokenEncoder, train: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    """Return what the probes read, by name, each (N, F) float32.

    ``random_token`` is of an encoder of the same sizes with fresh weights and no linear path (its
    scale, and nothing else, is taken from the training states); ``random_projection`` are D random
    linear combinations of the standardised hidden states; ``full_hidden`` are all of them side by
    side: nothing linear reads more from the VLA. ``train`` (N,) says which the training states are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = RLTokenEncoder(replace(encoder.config, linear_path=False))
        mix = torch.randn(states.hidden[0].numel(), encoder.dim)
    fresh.fit_scale(states.hidden[np.flatnonzero(train)])
    token, random = (encode_states(model, states.hidden).numpy() for model in (encoder, fresh))
    return {
        "rl_token": lambda: token,
        "mean_hidden": lambda: states.hidden.float().mean(dim=1).numpy(),
        "full_hidden": lambda: states.hidden.flatten(1).float().numpy(),
        "random_token": lambda: random,
        "random_projection": lambda: _projected(fresh, states.hidden, mix),
        "proprio": lambda: proprio_features(states.proprio),
        "nothing": lambda: np.empty((len(states), 0), np.float32),
    }


@torch.no_grad()
def _projected(scale: RLTokenEncoder, hidden: torch.Tensor, mix: torch.Tensor) -> np.ndarray:
    parts = [scale.standardise(part.float()).flatten(1) @ mix for part in hidden.split(256)]
    projected: np.ndarray = torch.cat(parts).numpy()
    return projected


def run_probes(states: VLAStates, encoder: RLTokenEncoder, test: np.ndarray) -> dict[str, Any]:
    """Fit every probe on the training episodes and measure it on the test episodes.

    ``test`` (N,) says which states are of the latter; those without an object's position are left
    out.

    Returns:
        ``errors[target][scope][feature][suite or "all"]``: mean error in cm over the states of a
        suite or of all suites; ``states``: how many were tested.

    Raises:
        ConfigError: If no object's position is known, or no episode is left for the test.
    """
    known = np.isfinite(states.object_pos).all(axis=1)
    states, test = states.select(known), test[known]
    if not test.any() or test.all():
        raise ConfigError(
            "Probes need episodes to fit and others to test, with known object positions: ask for "
            "expert_episodes or rollout_episodes (two or more), of tasks that name what they are "
            "about (:obj_of_interest)."
        )
    resting = _resting(states)
    distance = np.linalg.norm(states.proprio[:, :3] - states.object_pos, axis=1, keepdims=True)
    both = np.concatenate([states.object_pos, distance], axis=1)
    suites = np.array([name.rpartition("_")[0] for name in states.tasks])[states.task]
    # One probe for all tasks, one for each suite, one for each task.
    scopes = {
        "all": np.zeros(len(states), np.int64),
        "suite": np.unique(suites, return_inverse=True)[1],
        "task": states.task,
    }
    errors: dict[str, Any] = {target: {scope: {} for scope in scopes} for target in TARGETS}
    for feature, build in probe_features(states, encoder, ~test).items():
        values = build()
        for scope, groups in scopes.items():
            miss = _differences(values, both, states.episode, groups, ~test, test)
            of_resting = _differences(
                values, states.object_pos, states.episode, groups, resting & ~test, resting & test
            )
            for target, differences, rows in (
                ("object_position", miss[:, :3], test),
                ("gripper_distance", miss[:, 3:], test),
                ("resting_object_position", of_resting, resting & test),
            ):
                errors[target][scope][feature] = _by_suite(differences, rows, suites)
    counts = {"train": int((~test).sum()), "test": int(test.sum())}
    return {"states": counts | {"test_resting": int((test & resting).sum())}, "errors_cm": errors}


def _resting(states: VLAStates) -> np.ndarray:
    """Return a mask (N,) of the states whose object is where its episode began."""
    _, first, inverse = np.unique(states.episode, return_index=True, return_inverse=True)
    moved = np.linalg.norm(states.object_pos - states.object_pos[first[inverse]], axis=1)
    return moved < RESTING


def _differences(
    values: np.ndarray,
    targets: np.ndarray,
    episodes: np.ndarray,
    groups: np.ndarray,
    fit: np.ndarray,
    test: np.ndarray,
) -> np.ndarray:
    """Return predictions minus targets, (N, K), NaN but in ``test`` rows; a probe a group."""
    predicted = np.full(targets.shape, np.nan)
    for group in np.unique(groups[test]):
        mine, rows = fit & (groups == group), test & (groups == group)
        weights, bias, _ = fit_linear_probe(values[mine], targets[mine], episodes[mine])
        predicted[rows] = values[rows] @ weights + bias
    return predicted - targets


def _by_suite(difference: np.ndarray, rows: np.ndarray, suites: np.ndarray) -> dict[str, float]:
    """Return the mean length in cm of differences (N, K) in metres, per suite and over all."""
    error = 100.0 * np.linalg.norm(difference, axis=1)
    result = {str(s): float(error[rows & (suites == s)].mean()) for s in np.unique(suites[rows])}
    return result | {"all": float(error[rows].mean())}


def main(config: ProbeConfig) -> str:
    """Run ``vla-gym-train probe``; return the tables that are printed."""
    return format_probes(probe_rl_token(config)["results"])


def format_probes(result: dict[str, Any]) -> str:
    """Return Markdown tables of :func:`run_probes`' result."""
    tables = []
    for target in TARGETS:
        scopes = result["errors_cm"][target]
        suites = list(scopes["all"]["nothing"])
        heads = [*suites, "probe a suite", "probe a task"]
        lines = [f"{target.replace('_', ' ')}, mean error in cm on unseen layouts:", ""]
        lines += ["| read from | " + " | ".join(heads) + " |"]
        lines += ["| --- |" + " ---: |" * len(heads)]
        for feature, errors in scopes["all"].items():
            cells = [errors[suite] for suite in suites]
            cells += [scopes[scope][feature]["all"] for scope in ("suite", "task")]
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {feature.replace('_', ' ')} | {row} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
