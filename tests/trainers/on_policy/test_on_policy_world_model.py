"""Policies that see a world model's memory, and trainers that are paid by one."""

import json
import shutil
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from on_policy_toys import tiny_vla, toy_envs
from run_logs import assert_goes_on, rows_of
from td3_toys import td3_bc
from test_on_policy_rl_token import SMALL as RL_TOKEN
from test_on_policy_train import run
from world_model_toys import OneView, watching_model

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rollout import rollout
from vla_gym.rollout.episodes import sampled_starts
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.evaluation.trained import load_policy, load_trained
from vla_gym_trainers.networks import FeatureNormalizer
from vla_gym_trainers.on_policy import networks
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.rl_token_actor import SIZES, ActorSizes, RLTokenActor
from vla_gym_trainers.runs.settings import parse_config
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY, load_world_model
from vla_gym_trainers.world_model.wrapper import WorldModelObservation

TERMS = ("task=1", "memory_divergence=0.5", "uncertainty=0.25")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "model"
    watching_model().save_pretrained(folder)
    return folder


def learn(folder, model, **changes):
    settings = {**RL_TOKEN, "chunk_len": 4, "total_steps": 400, "world_model": str(model)}
    return run(PPOConfig, folder, **{**settings, "rewards": TERMS, **changes})


def test_ppo_with_a_world_model_goes_on_bit_for_bit_and_what_it_saves_plays(model_folder, tmp_path):
    run_it = partial(learn, model=model_folder)
    whole = assert_goes_on(run_it, tmp_path, total_steps=600, checkpoint_every=100)
    rows = rows_of(whole)
    shown = next(row for row in rows if "rollout/reward_uncertainty" in row)
    assert 0.0 < shown["rollout/reward_uncertainty"] <= 1.0
    assert shown["rollout/reward_memory_divergence"] > 0.0 and "rollout/reward_task" in shown
    assert "rollout/reward_prediction_error" not in shown
    actor = load_policy(whole)  # unvalidated: the last one is kept
    assert actor.sizes.world_memory_size == 8
    assert actor.normalizer.scale[-8:].max() < 1.0  # fitted to a memory, which is within -1..1
    model = load_world_model(model_folder, vlas={"mini": tiny_vla()})
    policy = ActorPolicy(actor, tiny_vla(), None, 4, world_model=model)
    with closing(policy.wrap_envs(toy_envs(2, autoreset_mode="DISABLED"))) as envs:
        episodes = list(rollout(envs, policy, sampled_starts("goal", (0, 1), 2, 7)))
        obs, _ = envs.reset(seed=0)
    assert len(episodes) == 4
    seen = {"rl_token": np.zeros((2, 32)), "proprio": obs["proprio"]}
    seen |= {"vla_action": np.zeros((2, 4, 7), np.float32), WORLD_MEMORY: obs[WORLD_MEMORY]}
    chunks, _ = actor.predict(seen)
    seen[WORLD_MEMORY] = -seen[WORLD_MEMORY]
    assert not np.array_equal(actor.predict(seen)[0], chunks)


def test_rewards_are_the_trainings_alone_and_success_stays_the_tasks(model_folder, tmp_path):
    grpo = {k: v for k, v in RL_TOKEN.items() if k != "value_clip"} | {"episodes_per_env": 1}
    paid, unpaid = tmp_path / "paid", tmp_path / "unpaid"
    common = {**grpo, "chunk_len": 4, "total_steps": 40, "group_size": 2, "eval_every": 1000}
    run(GRPOConfig, unpaid, **common)
    changes = {"world_model": str(model_folder), "rewards": ("task=0", "memory_divergence=7")}
    run(GRPOConfig, paid, **common, **changes)
    first, second = (rows_of(folder) for folder in (unpaid, paid))
    for key in ("rollout/success", "eval/success"):  # the same, before anything is learnt
        one, other = (next(row[key] for row in rows if key in row) for rows in (first, second))
        assert one == other


def test_who_does_not_see_the_memory_is_validated_without_it(model_folder):
    paid = {"world_model": str(model_folder), "rewards": TERMS, "chunk_len": 4}
    made = networks.make_networks(PPOConfig(policy="gaussian", **paid), tiny_vla())
    with closing(toy_envs(1)) as envs:
        assert made.watched(envs) is envs and made.watched(envs, {"task": 1.0}) is not envs


def seeing_model():
    model = watching_model()
    model.use_vla(tiny_vla())
    return model


def test_td3_learns_with_a_world_model_and_what_it_saves_plays(tmp_path):
    watched = WorldModelObservation(toy_envs(2), seeing_model(), {"task": 1.0, "uncertainty": 0.1})
    envs = FrozenVLAObservation(watched, tiny_vla(), None)
    model = td3_bc(envs, seed=3, ahead=0, value_range=None)
    assert model.policy.normalizer.state_dim == 32 + 8 + 8
    model.learn(80)
    model.env.close()
    assert model.policy.normalizer.scale[-8:].max() < 1.0
    model.policy.save(tmp_path / "policy.safetensors")
    loaded = load_policy(tmp_path / "policy.safetensors")
    watched = WorldModelObservation(toy_envs(2, autoreset_mode="DISABLED"), seeing_model())
    with closing(RunPlayer(watched, 4, tiny_vla(), None, watched.world_model)) as player:
        episodes = player.play(loaded, sampled_starts("goal", (0, 1), 2, 7))
        obs, _ = FrozenVLAObservation(watched, tiny_vla(), None).reset(seed=0)
    assert len(episodes) == 4
    chunks, _ = loaded.predict(obs, deterministic=True)
    obs[WORLD_MEMORY] = -obs[WORLD_MEMORY]
    assert not np.array_equal(loaded.predict(obs, deterministic=True)[0], chunks)


