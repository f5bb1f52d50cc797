"""Fixtures of the lab's own tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hub import Hub
from tests.lab.model_repo import make_all
from tests.lab_tests.hub_client import running_hub


@pytest.fixture(scope="session")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default set of repositories; read only."""
    root = tmp_path_factory.mktemp("repos")
    make_all(root)
    return root


@pytest.fixture
def hub(repos: Path) -> Iterator[Hub]:
    """A hub that is open to everybody."""
    with running_hub(repos) as running:
        yield running
