"""Linear probes and the states they are fitted on: known answers, whole episodes, errors."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from mini_vla import small_config, write_demos

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError
from vla_gym.remote.shards import ThreadHosts
from vla_gym.rl_token import RLTokenEncoder, RLTokenModelConfig
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.vla import FrozenVLA, StatefulVLA, VLAOutput, load
from vla_gym_trainers.rl_token import probes
from vla_gym_trainers.rl_token.collect_states import ShowObject, states_of_demos, states_of_episodes
from vla_gym_trainers.rl_token.linear_probe import fit_linear_probe
from vla_gym_trainers.rl_token.probes import TARGETS, ProbeConfig, format_probes, run_probes
from vla_gym_trainers.rl_token.vla_states import PLAYERS, StatesConfig, VLAStates
from vla_gym_trainers.rollout.episode_sets import join_episodes

FEATURES = {"rl_token", "mean_hidden", "full_hidden", "proprio", "nothing"}
FEATURES |= {"random_token", "random_projection"}
EXPERT, VLA = PLAYERS.index("expert"), PLAYERS.index("vla")


class PixelVLA(FrozenVLA):
    """Hidden states that say what it was shown; it stands still."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "pixel", 8, 2, 4, 32

    def infer(self, images, instructions, proprio):
        """Return mean brightness of both cameras, count of words, and the height of the hand."""
        views = [images[key].reshape(len(proprio), -1).mean(1) for key in ("agentview", "wrist")]
        words = np.array([len(text.split()) for text in instructions])
        rows = np.stack([*views, words, proprio[:, 2]], axis=1)
        hidden = torch.from_numpy(rows).float()[:, None].repeat(1, 2, 1)
        return VLAOutput(hidden, torch.zeros(len(proprio), 8, 7))


def scattered(count, width, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width))


def test_a_linear_function_is_found_exactly_from_tall_and_from_wide_features():
    weights = scattered(6, 2, seed=1) * np.array([1.0, 1000.0])
    for width in (6, 300):
        x = np.concatenate([scattered(160, 6), np.zeros((160, width - 6))], axis=1)
        x[:, 5] += 40.0  # a large mean must not matter
        y = x[:, :6] @ weights + np.array([3.0, -7.0])
        found, bias, penalties = fit_linear_probe(x[:120], y[:120], np.repeat(np.arange(30), 4))
        np.testing.assert_allclose(x[120:] @ found + bias, y[120:], rtol=0, atol=1e-2)
        np.testing.assert_allclose(found[:6], weights, rtol=0, atol=1e-2)
        assert (penalties <= 1e-5).all()


def test_noise_teaches_nothing_and_no_features_give_the_mean():
    y = scattered(200, 1, seed=1) + 5.0
    episodes = np.repeat(np.arange(50), 4)
    weights, bias, penalties = fit_linear_probe(scattered(200, 150), y, episodes)
    test = scattered(500, 150, seed=2) @ weights + bias
    # Least squares would predict with a spread of more than 1; the penalty holds it back.
    assert penalties[0] >= 1.0
    assert test.std() < 0.5 and abs(test.mean() - y.mean()) < 0.2
    weights, bias, _ = fit_linear_probe(np.empty((200, 0)), y, episodes)
    predicted = np.empty((3, 0)) @ weights + bias
    np.testing.assert_allclose(predicted, np.full((3, 1), y.mean()))


def test_every_target_gets_its_own_penalty_and_constants_are_left_alone():
    x = scattered(300, 20)
    x[:, 7] = 0.1
    y = np.stack([x @ scattered(20, 1, seed=3)[:, 0], scattered(300, 1, seed=4)[:, 0]], axis=1)
    weights, _, penalties = fit_linear_probe(x, y, np.repeat(np.arange(60), 5))
    assert penalties[0] < 1e-4 < 1e-1 < penalties[1]
    assert weights[7].tolist() == [0.0, 0.0]


def test_a_probe_that_learns_its_episodes_by_heart_is_penalised():
    # One feature names the episode, another tells the truth roughly: rows at random would let the
    # penalty be chosen on episodes that were fitted.
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(40), 10)
    truth = rng.normal(size=40)[episodes]
    rough = truth[:, None] + rng.normal(size=(400, 1))
    names = np.eye(40)[episodes]
    features = np.concatenate([rough, names], axis=1)
    weights, bias, _ = fit_linear_probe(features, truth[:, None], episodes)
    new = rng.normal(size=(1000, 1))
    seen = np.concatenate([new + rng.normal(size=(1000, 1)), np.zeros((1000, 40))], axis=1)
    assert np.abs(seen @ weights + bias - new).mean() < np.abs(new).mean()


