"""``vla-gym-train world-model``: collect, train the tokenizer, train the model, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import ConfigError
from vla_gym.outside import to_type
from vla_gym.suites import get_suite
from vla_gym.vla import FrozenVLA, load
from vla_gym.vla.stateful import is_stateful
from vla_gym_trainers.runs.result_card import machine_facts
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.run_dir import restoring
from vla_gym_trainers.world_model.behaviours import by_behaviour
from vla_gym_trainers.world_model.collect import FRAME_SIZE, collect
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences
from vla_gym_trainers.world_model.evaluate import evaluate, recall, stay_rate, tokenizer_psnr
from vla_gym_trainers.world_model.model import WorldModelSizes
from vla_gym_trainers.world_model.pictures import write_pictures
from vla_gym_trainers.world_model.teacher import Teacher, tokenised
from vla_gym_trainers.world_model.tokenizer import TokenizerConfig
from vla_gym_trainers.world_model.windows import check_length

LOG_EVERY = 25  # steps


def main(config: WorldModelConfig) -> str:
    """Run ``vla-gym-train world-model``; return what is printed."""
    return format_results(train_world_model(config)["results"])


def train_world_model(config: WorldModelConfig) -> dict[str, Any]:
    """Collect, train and report; return (and write) the result card.

    A run that goes on does so bit for bit as it would have gone on, with the episodes in its
    data/.

    Raises:
        ConfigError: If a value is out of range, or no sequence is as long as a window.
        WeightsError: If the VLA cannot be loaded, or what the run left is damaged.
        WorkerError: If a worker dies again and again.
    """
    config.check()
    torch.set_num_threads(config.threads)
    with Run(config, total=config.total_steps) as run:
        train, held, sizes = _sequences(run, config)
        check_length(train, config.bptt_length)
        collected = run.seconds
        teacher = Teacher(config, train, sizes, run.checkpoint)
        if run.checkpoint is None:  # at once: a run that goes on plays no episodes again
            _save(run, teacher, collected)
        else:
            collected = run.checkpoint.state.get("collecting_seconds", collected)
        with run.training():
            _loop(run, teacher, held, collected)
        minutes = {"collecting": round(collected / 60, 2), "all": round(run.seconds / 60, 2)}
        results = _results(teacher, held) | {"minutes": minutes}
        _film(run.dir.videos / "last.mp4", teacher, held)
        return run.write_card(results, {**config.world_facts(), **machine_facts()})


def _sequences(run: Run, config: WorldModelConfig) -> tuple[Sequences, Sequences, WorldModelSizes]:
    """Return the episodes to train on and to validate with, and the model's sizes."""
    paths = [run.dir.path / "data" / f"{name}.npz" for name in ("train", "validation")]
    if run.checkpoint is not None:
        train, held = map(Sequences.load, paths)
        with restoring(folder := run.checkpoint.folder):
            sizes = to_type(run.checkpoint.state["sizes"], WorldModelSizes, str(folder))
        return train, held, sizes
    vla = load(config.vla, device=config.device)
    if config.chunk_len > vla.horizon:
        raise ConfigError(
            f"Expected chunk_len of at most the VLA's horizon {vla.horizon}, got "
            f"{config.chunk_len}."
        )
    if is_stateful(vla):
        raise ConfigError(
            f"The VLA {vla.name!r} has a state, and a world model looks at single frames: take a "
            "VLA without one."
        )
    sizes = _sizes(config, vla)  # before anything is played: they may be wrong
    sets = [
        collect(vla, config, config.episodes(held_out=held), held_out=held)
        for held in (False, True)
    ]
    for path, data in zip(paths, sets, strict=True):
        data.save(path)
    return sets[0], sets[1], sizes


def _sizes(config: WorldModelConfig, vla: FrozenVLA) -> WorldModelSizes:
    suite = get_suite(config.suites[0])
    return WorldModelSizes(
        vla=config.vla,
        feature_size=vla.hidden_size,
        proprio_size=suite.proprio.size,
        action_size=suite.action.size,
        chunk_len=config.chunk_len,
        cameras=vla.cameras,
        image_size=vla.image_size,
        memory_hidden=config.memory_hidden,
        memory_num_layers=config.memory_num_layers,
        memory_enabled=config.memory_enabled,
        width=config.width,
        num_blocks=config.num_blocks,
        tokenizer=TokenizerConfig(
            frame_size=FRAME_SIZE,
            codebook_size=config.codebook_size,
            code_size=config.code_size,
            width=config.tokenizer_width,
        ),
    )


