"""What the options stand for: scenarios, their contenders and targets."""

from __future__ import annotations

import dataclasses

from vla_gym.cli.bench.config import BenchConfig
from vla_gym.cli.bench.spec import (
    NO_ASSETS,
    SYSTEM_NAMES,
    Contender,
    EnvSpec,
    Scenario,
    System,
    Target,
)

#: Environments a worker in the second measurement of ours.
ENVS_PER_WORKER = 4


def scenarios(config: BenchConfig, default_assets: str) -> list[Scenario]:
    """Return what is to be measured, in order.

    Args:
        config: The options.
        default_assets: Pack to use where none is asked for.
    """
    if config.preset == "full":
        return _full(config)
    if config.preset == "quick":
        spec = EnvSpec(config.suite, config.task_ids, "lite", 64, "fast", config.chunk_len)
        return [_speed(config, "speed", spec), _startup(config, "startup", spec, rounds=1)]
    spec = EnvSpec(
        config.suite,
        config.task_ids,
        config.assets or default_assets,
        config.image_size,
        config.visual_profile,
        config.chunk_len,
    )
    makers = {
        "speed": lambda: _speed(config, "speed", spec),
        "startup": lambda: _startup(config, "startup", spec),
        "scaling": lambda: _scaling(config, "scaling", spec),
        "overhead": lambda: _overhead(config),
    }
    parts = [makers[part]() for part in dict.fromkeys(config.measure)]
    return [*parts, _profile(config, "profile", spec)] if config.profile else parts


def describe(spec: EnvSpec) -> str:
    """Return one line on the environments."""
    where = f"{spec.assets} pack, chunks of {spec.chunk_len}"
    if spec.image_size == 0:
        return f"state only, {where}"
    profile = "" if spec.visual_profile is None else f", {spec.visual_profile} visuals"
    return f"two {spec.image_size}x{spec.image_size} cameras, {where}{profile}"


def _full(config: BenchConfig) -> list[Scenario]:
    base = (config.suite, config.task_ids)
    real = EnvSpec(*base, "libero", 256, "libero", 8)
    lite = EnvSpec(*base, "lite", 128, "fast", 8)
    state = dataclasses.replace(real, image_size=0, visual_profile=None)
    every = tuple(range(10))
    return [
        _speed(
            config,
            "libero-256",
            real,
            targets=(
                Target(
                    "control steps/s, of LIBERO's",
                    ("ratios", "ours", "libero", "rate"),
                    20.0,
                ),
            ),
        ),
        _speed(
            config,
            "lite-128",
            lite,
            reference=real,
            targets=(
                Target(
                    "control steps/s, of LIBERO's usual",
                    ("ratios", "ours", "reference", "rate"),
                    100.0,
                ),
            ),
        ),
        _speed(
            config,
            "state",
            state,
            chunks=10,
            targets=(
                Target(
                    "control steps/s, of LIBERO's",
                    ("ratios", "ours", "libero", "rate"),
                    3.5,
                ),
            ),
        ),
        _startup(config, "startup-libero", real, pss_goal=550.0),
        _startup(config, "startup-lite", lite, pss_goal=150.0),
        _many_tasks(config, dataclasses.replace(real, task_ids=every)),
        _scaling(config, "scaling-libero", real, goal=0.95),
        _scaling(config, "scaling-lite", lite, goal=0.95),
        _overhead(config),
        _profile(config, "profile-libero", real),
        _profile(config, "profile-lite", lite),
        _profile(config, "profile-state", state),
    ]


def _contender(
    config: BenchConfig, system: System, spec: EnvSpec, num_envs: int | None = None, **changes: str
) -> Contender:
    count = num_envs or config.num_workers
    fields = {"key": system, "label": SYSTEM_NAMES.get(system, system), **changes}
    own = system in ("ours", "ours-send", "profiled", "stub-ours", "single")
    workers = config.num_workers if own else count
    return Contender(
        system=system, num_envs=count, workers=workers, env=spec, seed=config.seed, **fields
    )


def _contenders(config: BenchConfig, spec: EnvSpec) -> list[Contender]:
    """Ours with one and with several environments a worker, then the others."""
    found = []
    if "ours" in config.systems:
        many = config.num_envs or ENVS_PER_WORKER * config.num_workers
        found.append(_contender(config, "ours", spec))
        if many > config.num_workers:
            found.append(
                _contender(
                    config,
                    "ours",
                    spec,
                    many,
                    key="ours-many",
                    label=f"{SYSTEM_NAMES['ours']}, {many} envs",
                )
            )
    others: tuple[System, ...] = ("libero", "async")
    return found + [_contender(config, s, spec) for s in others if s in config.systems]