def test_bad_probe_input_is_refused():
    x, y, episodes = scattered(8, 2), scattered(8, 1), np.arange(8)
    with pytest.raises(ConfigError, match="two episodes"):
        fit_linear_probe(x, y, np.zeros(8, int))
    with pytest.raises(ConfigError, match="finite"):
        fit_linear_probe(np.where(x > 0, np.nan, x), y, episodes)


def made_states(informative, episodes=24, length=6, seed=0):
    """Two tasks of two suites; the hidden states do or do not hold the object's position."""
    rng = np.random.default_rng(seed)
    episode = np.repeat(np.arange(episodes), length)
    task = episode % 2
    start = rng.normal(scale=0.05, size=(episodes, 3)) + np.array([0.2, 0.0, 0.9])
    step = np.tile(np.arange(length), episodes)
    objects = start[episode]
    objects[step >= 4, 2] += 0.2  # lifted for the last two of six states
    proprio = rng.normal(size=(len(episode), 8)).astype(np.float32)
    distance = np.linalg.norm(proprio[:, :3] - objects, axis=1, keepdims=True)
    told = np.concatenate([objects, distance], axis=1) if informative else np.zeros((1, 4))
    mix = rng.normal(size=(4, 2, 8)) * 20.0
    hidden = np.einsum("nk,kmh->nmh", told + np.zeros((len(episode), 4)), mix)
    hidden += rng.normal(scale=0.0 if informative else 1.0, size=hidden.shape)
    return VLAStates(
        hidden=torch.from_numpy(hidden).float(),
        proprio=proprio,
        object_pos=objects,
        task=task,
        player=np.full(len(episode), EXPERT),
        episode=episode,
        tasks=["goal_3", "object_0"],
    )


def small_encoder():
    torch.manual_seed(0)
    sizes = RLTokenModelConfig(hidden_size=8, max_tokens=2, dim=4, width=16, num_heads=2)
    return RLTokenEncoder(sizes).eval()


def test_probes_of_states_that_hold_the_answer_and_of_noise():
    states = made_states(informative=True)
    test = states.held_out(0.25)
    result = run_probes(states, small_encoder(), test)
    assert result["states"] == {"train": 108, "test": 36, "test_resting": 24}
    for target in TARGETS:
        for scope in ("all", "suite", "task"):
            rows = result["errors_cm"][target][scope]
            assert set(rows) == FEATURES
            assert set(rows["full_hidden"]) == {"goal", "object", "all"}
            assert rows["full_hidden"]["all"] < 0.05, (target, scope)
            assert rows["nothing"]["all"] > 4.0
    # Predicting the mean, by hand.
    mean = states.object_pos[~test].mean(axis=0)
    by_hand = 100 * np.linalg.norm(states.object_pos[test] - mean, axis=1).mean()
    assert result["errors_cm"]["object_position"]["all"]["nothing"]["all"] == pytest.approx(by_hand)
    goal = ~test & (states.task == 0)
    mean, rows = states.object_pos[goal].mean(axis=0), test & (states.task == 0)
    by_hand = 100 * np.linalg.norm(states.object_pos[rows] - mean, axis=1).mean()
    got = result["errors_cm"]["object_position"]["suite"]["nothing"]["goal"]
    assert got == pytest.approx(by_hand)

    noise = made_states(informative=False)
    errors = run_probes(noise, small_encoder(), noise.held_out(0.25))["errors_cm"]
    rows = errors["object_position"]["all"]
    assert rows["full_hidden"]["all"] > 0.85 * rows["nothing"]["all"]
    table = format_probes(result)
    assert table.count("| full hidden |") == 3 and "probe a task" in table


def test_the_proprioception_control_reads_no_hidden_states():
    states = made_states(informative=True)
    test = states.held_out(0.25)
    first = run_probes(states, small_encoder(), test)["errors_cm"]["object_position"]["all"]
    states.hidden = torch.randn_like(states.hidden)
    second = run_probes(states, small_encoder(), test)["errors_cm"]["object_position"]["all"]
    for feature in FEATURES:
        same = feature in ("proprio", "nothing")
        assert (first[feature] == second[feature]) == same, feature


def test_held_out_states_are_whole_episodes_of_every_task_and_player():
    states = made_states(informative=False, episodes=20)
    states.player = np.where(states.episode >= 12, VLA, EXPERT)
    mask = states.held_out(0.3)
    # 6 + 6 episodes of the expert (30 %: 2 each), 4 + 4 of the VLA (1 each): the last ones.
    assert sorted(set(states.episode[mask])) == [8, 9, 10, 11, 18, 19]
    assert not set(states.episode[mask]) & set(states.episode[~mask])
    one = states.select(states.episode == 0)
    assert not one.held_out(0.5).any()


