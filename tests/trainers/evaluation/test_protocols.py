"""Known evaluation protocols: what they fix reaches the simulation and the card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_gym.cli import doctor, known_episode
from vla_gym.cli import main as cli
from vla_gym.cli.doctor import Finding
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.suites.libero.protocols import PROTOCOLS
from vla_gym_trainers.evaluation.command import make_protocol, run_eval
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.policy_config import PolicyConfig
from vla_gym_trainers.evaluation.tables import title_of

RANDOM = EvalConfig(policy="random", task_ids=(8,), episodes=1, workers=0, progress=False)


def test_settling_and_limit_reach_the_simulation() -> None:
    fingers = {}
    for name in ("openvla", "libero"):
        env = LiberoEnv(
            "goal", task_ids=8, cameras=(), chunk_len=700, **PROTOCOLS[name].env_kwargs()
        )
        observation, _ = env.reset(options={"init_state_id": 0})
        fingers[name] = observation["proprio"][6]
        *_, truncated, info = env.step(np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (700, 1)))
        assert truncated and info["elapsed_steps"] == (300 if name == "openvla" else 600)
        env.close()
    assert fingers["openvla"] > 0.035 and fingers["libero"] < 0.025  # open; left half open


def test_a_card_holds_what_was_fixed(tmp_path: Path) -> None:
    card = run_eval(replace(RANDOM, protocol="libero", out=tmp_path))
    assert card["config"]["protocol"] == "libero"
    fixed = {
        "name": "libero",
        "episodes": 1,
        "chunk_len": 1,
        "settle_steps": 5,
        "settle_gripper": 0.0,
        "max_control_steps": {"goal": 600},
        "observation_timing": "libero",
    }
    assert {key: card["protocol"][key] for key in fixed} == fixed
    assert title_of(card["protocol"]).endswith("assets lite, protocol libero")
    (row,) = card["results"]["episodes"]
    assert row["length"] == 600 or row["success"]
    with pytest.raises(ConfigError, match="name is None here, libero in"):
        run_eval(replace(RANDOM, paired=tmp_path))
    assert EvalConfig(protocol="libero").num_states() == 20
    assert EvalConfig(protocol="openpi").num_states() == 50


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--protocol", "openvla"], "renders of 256 pixels, mini looks at 128"),
        (["--protocol", "openpi", "--chunk-len", "8"], "chunks of 5 control steps"),
        (["--protocol", "libero", "--episodes", "21"], "20 episodes a task or fewer; got 21"),
        (["--protocol", "libero", "--suite", "goal+spatial"], "LIBERO's suites, one by one"),
    ],
)
def test_what_cannot_be_done_is_one_error(
    arguments: list[str], expected: str, one_error: Any
) -> None:
    said = one_error(cli.main, "eval", *arguments)
    assert expected in said and f"--protocol {arguments[1]} asks for" in said


def test_preprocessing_that_a_protocol_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(jpeg=False, crop=True, seed=0)
    policy = SimpleNamespace(
        cameras=("agentview",),
        image_size=256,
        chunk_len=8,
        vla=SimpleNamespace(options=options),
        identity={},
    )
    monkeypatch.setattr(PolicyConfig, "make_policy", lambda _: policy)
    with pytest.raises(ConfigError, match="--protocol openvla asks for jpeg=True, --vla has jpeg"):
        EvalConfig(protocol="openvla").make_policy()
    options.jpeg = True
    policy.expert = False
    config = EvalConfig(protocol="openvla")
    assert make_protocol(config, config.make_policy())["vla_options"] == {
        "jpeg": True,
        "crop": True,
    }
    assert EvalConfig(protocol="openpi").make_policy() is policy


def test_the_doctor_sees_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(known_episode.KNOWN.read_text())["lite"]["libero"]
    found = known_episode.play("libero", "lite")
    same, text = known_episode.judge(found, known)
    assert same, text
    told = {}
    monkeypatch.setattr(doctor, "ask", lambda *_: told)
    monkeypatch.setattr(doctor, "check_assets", lambda _: Finding("warn", ""))

    def said(**changes: Any) -> tuple[str, str]:
        told.update(found, **changes)
        return doctor.run_checks(quick=True, protocol="libero")["protocol: libero"][:2]

    status, text = said(renderer="llvmpipe (LLVM 99)")
    assert status == "warn" and "images within" in text  # the lite pack is not LIBERO
    upside_down = np.array(found["images"])[:, ::-1].tolist()
    status, text = said(images=upside_down, renderer="llvmpipe (LLVM 99)")
    assert status == "fail" and "images differ by up to" in text
    status, text = said(images=upside_down, renderer="NVIDIA H100")
    assert status == "warn" and "images not compared: NVIDIA H100 draws" in text
    status, text = said(qpos=(np.array(found["qpos"]) + 0.002).tolist())
    assert status == "fail" and "0.002 (m, rad) away" in text


def test_protocols_of_the_doctor_and_of_eval_are_the_same() -> None:
    known = json.loads(known_episode.KNOWN.read_text())
    names = {name for name in PROTOCOLS if name}
    assert {frozenset(of_pack) for of_pack in known.values()} == {frozenset(names)}
