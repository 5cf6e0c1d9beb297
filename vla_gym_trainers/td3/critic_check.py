"""Whether critics know unseen episodes, before an actor follows them: ``vla-gym-train critics``."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.evaluation.trained import load_policy
from vla_gym_trainers.runs.result_card import make_card, write_json
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.networks import reference_chunk
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.updates import critic_step

#: What every fit reports, at every step that is looked at.
MEASURES = ("seen", "unseen", "advantage")


@dataclass
class CriticCheckConfig:
    """Fit critics to part of a td3 run's episodes and ask them about the others.

    Networks and settings are the run's; the policy that the critics judge is the VLA, as in the
    run's warm-up. Printed are correlations with the Monte-Carlo return G: of Q(s, a) on episodes
    the critics learned from ("seen") and on the others ("unseen"), and of Q(s, a) - Q(s, a~) with
    G - Q(s, a~) on the others ("advantage"; a~ is the VLA's chunk): the slope that an actor climbs.
    """

    run: Path
    """Directory of a run of vla-gym-train td3; its newest checkpoint has the replay."""
    chunks: int | None = None
    """Use only the oldest so many chunks, e.g. the warm-up's; None: all that are stored."""
    steps: int = 2000
    """Gradient steps of a fit."""
    every: int = 500
    """Measure every so many of them."""
    folds: int = 3
    """Fits; every episode is left out of one of them."""
    mc_weight: float | None = None
    """Share of Monte-Carlo returns in the targets; None: the run's."""
    output: Path | None = None
    """File that the result is written to as JSON; None: it is only printed."""
    seed: int = 0
    """Seed of the networks, of the batches and of who is left out."""
    threads: int = 1
    """Torch threads."""

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If one is out of range.
        """
        limits = {"chunks": 1, "steps": 1, "every": 1, "threads": 1, "folds": 2}
        for name, lowest in limits.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"Expected {name} >= {lowest}, got {value}.")
        if self.every > self.steps:
            raise ConfigError(f"Expected every <= steps = {self.steps}, got {self.every}.")
        if self.mc_weight is not None and not 0.0 <= self.mc_weight <= 1.0:
            raise ConfigError(f"Expected mc_weight in [0, 1], got {self.mc_weight}.")


def check_critics(config: CriticCheckConfig) -> dict[str, Any]:
    """Fit critics ``folds`` times and return the card (written to ``output``).

    Returns:
        A result card; ``results.rows`` has, for each measured step, ``step`` and the mean over the
        fits of each of :data:`MEASURES`.

    Raises:
        ConfigError: If a setting is out of range, or there are too few finished episodes.
        WeightsError: If the run has no whole checkpoint.
    """
    config.check()
    torch.set_num_threads(config.threads)
    model, buffer = load_run(config.run)
    rows = rows_by_age(buffer)[: config.chunks]
    rows = rows[np.isfinite(buffer.mc_returns[rows])]
    episodes = episode_numbers(buffer, rows)
    count = int(episodes.max(initial=-1)) + 1
    successes = len(np.unique(episodes[buffer.dones[rows] > 0]))
    if count < 2 * config.folds or not 0 < successes < count:
        raise ConfigError(
            f"{config.run} has {count} finished episodes, {successes} of them successful: expected "
            f"at least {2 * config.folds}, some successful and some not. Use more chunks."
        )
    fold = np.random.default_rng(config.seed).permutation(count)[episodes] % config.folds
    fits = []
    for k in range(config.folds):
        torch.manual_seed(config.seed + k)
        fits.append(_fit(model, buffer, rows[fold != k], rows[fold == k], config))
    steps = range(config.every, config.steps + 1, config.every)
    means = np.mean(fits, axis=0).tolist()
    table = [
        {"step": step, **dict(zip(MEASURES, row, strict=True))}
        for step, row in zip(steps, means, strict=True)
    ]
    results = {"chunks": len(rows), "episodes": count, "successes": successes, "rows": table}
    seeds: dict[str, int | None] = {"run": config.seed}
    card = make_card("critics", config=config, seeds=seeds, environment={}, results=results)
    if config.output is not None:
        write_json(config.output, card)
    return card


def main(config: CriticCheckConfig) -> str:
    """Run ``vla-gym-train critics``; return the table that is printed."""
    return format_check(check_critics(config))


def format_check(card: dict[str, Any]) -> str:
    """Return a card of :func:`check_critics` as a table."""
    results = card["results"]
    head = "{chunks} chunks of {episodes} episodes, {successes} successful".format(**results)
    lines = [head, f"{'step':>6}" + "".join(f"{name:>11}" for name in MEASURES)]
    for row in results["rows"]:
        lines.append(f"{row['step']:>6}" + "".join(f"{row[name]:>11.2f}" for name in MEASURES))
    return "\n".join(lines)


def load_run(run_dir: Path) -> tuple[TD3BC, ChunkReplayBuffer]:
    """Return the algorithm and the replay of a run's newest checkpoint.

    Pickles are executed when they are read: look at your own runs only.

    Raises:
        WeightsError: If there is no whole checkpoint.
    """
    checkpoints = RunDir(run_dir).checkpoints()
    if not checkpoints:
        raise WeightsError(f"{run_dir} has no checkpoint: expected a run of 'vla-gym-train td3'.")
    try:
        with open(checkpoints[-1] / "replay.pkl", "rb") as file:
            buffer = pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise WeightsError(f"{checkpoints[-1]} is no whole checkpoint: {error}") from error
    buffer.device = torch.device("cpu")
    return load_policy(checkpoints[-1] / "model.zip"), buffer


def rows_by_age(buffer: ChunkReplayBuffer) -> np.ndarray:
    """Return the filled slots, oldest first."""
    return np.arange(buffer.num_added - buffer.size(), buffer.num_added) % buffer.buffer_size


def episode_numbers(buffer: ChunkReplayBuffer, rows: np.ndarray) -> np.ndarray:
    """Return which episode each row belongs to, counted from 0.

    Episodes of several environments lie mixed: a row is followed by the one that begins with the
    observation it ended with, to the last bit.

    Args:
        buffer: The replay.
        rows: (N,) slots, oldest first.

    Returns:
        (N,) int64.
    """
    before, after = buffer.observations, buffer.next_observations
    keys = sorted(before)

    def fingerprint(parts: dict[str, np.ndarray], row: int) -> bytes:
        return b"".join(parts[key][row].tobytes() for key in keys)

    numbers = np.empty(len(rows), np.int64)
    expected: dict[bytes, int] = {}
    count = 0
    for i, row in enumerate(rows.tolist()):
        number = expected.pop(fingerprint(before, row), None)
        if number is None:
            number, count = count, count + 1
        numbers[i] = number
        expected[fingerprint(after, row)] = number
    return numbers


def _fit(
    model: TD3BC,
    buffer: ChunkReplayBuffer,
    train: np.ndarray,
    test: np.ndarray,
    config: CriticCheckConfig,
) -> list[list[float]]:
    """Return (measured steps, 3): the correlations of one fit."""
    policy = type(model.policy)(**model.policy._get_constructor_parameters())  # its actor: the VLA
    policy.normalizer.load_state_dict(model.policy.normalizer.state_dict())
    for group in policy.critic_optimizer.param_groups:
        group["lr"] = model.lr_schedule(1.0)
    numbers = model.config
    if config.mc_weight is not None:
        numbers = replace(numbers, mc_weight=config.mc_weight)
    draw = np.random.default_rng(config.seed)
    noise = torch.Generator().manual_seed(config.seed)
    measured = []
    for step in range(1, config.steps + 1):
        index = train[draw.integers(len(train), size=numbers.batch_size)]
        critic_step(policy, buffer.rows(index), numbers, noise)
        if step % config.every == 0:
            measured.append(_correlations(policy, buffer, train, test))
    return measured


@torch.no_grad()
def _correlations(
    policy: Any, buffer: ChunkReplayBuffer, train: np.ndarray, test: np.ndarray
) -> list[float]:
    def values(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        batch = buffer.rows(rows)
        x = policy.normalizer(batch.observations)
        q, q_vla = (
            policy.critic(x, action).mean(dim=1).numpy()
            for action in (batch.actions, reference_chunk(batch.observations))
        )
        return q, q_vla, batch.mc_returns[:, 0].numpy()

    q, _, returns = values(train)
    seen = _correlation(q, returns)
    q, q_vla, returns = values(test)
    return [seen, _correlation(q, returns), _correlation(q - q_vla, returns - q_vla)]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's r; 0 if one of them does not vary."""
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