def test_joined_sets_keep_tasks_and_episodes_apart():
    a, b = made_states(True, episodes=2), made_states(True, episodes=4, seed=1)
    b.tasks = ["object_0", "spatial_1"]
    both = join_episodes([a, b])
    assert both.tasks == ["goal_3", "object_0", "spatial_1"]
    assert sorted(set(both.episode)) == list(range(6)) and len(both) == 36
    assert set(both.task[both.episode == 2]) == {1} and set(both.task[both.episode == 3]) == {2}
    torch.testing.assert_close(both.select(both.episode >= 2).hidden, b.hidden)


def test_probes_need_truth_and_two_sets():
    states = made_states(informative=True)
    with pytest.raises(ConfigError, match="others to test"):
        run_probes(states, small_encoder(), np.zeros(len(states), bool))
    states.object_pos[:] = np.nan
    with pytest.raises(ConfigError, match="known object positions"):
        run_probes(states, small_encoder(), states.held_out(0.25))


@pytest.fixture(scope="module")
def played():
    config = StatesConfig(
        suites=("goal",), task_ids=(5,), expert_episodes=2, rollout_episodes=1, frame_stride=20
    )
    return config, states_of_episodes(PixelVLA(), config)


def test_played_states_are_what_the_simulation_says(played):
    _, states = played
    assert states.tasks == ["goal_5"] and states.hidden.shape[1:] == (2, 4)
    assert states.hidden.dtype == torch.float16
    assert len(set(states.episode)) == 3 and np.isfinite(states.object_pos).all()
    # The VLA stands still until the limit: 300 control steps, 8 a chunk.
    assert (states.player == VLA).sum() == 38
    starts = [states.object_pos[states.episode == e][0] for e in range(3)]
    assert min(np.linalg.norm(a - b) for i, a in enumerate(starts) for b in starts[:i]) > 1e-4
    # "push the plate to the front of the stove": the plate's layout is the seed's.
    base = LiberoEnv("goal", image_size=32)
    env = ShowObject(NoisyEpisodes(base, seed=30_000, noise=0.15, expert=False))
    obs, _ = env.reset(seed=0, options={"task_id": 5})
    images, proprio, position = (
        (obs["agentview"], obs["wrist"]),
        obs["proprio"],
        base.sim.body_pos(base.task_model.objects["plate_1"].body),
    )
    env.close()
    first = np.flatnonzero(states.player == VLA)[0]
    np.testing.assert_array_equal(states.object_pos[first], position)
    np.testing.assert_array_equal(states.proprio[first], proprio)
    shown = [images[0].mean(), images[1].mean(), 9, proprio[2]]
    np.testing.assert_allclose(states.hidden[first, 0], shown, rtol=1e-3)
    # The expert pushes it by centimetres.
    expert = states.object_pos[states.player == EXPERT]
    assert np.linalg.norm(expert - expert[0], axis=1).max() > 0.05


def test_episodes_are_a_function_of_their_seed_on_any_machines(played, monkeypatch):
    config, states = played
    hosts, place, placed = ThreadHosts(2), ThreadHosts.place, []
    monkeypatch.setattr(hosts, "place", lambda part: placed.append(part) or place(hosts, part))
    spread = states_of_episodes(PixelVLA(), replace(config, hosts=hosts))
    assert set(placed) == {0, 1}
    torch.testing.assert_close(spread.hidden, states.hidden, rtol=0, atol=0)
    np.testing.assert_array_equal(spread.object_pos, states.object_pos)
    few = replace(config, expert_episodes=1, rollout_episodes=0, seed=1)
    other = states_of_episodes(PixelVLA(), few)
    assert np.linalg.norm(other.object_pos[0] - states.object_pos[0]) > 1e-4


class CountingVLA(StatefulVLA):
    """Hidden states that say which frame of its episode each one is; it stands still."""

    name, horizon, num_hidden_tokens, hidden_size, image_size = "counting", 8, 1, 1, 32

    def initial_state(self, n):
        return {"frames": torch.zeros(n)}

    def infer_with_state(self, images, instructions, proprio, state):  # noqa: ARG002
        frames = state["frames"] + 1
        return VLAOutput(frames[:, None, None], torch.zeros(len(frames), 8, 7)), {"frames": frames}


def test_a_stateful_vla_sees_each_episode_from_its_first_frame(played):
    states = states_of_episodes(CountingVLA(), replace(played[0], expert_episodes=1))
    for episode in range(2):
        frames = states.hidden[states.episode == episode].flatten()
        assert frames.tolist() == list(range(1, len(frames) + 1)) and len(frames) > 2


