"""Upstream's own predicates and placement samplers on given states: what Upstream.ask answers.

A request holds

* ``qpos``, ``fixture_pos``, ``fixture_quat``, ``fixtures`` and ``goals``: whether each goal
  predicate holds in each state, by upstream's code;
* ``draws``: that many draws of upstream's placement samplers, less what starts on others;
* ``resets``: that many whole resets with robosuite's default joint noise;
* ``suites``, and nothing else: what upstream's benchmarks of these names say of their tasks.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _holds(env: Any, request: dict[str, Any]) -> np.ndarray:
    domain, model = env.env, env.sim.model._model
    bodies = [model.body(domain.fixtures_dict[n].root_body).id for n in request["fixtures"]]
    rows = []
    states = zip(request["qpos"], request["fixture_pos"], request["fixture_quat"], strict=True)
    for qpos, pos, quat in states:
        model.body_pos[bodies], model.body_quat[bodies] = pos, quat
        env.sim.set_state_from_flattened(np.concatenate([[0.0], qpos, np.zeros(model.nv)]))
        env.sim.forward()
        rows.append([bool(domain._eval_predicate(goal)) for goal in request["goals"]])
    return np.array(rows)


def _draws(env: Any, count: int) -> dict[str, np.ndarray]:
    poses: dict[str, list[np.ndarray]] = {}
    for _ in range(count):
        for name, (pos, quat, _) in env.env.placement_initializer.sample().items():
            poses.setdefault(f"draw_{name}", []).append(np.concatenate([pos, quat]))
    return {name: np.array(values) for name, values in poses.items()}


def _resets(env: Any, count: int) -> dict[str, np.ndarray]:
    from vla_gym.suites.libero import upstream_env

    domain = env.env
    # The same draws without rebuilding the model each time; but fixtures must stand where a model
    # that was just built has them, since upstream takes the positions of sites from there.
    domain.hard_reset = False
    import mujoco

    built = mujoco.MjModel.from_xml_string(domain.model.get_xml())
    rows: dict[str, list[np.ndarray]] = {}
    for _ in range(count):
        env.sim.model._model.body_pos[:] = built.body_pos
        env.sim.model._model.body_quat[:] = built.body_quat
        upstream_env.reset_env(domain)
        rows.setdefault("reset_qpos", []).append(env.sim.data.qpos.copy())
        initial = domain.robots[0].controller.initial_joint
        rows.setdefault("reset_nullspace", []).append(np.array(initial))
        for name, fixture in domain.fixtures_dict.items():
            body = env.sim.model._model.body(fixture.root_body)
            pose = np.concatenate([body.pos, body.quat])
            rows.setdefault(f"reset_{name}", []).append(pose)
    return {name: np.array(values) for name, values in rows.items()}


def _benchmarks(names: list[str]) -> dict[str, np.ndarray]:
    """Return names, both kinds of instruction and initial states of the tasks of benchmarks."""
    from libero.libero.benchmark import get_benchmark
    from libero.libero.envs.bddl_utils import get_problem_info

    rows: dict[str, np.ndarray] = {}
    for name in names:
        benchmark = get_benchmark(name)()
        for i in range(benchmark.n_tasks):
            task, problem = benchmark.get_task(i), benchmark.get_task_bddl_file_path(i)
            # The latter is what ControlEnv calls its language_instruction.
            instruction = get_problem_info(problem)["language_instruction"]
            rows[f"{name}/{i}/words"] = np.array([task.name, task.language, instruction])
            rows[f"{name}/{i}/states"] = np.asarray(benchmark.get_task_init_states(i))
    return rows


def answer(suite: str, task_id: int, request: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer a request, in a process where ``upstream_env.prepare`` has been called."""
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import upstream_env

    if "suites" in request:
        return _benchmarks(request["suites"])
    noise = "default" if "resets" in request else None
    task = get_task(suite, task_id)
    env = upstream_env.make_env(task.bddl_file, initialization_noise=noise)
    env.seed(3)
    upstream_env.reset_env(env.env)
    result: dict[str, np.ndarray] = {}
    if "qpos" in request:
        result["holds"] = _holds(env, request)
    if "draws" in request:
        result |= _draws(env, request["draws"])
    if "resets" in request:
        result |= _resets(env, request["resets"])
    env.close()
    return result