def test_files_without_a_world_model_and_a_memory_load_as_before(tmp_path):
    RLTokenActor(ActorSizes(6, 4, [8], 1.0, 2, 8, [1.0] * 7)).save(tmp_path)
    sizes = json.loads((tmp_path / SIZES).read_text())
    assert sizes.pop("world_memory_size") == sizes.pop("memory_size") == 0
    (tmp_path / SIZES).write_text(json.dumps(sizes))
    actor = RLTokenActor.load(tmp_path)
    assert actor.normalizer.inputs == ("rl_token", "proprio")
    assert FeatureNormalizer(6, 8).state_dict().keys() == actor.normalizer.state_dict().keys()
    features = {key: box.sample() for key, box in actor.observation_space.items()}
    assert actor.carried == {} and actor.predict(features, None)[1] is None


def test_a_policy_that_needs_a_world_model_tells_so(tmp_path, model_folder):
    sizes = ActorSizes(192, 4, [8], 1.0, 2, 8, [1.0] * 7, world_memory_size=8)
    RLTokenActor(sizes).save(tmp_path)
    with pytest.raises(ConfigError, match="was trained with a world model, which nothing names"):
        load_trained(tmp_path, "mini")
    (tmp_path / "config.json").write_text(json.dumps({"world_model": "class:os:path:/x"}))
    with pytest.raises(ConfigError, match="class"):
        load_trained(tmp_path)


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig, TD3RunConfig])
def test_mistakes_in_rewards_are_one_clear_error(kind):
    def error(match, **changes):
        with pytest.raises(ConfigError, match=match):
            kind(**changes)

    error("add --world-model", rewards=("task=1",))
    error("reward terms task, .*'curiosity'", world_model="x", rewards=("curiosity=1",))
    error("like task=1 uncertainty=0.1, got 'task'", world_model="x", rewards=("task",))
    error("twice", world_model="x", rewards=("task=1", "task=2"))
    error("finite", world_model="x", rewards=("task=inf",))


def test_rewards_are_read_from_the_command_line_and_td3_wants_their_range():
    options = ["--world-model", "x", "--rewards", "task=1", "uncertainty=0.1"]
    config = parse_config(PPOConfig, options)
    assert config.reward_weights() == {"task": 1.0, "uncertainty": 0.1}
    for rewards in (("task=1", "uncertainty=0.1"), ("task=5",), ("task=0",)):
        with pytest.raises(ConfigError, match="value_range"):
            TD3RunConfig(world_model="x", rewards=rewards)
    assert not TD3RunConfig(world_model="x", rewards=("task=1", "uncertainty=0")).pays_for_more
    assert parse_config(TD3RunConfig, [*options, "--value-range", "None"]).pays_for_more


def test_a_model_of_other_environments_and_a_run_without_one(model_folder, tmp_path):
    other = tmp_path / "model"
    watching_model(chunk_len=2).save_pretrained(other)
    with pytest.raises(ConfigError, match="expects actions of shape \\(2, 7\\), got \\(4, 7\\)"):
        learn(tmp_path / "run", other)
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    with pytest.raises(WeightsError, match="a run without model/"):
        load_world_model(tmp_path / "run")
    shutil.copytree(model_folder, tmp_path / "run" / "model")
    assert load_world_model(tmp_path / "run").state_size == 8


def test_a_world_model_that_nothing_would_use_as_it_was_trained_is_refused():
    with pytest.raises(ConfigError, match="With a stride the world model's memory"):
        TD3RunConfig(world_model="x", stride=4)
    with pytest.raises(ConfigError, match="policy tokens does not see a world model's memory"):
        PPOConfig(world_model="x")
    PPOConfig(world_model="x", policy="rl-token")


def test_what_a_policy_is_depends_on_its_world_models_weights(tmp_path):
    sizes = ActorSizes(192, 4, [8], 1.0, 2, 8, [1.0] * 7, world_memory_size=8)
    RLTokenActor(sizes).save(tmp_path)
    settings = {"world_model": str(tmp_path / "model"), "rl_token": "mean"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = []
    for seed in (0, 1, 0):
        watching_model(seed, feature_size=192).save_pretrained(tmp_path / "model")
        found.append(load_trained(tmp_path).identity)
    assert found[0] == found[2] != found[1]


def test_each_process_has_its_world_model_on_its_own_device(monkeypatch):
    class Loaded(Exception):
        pass

    def load(spec, device, vlas):
        raise Loaded(device)

    monkeypatch.setattr(networks, "load_world_model", load)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    config = PPOConfig(world_model="x", policy="rl-token", device="cuda")
    with pytest.raises(Loaded, match="^cuda:1$"):
        networks.make_networks(config, tiny_vla())


def test_who_plays_observes_what_the_world_model_sees():
    policy = ActorPolicy(None, OneView(), None, 4, world_model=seeing_model())
    assert policy.cameras == ("agentview", "wrist")
    with closing(policy.wrap_envs(toy_envs(1, autoreset_mode="DISABLED"))) as envs:
        episodes = list(rollout(envs, policy, sampled_starts("goal", (0,), 1, 7)))
    assert len(episodes) == 1