def test_regions_and_fixtures_have_positions_too():
    env = ShowObject(LiberoEnv("goal", cameras=()))
    for task_id, name in ((0, "wooden_cabinet_1_middle_region"), (7, "flat_stove_1")):
        obs, _ = env.reset(seed=0, options={"task_id": task_id})
        assert env.unwrapped.task_model.task.problem.of_interest[0] == name
        position = obs["object_pos"]
        # On the table, within reach of the arm.
        assert position.shape == (3,) and abs(position[:2]).max() < 0.6 and position[2] > 0.8
    env.close()


def test_bad_options_are_refused():
    for values, message in (
        ({"expert_episodes": -1}, ">= 0"),
        ({"suites": ()}, "suites and task_ids needs at least one value"),
        ({"suites": ("90",)}, "No expert plays 90_0"),
        ({"suites": ("nothing",)}, "Unknown suite"),
        ({"task_ids": (11,)}, "out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            StatesConfig(**values).check()
    StatesConfig(suites=("90",), expert_episodes=0).check()
    with pytest.raises(ConfigError, match="nothing to learn from: ask for at least one episode"):
        states_of_episodes(PixelVLA(), StatesConfig(expert_episodes=0, rollout_episodes=0))
    for values, message in (
        ({"test_share": 1.0}, "test_share"),
        ({"expert_episodes": 1, "rollout_episodes": 1}, "three episodes"),
        ({"expert_episodes": 4, "rollout_episodes": 0, "test_share": 0.9}, "three episodes"),
        ({"output": "/"}, "output / is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProbeConfig(**values).check()
    ProbeConfig(expert_episodes=3, rollout_episodes=0).check()


def test_the_vla_may_have_options(monkeypatch):
    seen = []
    monkeypatch.setattr(probes, "states_of_episodes", lambda vla, _: seen.append(vla) or 1 / 0)
    with pytest.raises(ZeroDivisionError):  # where episodes would be played
        probes.probe_rl_token(ProbeConfig(vla="mini?head=token"))
    assert seen[0].head == "token"


def test_another_vla_s_token_is_refused_before_anything_is_played(monkeypatch):
    monkeypatch.setattr(probes, "load", lambda *_, **__: PixelVLA())
    monkeypatch.setattr(probes, "states_of_episodes", lambda *_: pytest.fail("played"))
    with pytest.raises(ConfigError, match="8, 192.*the RL token that was pretrained for this VLA"):
        probes.probe_rl_token(ProbeConfig(rl_token="mini"))


def test_demonstrations_of_another_size_are_refused(tmp_path):
    write_demos(tmp_path, episodes=1, length=4)
    states = states_of_demos(PixelVLA(), tmp_path, stride=2)
    assert states.tasks == ["goal_1", "goal_0"] and len(states) == 4
    assert np.isnan(states.object_pos).all()
    large = PixelVLA()
    large.image_size = 256
    with pytest.raises(ConfigError, match="--image-size 256"):
        states_of_demos(large, tmp_path, stride=2)


@pytest.mark.slow
def test_workers_play_what_one_process_plays_and_the_command_reports(tmp_path, capsys):
    from vla_gym.vla.mini.model import MiniVLA
    from vla_gym_trainers.cli import main

    torch.manual_seed(0)
    MiniVLA(small_config()).save_pretrained(tmp_path / "vla")
    sizes = RLTokenModelConfig(hidden_size=32, max_tokens=8, dim=4, width=16, num_heads=2)
    RLTokenEncoder(sizes).save_pretrained(tmp_path / "token")
    common = {"suites": ("goal",), "task_ids": (5,), "expert_episodes": 2, "rollout_episodes": 0}
    vla = load(str(tmp_path / "vla"))
    here = states_of_episodes(vla, StatesConfig(**common))
    there = states_of_episodes(vla, StatesConfig(**common, num_workers=2))
    torch.testing.assert_close(here.hidden, there.hidden, rtol=0, atol=2e-3)
    np.testing.assert_array_equal(here.object_pos, there.object_pos)

    output = tmp_path / "out" / "probes.json"
    arguments = ["probe", "--vla", str(tmp_path / "vla"), "--rl-token", str(tmp_path / "token")]
    arguments += ["--suites", "goal", "--task-ids", "5", "--expert-episodes", "4"]
    arguments += ["--rollout-episodes", "0", "--frame-stride", "8", "--output", str(output)]
    assert main(arguments) == 0
    assert "| rl token |" in capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    assert results["errors_cm"]["object_position"]["all"]["nothing"]["goal"] > 0
