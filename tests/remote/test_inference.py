"""Requests of many simulators share forward passes; weights go by version."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from memory_vla import GRUVLA
from on_policy_toys import tiny_vla
from trees import assert_same

from vla_gym.errors import ConfigError, WorkerError
from vla_gym.remote.inference import InferenceServer, pack_weights
from vla_gym.remote.ray_inference import InferenceActor, RayInference, in_pieces
from vla_gym.remote.remote_vla import RemoteVLA, vla_facts
from vla_gym.vla import FrozenVLA, VLAOutput, load


class RowVLA(FrozenVLA):
    """Row i of the output says what row i of the input was; counts its batches."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "rows", 4, 1, 2, 8

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.model.weight)

    def infer(self, images, instructions, proprio):
        self.batches.append(len(instructions))
        assert set(images) == {"agentview", "wrist"}
        self.entered.set()
        assert self.gate.wait(20)
        if "break" in instructions:
            raise ValueError("a broken row")
        rows = [[float(p[0]), float(len(t))] for p, t in zip(proprio, instructions, strict=True)]
        hidden = torch.tensor(rows)[:, None] * self.model.weight.item()
        return VLAOutput(hidden, hidden[:, :, :1].repeat(1, 4, 7))


def request(*numbers, text="go"):
    images = {view: np.zeros((len(numbers), 8, 8, 3), np.uint8) for view in ("agentview", "wrist")}
    return images, [text] * len(numbers), np.array([[n] * 8 for n in numbers], np.float32)


@pytest.fixture
def serve():
    servers = []

    def make(vla=None, **kwargs):
        servers.append(InferenceServer(vla or RowVLA(), **kwargs))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def busy(serve, *numbers, **kwargs):
    """Return a VLA that waits for its gate, its server, and the request that it works on."""
    vla = RowVLA()
    vla.gate.clear()
    server = serve(vla, max_wait_s=0.0, **kwargs)
    first = server.infer(*request(*numbers))
    assert vla.entered.wait(20)
    return vla, server, first


def test_what_waits_shares_a_forward_pass_up_to_max_rows(serve):
    vla, server, first = busy(serve, 1, max_rows=5)
    waiting = [server.infer(*request(*rows)) for rows in ((2, 3), (4,), (5, 6, 7), (8,) * 7)]
    vla.gate.set()
    found = [future.result(20) for future in (first, *waiting)]
    # (5, 6, 7) would be row 6 of the second pass; more than max_rows come alone.
    assert vla.batches == [1, 3, 3, 7]
    numbers = [answer.hidden[:, 0, 0].tolist() for answer in found]
    assert numbers == [[1], [2, 3], [4], [5, 6, 7], [8] * 7]
    stats = server.stats()
    assert (stats["requests"], stats["rows"], stats["forwards"]) == (5, 14, 4)


def test_a_request_waits_for_others_no_longer_than_max_wait(serve):
    vla = RowVLA()
    server = serve(vla, max_rows=64, max_wait_s=0.4)
    began = time.monotonic()
    futures = [server.infer(*request(i)) for i in range(3)]
    for future in futures:
        future.result(20)
    assert vla.batches == [3] and 0.35 < time.monotonic() - began < 5
    server.infer(*request(0)).result(20)
    assert server.stats()["waited"] >= 0.35 * 2


def test_new_weights_come_between_two_passes_and_old_ones_never(serve):
    vla = RowVLA()
    server = serve(vla, max_wait_s=0.0)
    weights = [pack_weights({"weight": torch.full((1, 1), float(i))}) for i in range(4)]
    assert server.infer(*request(1)).result(20).version == 0
    assert server.publish(2, weights[2]).result(20) == 2
    answer = server.infer(*request(1)).result(20)
    assert answer.version == 2 and answer.hidden[0, 0, 0] == 2.0
    assert server.publish(1, weights[1]).result(20) == 2  # came late
    assert server.infer(*request(1)).result(20).hidden[0, 0, 0] == 2.0
    for wrong, match in (
        ({"bias": torch.zeros(1)}, "no parameters called bias"),
        ({"weight": torch.zeros(2, 2)}, r"weight has shape \(1, 1\), got \(2, 2\)"),
    ):
        with pytest.raises(ConfigError, match=match):
            server.publish(9, pack_weights(wrong)).result(20)
    assert server.stats()["version"] == 2


