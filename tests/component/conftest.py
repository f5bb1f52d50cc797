"""The hub and the pair that the weights tests share; a module says with its own `repo` what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.weights_stage import Pair, pair, serving
from tests.lab.hub import Hub
from tests.lab.repo_store import ModelRepo


@pytest.fixture
def hub(repo: ModelRepo) -> Iterator[Hub]:
    with serving(repo.root) as running:
        yield running


@pytest.fixture
def stage(repo: ModelRepo, hub: Hub, tmp_path: Path) -> Iterator[Pair]:
    with pair(repo, hub.endpoint, tmp_path / "nodes") as found:
        yield found