def _speed(
    config: BenchConfig,
    key: str,
    spec: EnvSpec,
    *,
    reference: EnvSpec | None = None,
    chunks: int | None = None,
    targets: tuple[Target, ...] = (),
) -> Scenario:
    contenders = _contenders(config, spec)
    notes: tuple[str, ...] = ()
    if reference is not None and "libero" in config.systems:
        label = f"{SYSTEM_NAMES['libero']} usual"
        notes = (f"{label}: {describe(reference).split(', chunks')[0]}.",)
        contenders.append(_contender(config, "libero", reference, key="reference", label=label))
    return Scenario(
        key,
        f"Speed: {describe(spec)}",
        "speed",
        tuple(contenders),
        baselines=("libero", "reference"),
        chunks=chunks or config.chunks,
        targets=targets,
        notes=notes,
    )


def _startup(
    config: BenchConfig,
    key: str,
    spec: EnvSpec,
    *,
    rounds: int | None = None,
    pss_goal: float | None = None,
) -> Scenario:
    targets: tuple[Target, ...] = ()
    if pss_goal is not None:
        targets = (
            Target(
                "PSS of a worker",
                ("contenders", "ours", "pss_mb"),
                pss_goal,
                at_most=True,
                unit="MB",
            ),
        )
    return Scenario(
        key,
        f"Start and memory: {describe(spec)}",
        "startup",
        tuple(_contenders(config, spec)),
        rounds=rounds or min(config.rounds, 3),
        targets=targets,
    )


def _many_tasks(config: BenchConfig, spec: EnvSpec) -> Scenario:
    systems: tuple[System, ...] = tuple(s for s in ("ours", "libero") if s in config.systems)
    return Scenario(
        "startup-10x16",
        f"Start of 16 environments on {len(spec.task_ids)} tasks: {describe(spec)}",
        "startup",
        tuple(_contender(config, system, spec, 16) for system in systems),
        chunks=0,
        rounds=1,
        targets=(
            Target(
                "time to the first observation, of LIBERO's",
                ("ratios", "ours", "libero", "start_s"),
                0.1,
                at_most=True,
            ),
        ),
    )


def _scaling(
    config: BenchConfig, key: str, spec: EnvSpec, *, goal: float | None = None
) -> Scenario:
    targets: tuple[Target, ...] = ()
    if goal is not None:
        targets = (
            Target(
                "control steps/s, of independent processes",
                ("ratios", "ours", "single", "rate"),
                goal,
            ),
            Target(
                "the same by send and recv",
                ("ratios", "ours-send", "single", "rate"),
                goal,
            ),
        )
    count = config.num_workers
    return Scenario(
        key,
        f"{count} workers against {count} independent processes: {describe(spec)}",
        "scaling",
        (
            _contender(config, "ours", spec),
            _contender(config, "ours-send", spec, label="ours, send and recv"),
            _contender(config, "single", spec, label="independent"),
        ),
        baselines=("single",),
        chunks=max(config.chunks, 6),
        rounds=max(config.rounds, 16),
        targets=targets,
    )


def _overhead(config: BenchConfig) -> Scenario:
    contenders = []
    for size in (0, 128):
        spec = EnvSpec(config.suite, config.task_ids, NO_ASSETS, size, None, 8)
        images = "without images" if size == 0 else f"two {size}x{size} images"
        for system, name in (("stub-ours", "ours"), ("stub-async", "async")):
            if name in config.systems:
                contenders.append(
                    _contender(
                        config,
                        system,  # type: ignore[arg-type]
                        spec,
                        16,
                        key=f"{system}-{size}",
                        label=f"{SYSTEM_NAMES[name]}, {images}",
                    )
                )
    return Scenario(
        "overhead",
        "Overhead: a call of step beyond the slowest worker, 16 stub environments",
        "overhead",
        tuple(contenders),
        baselines=(),
        chunks=100,
        targets=(
            Target(
                "overhead a call", ("contenders", "stub-ours-0", "overhead_us"), 200.0, True, "us"
            ),
        ),
    )


def _profile(config: BenchConfig, key: str, spec: EnvSpec) -> Scenario:
    return Scenario(
        key,
        f"Where the time goes: {describe(spec)}",
        "profile",
        (_contender(config, "profiled", spec, label=SYSTEM_NAMES["ours"]),),
        baselines=(),
        chunks=max(config.chunks, 6),
    )