def test_errors_and_deadlines(serve):
    vla = RowVLA()
    server = serve(vla, max_wait_s=0.0)
    remote = RemoteVLA(vla_facts(vla), server.infer, timeout=0.2)
    with pytest.raises(ValueError, match="a broken row"):
        remote.infer(*request(1, text="break"))
    vla.gate.clear()
    with pytest.raises(WorkerError, match="did not answer within 0.2 s"):
        remote.infer(*request(1))
    vla.gate.set()
    assert remote.infer(*request(5)).hidden[0, 0, 0] == 5.0
    for name, wrong in (("max_rows", 0), ("max_wait_s", -1.0), ("max_wait_s", float("inf"))):
        with pytest.raises(ConfigError, match=f"{name} must be"):
            serve(**{name: wrong})


def test_a_stateful_vla_is_refused():
    with pytest.raises(ConfigError, match="has a state, which an inference server does not carry"):
        InferenceServer(GRUVLA(tiny_vla()))


def test_who_no_longer_waits_holds_up_nobody(serve):
    vla, server, first = busy(serve, 1)
    weights = [pack_weights({"weight": torch.full((1, 1), float(i))}) for i in range(3)]
    assert not first.cancel()  # too late
    assert server.infer(*request(2, 2)).cancel() and server.publish(1, weights[1]).cancel()
    third, fourth = server.infer(*request(3)), server.publish(2, weights[2])
    assert server.infer(*request(4)).cancel()
    fifth = server.infer(*request(5))
    vla.gate.set()
    assert (first.result(20).hidden[0, 0, 0], third.result(20).hidden[0, 0, 0]) == (1.0, 3.0)
    assert fourth.result(20) == 2 and fifth.result(20).hidden[0, 0, 0] == 10.0
    assert vla.batches == [1, 1, 1] and server.stats()["requests"] == 3


def test_requests_that_do_not_fit_together_are_apart(serve):
    vla, server, first = busy(serve, 1)
    images, texts, proprio = request(2)
    one_view = {"agentview": images["agentview"]}
    wrong = [
        server.infer(images | {"third": images["wrist"]}, texts, proprio),
        server.infer(one_view, texts, proprio),
        server.infer(one_view, texts, proprio),
    ]
    narrow = server.infer(images, texts, proprio[:, :5])
    last = server.infer(*request(3))
    vla.gate.set()
    for future in wrong:
        with pytest.raises(AssertionError):
            future.result(20)
    found = [future.result(20).hidden[0, 0, 0] for future in (first, narrow, last)]
    assert found == [1.0, 2.0, 3.0] and vla.batches == [1, 1, 2, 1, 1, 1, 1]


def test_a_request_with_unequal_rows_is_refused(serve):
    server = serve(max_wait_s=0.1)
    images, texts, proprio = request(1, 2)
    wrong = [
        server.infer(images, texts[:1], proprio),
        server.infer(images, texts, proprio[:1]),
        server.infer(images | {"wrist": images["wrist"][:1]}, texts, proprio),
    ]
    good = server.infer(*request(7))
    for future in wrong:
        with pytest.raises(ConfigError, match="as many rows"):
            future.result(20)
    assert good.result(20).hidden[:, 0, 0].tolist() == [7.0]


def test_a_request_that_shares_a_pass_with_one_that_fails_gets_what_it_gets_alone(serve):
    vla, server, alone = busy(serve, 2, 3)
    bad, good = server.infer(*request(1, text="break")), server.infer(*request(2, 3))
    vla.gate.set()
    with pytest.raises(ValueError, match="a broken row"):
        bad.result(20)
    assert_same(good.result(20), alone.result(20))
    assert vla.batches == [2, 3, 1, 2]