def _loop(run: Run, teacher: Teacher, held: Sequences, collected: float) -> None:
    """Take steps until the run is over; leave a checkpoint and ``model/`` behind."""
    while not run.is_over(teacher.steps):
        phase = "tokenizer" if teacher.is_tokenizing else "world model"
        for key, value in teacher.step().items():
            run.logger.record_mean(key, value)
        run.show(teacher.steps, phase=phase)
        if teacher.steps % LOG_EVERY == 0:
            run.log({}, teacher.steps)
        if teacher.windows is not None:
            run.film_if_due(teacher.windows.episodes, lambda path: _film(path, teacher, held))
        is_due = run.is_checkpoint_due(teacher.steps) or teacher.steps == run.total
        if is_due:
            run.log(_flat(validate(teacher, held)), teacher.steps)
        if is_due or run.is_over(teacher.steps):
            if not teacher.is_tokenizing:  # first: a run may go on from its last step
                teacher.model.save_pretrained(run.dir.path / "model")
            _save(run, teacher, collected)


def _save(run: Run, teacher: Teacher, collected: float) -> None:
    state = {**teacher.plain(), "collecting_seconds": collected}
    with run.new_checkpoint(teacher.steps, state) as folder:
        teacher.save(folder)


def validate(teacher: Teacher, held: Sequences) -> dict[str, Any]:
    """Return the figures on the held-out sequences; while the tokenizer trains, its own alone."""
    teacher.model.eval()
    held.tokens = tokenised(teacher.model, held)
    if teacher.is_tokenizing:
        return {"tokenizer_psnr": tokenizer_psnr(teacher.model, held)}
    return evaluate(teacher.model, held, stay_rate(teacher.train))


def _results(teacher: Teacher, held: Sequences) -> dict[str, Any]:
    """Return what goes into the card besides times."""
    model = teacher.model
    results: dict[str, Any] = {
        "steps": teacher.steps,
        "sequences": {"train": _counts(teacher.train), "validation": _counts(held)},
        "parameters": {
            name: sum(p.numel() for p in part.parameters())
            for name, part in (("tokenizer", model.tokenizer), ("model", model))
        },
        "validation": validate(teacher, held),
    }
    if not teacher.is_tokenizing:
        results["behaviours"] = by_behaviour(model, held)
        results["memory_probe"] = {"recall": recall(model, teacher.train, held)}
    return results


def _counts(data: Sequences) -> dict[str, int]:
    """Return how many steps, episodes and control steps there are, and steps by behaviour."""
    counts = {"steps": len(data), "episodes": len(data.bounds())}
    counts["control_steps"] = int(data.executed.sum())
    return counts | {name: int((data.behaviour == i).sum()) for i, name in enumerate(BEHAVIOURS)}


def _film(path: Path, teacher: Teacher, held: Sequences) -> None:
    teacher.model.eval()
    held.tokens = tokenised(teacher.model, held)
    write_pictures(path, teacher.model, held)


def _flat(figures: dict[str, Any], prefix: str = "val") -> dict[str, float]:
    """Return figures by one name each, as metrics."""
    flat: dict[str, float] = {}
    for key, value in figures.items():
        name = f"{prefix}/{key}" if prefix == "val" else f"{prefix}_{key}"
        flat |= _flat(value, name) if isinstance(value, dict) else {name: value}
    return flat


def format_results(results: dict[str, Any]) -> str:
    """Return the figures of a card's results as a table."""
    found, lines = results["validation"], []
    if "memory" in found:
        lines += [
            f"{found['n_frames']} frames of {found['n_episodes']} episodes on other layouts:",
            f"{'':12}{'nats a token':>14}{'accuracy':>10}{'PSNR':>8}",
        ]
        for name in ("memory", "no_memory", "copy"):
            row = found[name]
            figures = f"{row['cross_entropy']:14.3f}{row['accuracy']:10.3f}{row['psnr']:8.2f}"
            lines.append(f"{name.replace('_', ' '):12}{figures}")
    return "\n".join([*lines, f"tokenizer: {found['tokenizer_psnr']:.2f} dB"])
