"""Downloads of LIBERO's assets, from a local server that stands in for the hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from libero_hub import COMMIT, REPO, Hub

from vla_gym.assets import cache_dir, hub, resolve_asset_pack
from vla_gym.assets.install import RECEIPT, libero_folder, verify_pack
from vla_gym.assets.manifest import libero_files, optional_files
from vla_gym.errors import AssetError

BIG = "stable_hope_objects/cream_cheese/texture_map.png"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "cache"))
    for name in ("VLA_GYM_LIBERO_ASSETS", "VLA_GYM_ASSETS_REPO", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def server():
    files = {name: f"<{name}/>".encode() for name in libero_files()}
    files[BIG] = os.urandom(300_000)
    files[optional_files()[0]] = b"a floor"
    files["stable_hope_objects/popcorn/popcorn.xml"] = b"no task loads it"
    hub = Hub(files)
    yield hub
    hub.stop()


def get(server: Hub, repo: str = REPO) -> Path:
    return hub.download(repo, endpoint=server.endpoint)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_success(server, own_cache):
    root = get(server)
    assert root == own_cache / "libero-assets" == libero_folder()
    expected = {*libero_files(), optional_files()[0]}
    present = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert present == expected | {RECEIPT}
    assert all((root / name).read_bytes() == server.files[name] for name in expected)
    assert sorted(server.gets) == sorted(expected), "files that no task loads were fetched"
    receipt = json.loads((root / RECEIPT).read_text())
    assert receipt["source"] == f"{server.endpoint}/datasets/{REPO}@{COMMIT}"
    assert resolve_asset_pack("libero").root == resolve_asset_pack("auto").root == root
    problems, remarks = verify_pack(root)
    assert problems == []
    assert "MJCF files are not LIBERO's own" in remarks[0]  # they are not, here
    assert [p.name for p in own_cache.iterdir()] == ["libero-assets"]
    (root / BIG).write_bytes(server.files[BIG][::-1])
    assert verify_pack(root)[0] == [f"1 files have changed: {BIG}"]


def test_cut_for_good_is_no_pack_and_the_next_attempt_fetches_the_rest(server, own_cache):
    server.cuts[BIG] = (0, 1000)
    with pytest.raises(AssetError, match=r"failed: .*is kept.*run the command"):
        get(server)
    assert not libero_folder().exists()
    assert resolve_asset_pack("lite").name == "lite"
    with pytest.raises(AssetError, match="vla-gym assets download"):
        resolve_asset_pack("libero")
    done = {
        name for name in libero_files() if (own_cache / "libero-assets.partial" / name).is_file()
    }
    assert done and BIG not in done
    server.cuts.clear()
    server.gets.clear()
    get(server)
    assert BIG in server.gets
    assert not done & set(server.gets), "files that were there were fetched again"


def test_wrong_repository(server):
    with pytest.raises(AssetError, match=r"nobody/nothing@main.*failed: "):
        get(server, "nobody/nothing")
    with pytest.raises(AssetError, match="expected 'owner/name'"):
        get(server, "nonsense")
    del server.files[BIG]
    with pytest.raises(AssetError, match=rf"lacks 1 of the \d+ files.*{BIG}"):
        get(server)


def test_which_repository(monkeypatch):
    assert hub.hub_repo() == tuple(hub.HUB_REPO.split("@"))
    monkeypatch.setenv("VLA_GYM_ASSETS_REPO", "mine/assets@v1")
    assert hub.hub_repo() == ("mine/assets", "v1")
    assert hub.hub_repo("yours/assets") == ("yours/assets", "main")


def test_no_network(own_cache):
    with pytest.raises(AssetError, match=r"failed: .*HF_ENDPOINT.*--from-dir"):
        hub.download(f"{REPO}@{COMMIT}", endpoint=f"http://127.0.0.1:{closed_port()}")
    assert not libero_folder().exists()


def run_cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLA_GYM_CACHE": str(cache_dir())}
    return subprocess.run(
        [sys.executable, "-m", "vla_gym.cli.main", "assets", *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_with_a_mirror(server):
    mirror = {"HF_ENDPOINT": server.endpoint, "VLA_GYM_ASSETS_REPO": REPO}
    run = run_cli("download", **mirror)
    assert run.returncode == 0, run.stderr
    assert str(libero_folder()) in run.stdout
    assert "Traceback" not in run.stderr
    path = run_cli("path")
    assert path.stdout.strip() == str(libero_folder())
    calls = server.calls.total()
    again = run_cli("download", **mirror)
    assert "already complete" in again.stdout
    assert server.calls.total() == calls, "a complete pack asked the network"


def test_command_without_network_is_one_line():
    dead = f"http://127.0.0.1:{closed_port()}"
    run = run_cli("download", HF_ENDPOINT=dead)
    assert run.returncode == 2
    what, error = run.stderr.splitlines()
    assert what.startswith("From the hub dataset lerobot/libero-assets")
    assert error.startswith("error: ") and "Check the" in error and "--from-dir" in error
    offline = run_cli("download", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert "HF_HUB_OFFLINE" in offline.stderr
