"""From a specification to a backend: names, folders, entry points, classes."""

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import page_code
import pytest
import torch
from installed_packages import install, write_metadata
from mini_vla import random_inputs
from run_python import run_python
from safetensors.torch import load_file

from vla_gym.errors import ConfigError, RLTokenWarning, WeightsError
from vla_gym.remote.remote_vla import RemoteVLA, vla_facts
from vla_gym.rl_token import choose_rl_token, load_rl_token
from vla_gym.vla import FrozenVLA, load
from vla_gym.vla.files import (
    WEIGHTS_ROOT,
    find_base_model,
    last_written,
    resolve_weights,
    verify_checksums,
    write_checkpoint,
)
from vla_gym.vla.openvla.oft import OFTOptions
from vla_gym.vla.registry import BACKENDS, parse_spec, recognise
from vla_gym.vla.spec_options import make_options, split_options, with_option


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "steady"
    folder.mkdir()
    config = {"model_type": "constant", "action": [0.5, 0, 0, 0, 0, 0, -1]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def example_package(tmp_path, monkeypatch):
    """The example package as installed: importable, and with its entry point's metadata."""
    site = tmp_path / "site"
    install(site, page_code.files("extending"))
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("constant_vla", None)


def test_entry_point_by_name_and_by_model_type(example_package, checkpoint):
    vla = load(f"constant:{checkpoint}", scale=0.5)
    assert isinstance(vla, FrozenVLA) and vla.name == "steady"
    assert vla.infer(*random_inputs(2)).actions[0, 0].tolist() == [0.25, 0, 0, 0, 0, 0, -0.5]
    assert load(f"constant:{checkpoint}", scale=0.5) is vla
    assert load(f"constant:{checkpoint}") is not vla
    assert load(checkpoint) is load(f"constant:{checkpoint}")
    with pytest.raises(ConfigError, match=r"(?s)colour.*scale"):
        load(checkpoint, colour="red")


def test_a_folder_of_a_shipped_name_gets_no_shipped_rl_token(tmp_path):
    """Whatever it holds: the shipped network itself, or that of another backend."""
    assert choose_rl_token("auto", load("mini")) is not None
    folder = shutil.copytree(WEIGHTS_ROOT / "mini", tmp_path / "mini")
    for vla in (load(str(folder)), SimpleNamespace(name="mini")):
        with pytest.warns(RLTokenWarning, match="No RL token belongs to the VLA 'mini'"):
            assert choose_rl_token("auto", vla) is None


def test_a_vla_that_is_elsewhere_has_its_shipped_rl_token():
    vla = RemoteVLA(vla_facts(load("mini")), ask=None)
    assert choose_rl_token("auto", vla) is choose_rl_token("auto", load("mini"))


def test_environment_takes_a_third_party_backend(example_package, checkpoint):
    import gymnasium as gym

    with pytest.warns(RLTokenWarning, match="No RL token belongs to the VLA 'steady'"):
        env = gym.make("vla_gym:LiberoVLA-goal-v0", vla=f"constant:{checkpoint}")
    try:
        obs, _ = env.reset(seed=0)
        assert obs["vla_action"].shape == (4, 7) and obs["rl_token"].shape == (16,)
        assert obs["rl_token"].min() > 0  # it saw a picture
        env.step(obs["vla_action"])
    finally:
        env.close()


def test_two_packages_with_one_name_are_refused(example_package, checkpoint):
    write_metadata(example_package, "other", {"vla_gym.vla": {"constant": "other:Other"}})
    with pytest.raises(ConfigError, match="Several installed packages"):
        load(f"constant:{checkpoint}")


def test_a_class_that_derives_from_nothing_gets_the_defaults(tmp_path, monkeypatch):
    loads = "    from_pretrained = classmethod(lambda cls, folder, device, dtype, compile: cls())\n"
    sizes = "    name, horizon, num_hidden_tokens, hidden_size, image_size = 'plain', 8, 2, 4, 32\n"
    looks = "    infer = None\n"
    kinds = {"PlainVLA": sizes + looks, "Sizeless": looks}
    parts = [f"class {k}:\n    head = 'token'\n{loads}{own}" for k, own in kinds.items()]
    (tmp_path / "plain_vla.py").write_text("".join(parts))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="Sizeless' lacks name, horizon, .* of vla_gym.vla"):
        load(f"class:plain_vla:Sizeless:{tmp_path}")
    vla = load(f"class:plain_vla:PlainVLA:{tmp_path}")
    assert (vla.head, vla.heads, vla.input_size) == ("token", ("l1",), None)
    assert (vla.cameras, vla.action_size, vla.proprio_size) == (("agentview", "wrist"), 7, 8)


