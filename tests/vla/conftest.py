"""OpenVLA's tiny checkpoints, as folders and as policies."""

import pytest
from openvla_checkpoints import CASES, make_checkpoints

from vla_gym.vla import load
from vla_gym.vla.openvla.autoregressive import OpenVLABackend


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders by case."""
    return make_checkpoints(tmp_path_factory.mktemp("openvla"))


@pytest.fixture(scope="session")
def policies(checkpoints):
    """OpenVLA-OFT backends by case."""
    return {case: load(f"openvla-oft:{folder}") for case, folder in checkpoints.items()}


@pytest.fixture(scope="session", params=CASES)
def oft(request, policies):
    """A case's name and its backend."""
    return request.param, policies[request.param]


@pytest.fixture(scope="session")
def base(checkpoints):
    """OpenVLA, token after token."""
    return OpenVLABackend.from_pretrained(checkpoints["tokens_1img"])