def test_a_closed_server_answers_what_came_before_and_refuses_the_rest():
    vla = RowVLA()
    vla.gate.clear()
    server = InferenceServer(vla, max_wait_s=0.0)
    before = [server.infer(*request(i)) for i in range(3)]
    vla.gate.set()
    server.close()
    assert [future.result(0).hidden[0, 0, 0] for future in before] == [0.0, 1.0, 2.0]
    server.close()
    weights = pack_weights({"weight": torch.ones(1, 1)})
    for late in (server.infer(*request(9)), server.publish(1, weights)):
        with pytest.raises(WorkerError, match="inference server .* is closed"):
            late.result(0)


def test_environments_take_a_remote_vla_for_the_vla(serve):
    vla = load("mini")
    remote = RemoteVLA(vla_facts(vla), serve(vla).infer)
    kwargs = {"task_ids": 7, "assets": "lite", "max_control_steps": 16, "workers": 0}
    played = []
    for model in (vla, remote):
        envs = gym.make_vec("LiberoVLA-goal-v0", num_envs=2, vla=model, chunk_len=8, **kwargs)
        obs, _ = envs.reset(seed=4)
        played.append((obs, envs.step(obs["vla_action"])))
        envs.close()
    assert_same(played[1], played[0])


def test_an_actor_puts_the_pieces_of_a_request_together():
    """Ray sends arguments with the call only below 100 kB."""
    rng = np.random.default_rng(0)
    images = {k: rng.integers(0, 256, (6, 64, 64, 3), np.uint8) for k in ("agentview", "wrist")}
    arguments = images, ["open the drawer"] * 6, rng.normal(size=(6, 8)).astype(np.float32)
    pieces = in_pieces(*arguments)
    assert len(pieces) == 2 and max(map(len, pieces)) < 100_000
    actor = InferenceActor("mini-few", "cpu", None)
    found = asyncio.run(actor.infer(*pieces))
    expected = load("mini-few").infer(*arguments)
    np.testing.assert_allclose(found.actions, expected.actions.numpy(), atol=1e-5)
    actor._server.close()


class FakeRay:
    """Ray, as far as it is needed to start actors, whose constructor or ``get`` may fail."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)

    def __init__(self, starts=(), get=None) -> None:
        self.starts, self.error, self.left, self.killed = iter(starts), get, 0, 0

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, *_, **__):
        if (error := next(self.starts, None)) is not None:
            raise error
        return SimpleNamespace(facts=SimpleNamespace(remote=lambda: None))

    def get(self, asked, **_):
        if self.error is not None:
            raise self.error
        return [{} for _ in asked]

    def kill(self, *_, **__):
        self.killed += 1

    def close(self):
        self.left += 1


@pytest.mark.parametrize(
    ("ray", "raised", "match", "killed"),
    [
        (FakeRay([None, TypeError("a lock")]), WorkerError, "did not come up: a lock", 1),
        (FakeRay(get=ValueError("no GPU")), WorkerError, "did not come up: no GPU", 2),
        (FakeRay(get=TimeoutError("slow")), WorkerError, "within timeout=9 s: slow", 2),
        (FakeRay(get=KeyboardInterrupt("now")), KeyboardInterrupt, "now", 2),
    ],
)
def test_actors_that_do_not_come_up_leave_nothing(monkeypatch, ray, raised, match, killed):
    monkeypatch.setattr("vla_gym.remote.ray_inference.import_ray", lambda: ray)
    monkeypatch.setattr("vla_gym.remote.ray_inference.RayHosts", lambda *_, **__: ray)
    with pytest.raises(raised, match=match):
        RayInference("mini", actors=2, timeout=9)
    assert (ray.killed, ray.left) == (killed, 1)
    ray.error = None
    inference = RayInference("mini")
    inference.close()
    inference.close()
    assert ray.left == 2


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"max_wait_s": -1.0}])
def test_numbers_are_checked_before_ray_is_asked_for(monkeypatch, wrong):
    monkeypatch.delattr("vla_gym.remote.ray_inference.RayHosts")
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        RayInference("mini", **wrong)