def test_class_by_path_only_from_code(example_package, checkpoint):
    spec = f"class:constant_vla:ConstantVLA:{checkpoint}"
    assert load(spec).horizon == 4
    with pytest.raises(ConfigError, match="comes from a file"):
        load(spec, allow_class=False)
    # A path is never taken for a class, nor is what a checkpoint's own file says.
    with pytest.raises(WeightsError):
        load(Path(spec))
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": f"class:constant_vla:ConstantVLA:{checkpoint}"})
    )
    with pytest.raises(WeightsError, match="which no backend claims"):
        load(checkpoint)


def test_class_in_a_run_or_preset_is_refused(tmp_path, checkpoint, monkeypatch):
    pytest.importorskip("stable_baselines3")
    from vla_gym_trainers.evaluation import trained
    from vla_gym_trainers.rl_token.train import RLTokenConfig
    from vla_gym_trainers.runs.settings import load_preset

    spec = f"class:os:system:{checkpoint}"
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"vla: {spec}\n")
    with pytest.raises(ConfigError, match="names a class"):
        load_preset(RLTokenConfig, str(preset))
    monkeypatch.setattr(trained, "load_policy", lambda path, **_: str(path))
    (tmp_path / "config.json").write_text(json.dumps({"vla": spec}))
    with pytest.raises(ConfigError, match="comes from a file"):
        trained.load_trained(tmp_path)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("nonsense:/tmp", "No VLA backend is called 'nonsense'"),
        ("openvla-oft", "write 'openvla-oft:/path"),
        ("class:onlyone:/tmp", "package.module:Class"),
        ("class:no_such_module_x:Class:/tmp", "Cannot import.*into PYTHONPATH"),
        ("class:.backend:Mine:/tmp", "Cannot import"),
        ("mini?compile=fasle", "option compile: expected `bool | null`, got 'fasle'"),
        ("class:json:dumps:/tmp", "no classmethod from_pretrained"),
        ("~nobody-is-called-so/x", "No checkpoint '~nobody"),
        ("n" * 300, "No checkpoint 'nnn"),
        ("openvla:~nobody-is-called-so/x", "No checkpoint '~nobody"),
        ("openvla:" + "n" * 300, "No checkpoint 'nnn"),
        ("mini?head=l1&x=" + "n" * 300, "does not take these options"),
        ("mini?", "options as name=value, got ''"),
        ("mini?head", "options as name=value, got 'head'"),
        ("mini?device=cuda", "--device"),
        ("mini?head=l1&head=token", "'head' is given twice"),
    ],
)
def test_wrong_specifications(spec, problem):
    with pytest.raises((ConfigError, WeightsError), match=problem):
        load(spec)


def test_options_in_the_specification(example_package, checkpoint):
    spec = f"constant:{checkpoint}"
    half = load(f"{spec}?scale=0.5")
    assert half.infer(*random_inputs(2)).actions[0, 0, 0] == 0.25
    assert load(spec, scale=0.5) is half
    assert load(f"{spec}?scale=0.5", scale=1.0) is load(spec, scale=1.0)  # the argument wins
    assert load(f"{spec}?dtype=bfloat16") is load(spec, dtype="bfloat16")
    assert load(f"class:constant_vla:ConstantVLA:{checkpoint}?scale=2").action[0] == 1.0
    with pytest.raises(ConfigError, match="comes from a file"):
        load(f"class:constant_vla:ConstantVLA:{checkpoint}?scale=2", allow_class=False)
    with pytest.raises(ConfigError, match="does not take these options.*colour"):
        load(f"{spec}?colour=red")
    # A folder may have such a name.
    odd = checkpoint.rename(checkpoint.with_name("steady?scale=0.5"))
    assert parse_spec(f"constant:{odd}") == ("constant", odd, ())
    assert parse_spec(str(odd) + "?scale=3") == ("constant", odd, (("scale", 3),))


