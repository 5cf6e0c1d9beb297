"""LeRobot: its evaluation plays our environments, its datasets hold our demonstrations."""

import os
from pathlib import Path

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
pytest.importorskip("lerobot", reason="lerobot is not installed")

from vla_gym.cli.bench.peers import define_torchvision_operators  # noqa: E402

try:
    import torchvision  # noqa: F401
except RuntimeError:
    define_torchvision_operators()

import torch  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402
from lerobot.envs.factory import make_env, make_env_pre_post_processors  # noqa: E402
from lerobot.envs.utils import close_envs  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402
from lerobot.processor import PolicyProcessorPipeline  # noqa: E402
from lerobot.processor.converters import (  # noqa: E402
    policy_action_to_transition,
    transition_to_policy_action,
)
from lerobot.scripts.lerobot_eval import eval_policy_all, rollout  # noqa: E402

from vla_gym.cli import main as cli  # noqa: E402
from vla_gym.demos.files import demo_path, read_episodes, read_meta, read_success_steps  # noqa: E402
from vla_gym.envs.libero import LiberoEnv  # noqa: E402
from vla_gym.errors import ConfigError  # noqa: E402
from vla_gym.integrations.lerobot.envs import VlaGymLibero  # noqa: E402
from vla_gym.integrations.lerobot.envs import make_env as make_own  # noqa: E402
from vla_gym.suites import get_task  # noqa: E402

HUB = "vla-gym/libero"
SIZE = 64
ENV_PY = Path(__file__).parents[2] / "examples" / "lerobot_envhub" / "env.py"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of LeRobot's hub that holds our repository, as after a download."""
    cache, commit = tmp_path_factory.mktemp("hub"), "0" * 40
    repository = cache / "models--vla-gym--libero"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "env.py").write_text(ENV_PY.read_text())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return cache


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two demonstrations of goal 8, and the same as a LeRobotDataset."""
    folder = tmp_path_factory.mktemp("demos")
    arguments = ["--output", str(folder / "hdf5"), "--task-ids", "8", "--num-demos", "2"]
    arguments += ["--noise", "0", "--image-size", str(SIZE), "--assets", "lite"]
    arguments += ["--num-workers", "0", "--lerobot", str(folder / "lerobot")]
    assert cli.main(["demos", *arguments]) == 0
    path = demo_path(folder / "hdf5", get_task("goal", 8))
    assert read_meta(path)["attempts"] == 2
    return path, folder / "lerobot"


def config(**changes):
    return VlaGymLibero(
        **{
            "hub_path": HUB,
            "task": "libero_goal",
            "task_ids": [8],
            "observation_height": SIZE,
            "observation_width": SIZE,
            "assets": "lite",
            "workers": 1,
            **changes,
        }
    )


def act_config():
    image = PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))
    return ACTConfig(
        input_features={
            "observation.images.image": image,
            "observation.images.image2": image,
            "observation.state": PolicyFeature(FeatureType.STATE, (8,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        device="cpu",
        chunk_size=4,
        n_action_steps=2,
        dim_model=16,
        n_heads=2,
        dim_feedforward=16,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=4,
        pretrained_backbone_weights=None,
    )


class Replay(torch.nn.Module):
    """Plays given actions, then no-ops."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.seen = rows, []

    def reset(self):
        self.step = 0

    def select_action(self, batch):
        self.seen.append(batch)
        actions = np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (len(self.rows), 1))
        for i, own in enumerate(self.rows):
            if self.step < len(own):
                actions[i] = own[self.step]
        self.step += 1
        return torch.from_numpy(actions)


