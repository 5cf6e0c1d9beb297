"""``vla-gym doctor``: what this machine has, what is missing, and the exact mend.

Every check is one function that returns a :class:`Check` and never raises. What may crash or hang
runs in a process of its own, with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vla_gym.cli.doctor import graphics, probes, system
from vla_gym.cli.doctor.children import Answer
from vla_gym.cli.doctor.graphics import check_gl
from vla_gym.cli.doctor.report import Check, as_json, print_report

__all__ = ["Check", "as_json", "check_gl", "print_report", "run_checks"]

_Named = tuple[str, Callable[[], Check]]


def run_checks(*, quick: bool = False) -> list[Check]:
    """Run every check in the order in which the report shows them.

    Args:
        quick: Leave out what takes seconds: imports, CUDA, settling, speed.

    Returns:
        One :class:`Check` each; a check that breaks is reported as failed.
    """
    # The slow ones that only wait go on while the fast ones run; speed has the machine alone.
    with ThreadPoolExecutor(2) as pool:
        pack = _probe_pack()
        gl = pool.submit(_guard, "gl", lambda: graphics.check_gl())
        later = {}
        if not quick:
            later["imports"] = pool.submit(probes.ask_imports)
            later["settle"] = pool.submit(probes.ask_simulation, "settle", pack)
        checks = [_guard(name, check) for name, check in _fast_checks()]
        checks.insert(len(checks) - 1, gl.result())
        if quick:
            return checks
        imports, settle = later["imports"], later["settle"]
        checks.append(_guard("imports", lambda: probes.check_imports(imports.result())))
        data = imports.result().data if imports.exception() is None else None
        checks.append(_guard("cuda", lambda: graphics.check_cuda_and_egl(data)))
        checks.append(_guard("settle", lambda: probes.check_settle(settle.result())))
    rates = _guarded_speed()
    checks.append(_guard("speed", lambda: probes.check_speed(rates, gl.result().value)))
    if rates.data is not None:
        cost = probes.image_cost_ms(rates.data)
        checks = [graphics.with_cost(c, cost) if c.name == "gl" else c for c in checks]
    return checks


def _guarded_speed() -> Answer:
    try:
        return probes.ask_simulation("speed", "lite")
    except Exception as error:  # such as a machine that starts no process
        return Answer(None, f"{type(error).__name__}: {error}")


def _fast_checks() -> list[_Named]:
    checks: list[_Named] = [("python", system.check_python)]
    for name, spec in system.REQUIREMENTS.items():
        checks.append((name, partial(system.check_package, name, spec)))
    for name, spec in system.OPTIONAL.items():
        checks.append((name, partial(system.check_package, name, spec, required=False)))
    return [
        *checks,
        ("cache", system.check_cache),
        ("assets: lite", partial(system.check_assets, "lite")),
        ("assets: libero", partial(system.check_assets, "libero")),
        *(
            (f"weights: {name}", partial(system.check_weights, name))
            for name in ("mini", "mini-few")
        ),
        ("shared memory", system.check_shared_memory),
        ("open files", system.check_files),
        ("cores", system.check_cores),
    ]


def _probe_pack() -> str:
    """Settling is judged on the real meshes where they are."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.errors import VlaGymError

    try:
        resolve_asset_pack("libero")
    except VlaGymError:
        return "lite"
    return "libero"


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # the report must come out whatever is broken
        return Check(name, "fail", f"{type(error).__name__}: {error}", "Install vla-gym again.")