def test_options_are_yaml_scalars(checkpoint):
    spec = f"openvla-oft:{checkpoint}?append_stop=false&num_views=1&unnorm_key=a:b&vlm=/x=y&jpeg="
    assert dict(parse_spec(spec).options) == {
        "append_stop": False,
        "num_views": 1,
        "unnorm_key": "a:b",
        "vlm": "/x=y",
        "jpeg": None,
    }
    assert dict(parse_spec("mini?a=[1, 2]&b={x: 1}&c='").options) == {
        "a": "[1, 2]",
        "b": "{x: 1}",
        "c": "'",
    }
    options = dict(parse_spec("mini?a=my run #2&b=#2&c='x #y'&d=&e=null").options)
    assert options == {"a": "my run #2", "b": "#2", "c": "x #y", "d": None, "e": None}
    assert dict(parse_spec("mini?a=2024_01&b=007&c=40").options) == {
        "a": "2024_01",
        "b": "007",
        "c": 40,
    }


@pytest.mark.parametrize("value", [{"jpeg": None}, {"horizon": 0}, {"pad_prompt_to": 5000}])
def test_options_of_another_type_or_out_of_bounds_are_refused(value):
    with pytest.raises(ConfigError, match=f"option {next(iter(value))} .* expected"):
        make_options(OFTOptions, value)


def test_options_that_are_paths_stay_text():
    assert make_options(OFTOptions, {"tokenizer": 5, "pad_prompt_to": None}).tokenizer == "5"
    with pytest.raises(WeightsError, match="No adapters in /.*/5"):
        load("mini?adapters=5")


def test_weights_are_replaced_and_checksums_name_files_beside_them(tmp_path):
    (tmp_path / "other").write_text("")
    write_checkpoint(tmp_path, {}, {"x": torch.zeros(2)})
    file = tmp_path / "model.safetensors"
    with file.open("rb") as old:
        write_checkpoint(tmp_path, {}, {"x": torch.ones(2)})
        assert old.read() != file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o644
    assert len(list(tmp_path.iterdir())) == 4
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"\n{sums.read_text()}\n")
    verify_checksums(tmp_path)
    for name in ("/proc/kmsg", "../x"):
        sums.write_text(f"0  {name}\n")
        with pytest.raises(WeightsError, match="names of files beside it"):
            verify_checksums(tmp_path)