@pytest.mark.timeout(1200, func_only=True)
@pytest.mark.parametrize("use_async_envs", [False, True])
def test_rollout_ends_right_at_success_and_at_the_limit(hub, recorded, use_async_envs):
    """One environment replays a demonstration, the other one does nothing."""
    path, _ = recorded
    (success,) = read_success_steps(path)[:1]
    actions = next(read_episodes(path))[2]
    limit = success + 4
    cfg = config(init_states=False, episode_length=limit)
    envs = make_env(cfg, 2, use_async_envs, hub_cache_dir=str(hub), trust_remote_code=True)
    env = envs["libero_goal"][8]
    policy = Replay([actions[: success + 1], actions[:0]])
    before_policy = PolicyProcessorPipeline(steps=[])
    after_policy = PolicyProcessorPipeline(
        steps=[],
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    before, after = make_env_pre_post_processors(cfg, act_config())
    try:
        data = rollout(env, policy, before, after, before_policy, after_policy, seeds=[0, 1])
    finally:
        close_envs(envs)
    steps = data["done"].shape[1]
    assert steps == limit
    assert torch.argmax(data["done"].int(), dim=1).tolist() == [success, limit - 1]
    assert data["success"].nonzero().tolist() == [[0, success]]
    assert data["reward"].nonzero().tolist() == [[0, success]]
    # What the policy saw first, from the same layouts.
    own = LiberoEnv("goal", task_ids=8, assets="lite", image_size=SIZE)
    for row, seed in enumerate((0, 1)):
        obs, info = own.reset(seed=seed)
        seen = policy.seen[0]
        state = seen["observation.state"][row].numpy()
        np.testing.assert_allclose(state, obs["proprio"], atol=1e-5)
        for name, camera in (("image", "agentview"), ("image2", "wrist")):
            image = seen[f"observation.images.{name}"][row].permute(1, 2, 0).numpy() * 255
            np.testing.assert_array_equal(image.round(), obs[camera][:, ::-1])
        assert seen["task"][row] == info["instruction"]
    own.close()


@pytest.mark.timeout(1200, func_only=True)
def test_evaluation_of_a_policy_of_lerobots_plays_official_states_task_by_task(hub):
    torch.manual_seed(0)
    cfg = config(task_ids=[8, 9], episode_length=3)
    envs = make_env(cfg, 2, True, hub_cache_dir=str(hub), trust_remote_code=True)
    act = act_config()
    infos = envs["libero_goal"][9].reset(seed=[1000, 1001])[1]
    assert infos["init_state_id"].tolist() == [0, 1] and infos["task_id"].tolist() == [9, 9]
    stats = {
        name: {"mean": torch.zeros(1), "std": torch.ones(1)}
        for name in (*act.input_features, *act.output_features)
    }
    processors = make_env_pre_post_processors(cfg, act)
    processors += make_pre_post_processors(act, dataset_stats=stats)
    try:
        found = eval_policy_all(envs, ACTPolicy(act), *processors, n_episodes=4, start_seed=1000)
        # LeRobot 0.6 closes each task's environments after it.
        first, last = envs["libero_goal"][8], envs["libero_goal"][9]
        assert first.get_attr("task_description") == first.call("task_description")
        first.close()
        assert not last.env.closed and len(last.reset(seed=[0, 1])[0]["robot_state"]) == 3
        last.close()
        assert last.env.closed
    finally:
        close_envs(envs)
    assert found["overall"]["n_episodes"] == 8 and found["overall"]["pc_success"] == 0.0
    assert [(t["task_group"], t["task_id"]) for t in found["per_task"]] == [
        ("libero_goal", 8),
        ("libero_goal", 9),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation_width": 32}, "must be equal, got 64 and 32"),
        ({"control_mode": "absolute"}, "control_mode must be 'relative', got 'absolute'"),
        ({"camera_name": "frontview_image"}, "camera_name must be some of agentview_image"),
        ({"task_ids": None, "max_parallel_tasks": 2}, "max_parallel_tasks=1, got 2"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_own(1, True, config(**changes))


def test_wrong_numbers_and_a_missing_hub_path_are_refused():
    with pytest.raises(ConfigError, match="n_envs must be at least 1, got 0"):
        make_own(0)
    with pytest.raises(ConfigError, match="hub_path"):
        config(hub_path=None)


@pytest.mark.timeout(1200, func_only=True)
def test_a_dataset_holds_the_demonstrations(recorded):
    path, folder = recorded
    dataset = LeRobotDataset("vla_gym/libero", root=folder)
    episodes = list(read_episodes(path))
    lengths = [len(actions) for _, _, actions in episodes]
    assert dataset.fps == 20 and dataset.num_episodes == 2 and len(dataset) == sum(lengths)
    assert dataset.meta.episodes["length"] == lengths
    successes, index = read_success_steps(path), 0
    for number, (images, proprio, actions) in enumerate(episodes):
        for t in range(lengths[number]):
            frame = dataset[index]
            index += 1
            assert frame["episode_index"] == number and frame["frame_index"] == t
            assert frame["timestamp"] == pytest.approx(t / 20, abs=1e-4)
            np.testing.assert_array_equal(frame["observation.state"], proprio[t])
            np.testing.assert_array_equal(frame["action"], actions[t])
            assert bool(frame["next.success"]) is (t >= successes[number])
            assert bool(frame["next.done"]) is (t == lengths[number] - 1)
            assert frame["task"] == "put the bowl on the plate"
            for view, name in enumerate(("image", "image2")):
                seen = frame[f"observation.images.{name}"].permute(1, 2, 0).numpy() * 255
                np.testing.assert_array_equal(seen.round(), images[t, view][:, ::-1])


@pytest.mark.timeout(1200, func_only=True)
def test_a_policy_of_lerobots_can_be_trained_on_the_dataset(recorded):
    torch.manual_seed(0)
    _, folder = recorded
    act = act_config()
    ahead = {"action": [i / 20 for i in act.action_delta_indices]}
    dataset = LeRobotDataset("vla_gym/libero", root=folder, delta_timestamps=ahead)
    policy = ACTPolicy(act)
    prepare, _ = make_pre_post_processors(act, dataset_stats=dataset.meta.stats)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    losses = []
    for _, batch in zip(range(2), torch.utils.data.DataLoader(dataset, 4), strict=False):
        loss, _ = policy(prepare(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_a_dataset_that_exists_is_not_touched(recorded, tmp_path, capsys):
    _, folder = recorded
    arguments = ["--output", str(tmp_path), "--assets", "lite", "--lerobot", str(folder)]
    assert cli.main(["demos", *arguments]) == 2
    assert "must be the name of a new folder" in capsys.readouterr().err