@pytest.mark.parametrize("moment", range(5))
def test_a_kill_while_weights_are_replaced_leaves_a_checkpoint(tmp_path, monkeypatch, moment):
    write_checkpoint(tmp_path, {}, {"x": torch.zeros(2)})
    calls = []

    def killed(do):
        def call(path, *args, **kwargs):
            calls.append(path)
            if len(calls) > moment and path.exists():
                raise KeyboardInterrupt
            return do(path, *args, **kwargs)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, killed(getattr(Path, name)))
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, {}, {"x": torch.ones(2)})
    verify_checksums(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["x"].tolist() in ([0, 0], [1, 1])


def test_a_suffix_is_for_names_not_for_paths(tmp_path):
    for name in ("mine", "mine-rl-token"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert resolve_weights(tmp_path / "mine", "-rl-token") == (tmp_path / "mine").resolve()


@pytest.mark.parametrize("name", [None, "./a/vlm", "owner/name"])
def test_the_advice_names_a_folder_that_is_looked_at(tmp_path, name):
    with pytest.raises(WeightsError) as caught:
        find_base_model(tmp_path, name, ["x"], option="vlm", given=None, folders=[tmp_path / "v"])
    command = f'hf download owner/name --include "*.json" --local-dir {tmp_path / "v"}'
    assert (command in str(caught.value)) is ("hf" in str(caught.value)) is (name == "owner/name")
    assert "give vlm=" in str(caught.value) and "None" not in str(caught.value)


def test_an_option_is_set_or_replaced():
    assert with_option("mini", "head", "token") == "mini?head=token"
    spec = with_option("oft:/p?head=l1&jpeg=false&a=null&b=2", "head", "token")
    assert spec == "oft:/p?head=token&jpeg=false&a=null&b=2"
    assert split_options(spec)[1] == {"head": "token", "jpeg": False, "a": None, "b": 2}
    spec = with_option("oft:/p?a='true'&vlm='1.10'", "b", 1)  # texts stay texts
    assert split_options(spec)[1] == {"a": "true", "vlm": "1.10", "b": 1}


def test_what_is_written_again_is_another_file_or_folder(tmp_path):
    inner = tmp_path / "run" / "checkpoints" / "steps.pt"
    inner.parent.mkdir(parents=True)
    inner.write_text("first")
    seen = [last_written(path) for path in (inner, tmp_path / "run")]
    inner.write_text("second")
    assert last_written(inner) != seen[0] and last_written(tmp_path / "run") != seen[1]
    assert last_written(tmp_path / "nothing") == ()


def test_results_name_the_options(example_package, checkpoint):
    from vla_gym.rollout.vla_policy import vla_identity

    plain = vla_identity(f"constant:{checkpoint}")
    assert plain.keys() == {"name", "sha256"}
    assert vla_identity(f"constant:{checkpoint}?scale=2") == {**plain, "options": {"scale": 2}}


def test_an_identity_is_of_all_that_a_policy_is_computed_from(tmp_path):
    """Weights in a folder of their own, as starVLA's; and what lies beside a single file."""
    from vla_gym.rollout.vla_policy import vla_identity

    run = [tmp_path / "run" / name for name in ("config.yaml", "checkpoints/a.safetensors")]
    alone = [tmp_path / "file" / name for name in ("statistics.json", "a.safetensors")]
    for file in (*run, *alone):
        file.parent.mkdir(exist_ok=True, parents=True)
    for spec, files in ((run[0].parent, run), (run[1], run), (alone[1], alone)):
        for file in files:
            file.write_bytes(b"1")
        seen = [vla_identity(f"qwen-oft:{spec}")["sha256"]]
        for file in files:
            file.write_bytes(b"2")
            seen.append(vla_identity(f"qwen-oft:{spec}")["sha256"])
        assert len(set(seen)) == 3
        for name in ("README.md", "card.json", "optimizer.pt"):
            (files[0].parent / name).write_text("of no matter")
        assert vla_identity(f"qwen-oft:{spec}")["sha256"] == seen[-1]


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", ""])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ConfigError, match="is not there .* such as 'cpu'"):
        load("mini", device=device)


def test_missing_checkpoint_is_named():
    with pytest.raises(WeightsError, match="/no/such/folder"):
        load("openvla-oft:/no/such/folder")
    with pytest.raises(WeightsError, match="shipped names: .*mini"):
        load("no-such-vla")


def test_a_training_run_is_no_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    for folder in (tmp_path, tmp_path / "best", tmp_path / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="a training run: .* there are: best, model"):
        load(str(tmp_path))
    with pytest.raises(WeightsError, match="a training run: .* there are: best, model"):
        load_rl_token(tmp_path)


def test_mini_by_name_and_by_path(tmp_path, monkeypatch):
    mini = load("mini")
    folder = parse_spec("mini").path
    assert load(folder) is load(f"mini:{folder}") is mini
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match="No checkpoint 'mini'"):
        load(Path("mini"))
    shutil.copytree(folder, "mini")
    assert parse_spec(Path("mini")).path == tmp_path.resolve() / "mini"
    assert parse_spec("mini").path == folder
    assert load("mini", head="token").head == "token"
    with pytest.raises(ConfigError, match="float32"):
        load("mini", dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype"):
        load("mini", dtype="int8")


def test_options_that_cannot_be_hashed_are_not_cached(example_package, checkpoint):
    class Unhashable(float):
        __hash__ = None

    first, second = (load(f"constant:{checkpoint}", scale=Unhashable(0.5)) for _ in range(2))
    assert first is not second and torch.equal(first.action, second.action)


def test_openvla_folders(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    with pytest.raises(WeightsError, match="openvla-oft:"):
        recognise(tmp_path)
    (tmp_path / "action_head--50000_checkpoint.pt").touch()
    assert recognise(tmp_path) == "openvla-oft"


def test_own_backends_have_no_entry_points():
    """They are found without the package's metadata, e.g. from a bare checkout."""
    own = {point.name for point in metadata.entry_points(group="vla_gym.vla")}
    assert not own & set(BACKENDS)


def test_subpackages_without_importing_them_and_without_torch():
    code = (
        "import sys, vla_gym\n"
        "assert vla_gym.vla and not {'torch', 'transformers'} & set(sys.modules)\n"
        "assert vla_gym.vla.load and vla_gym.vector.LiberoVectorEnv\n"
        "assert vla_gym.wrappers and not hasattr(vla_gym, 'nothing')"
    )
    run_python(code)
