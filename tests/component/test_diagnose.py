from __future__ import annotations

from pathlib import Path

import pytest

from sparkserve import diagnose
from sparkserve.cluster import Node
from sparkserve.hosts import LocalHost
from sparkserve.settings import Settings


def test_a_node_whose_docker_engine_is_down_still_tells_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(diagnose, "kernel_lines", lambda _node: ["kernel: Out of memory: Killed process 7", "usb"])
    node = Node("head", LocalHost("head"), Settings())
    try:
        found = diagnose._facts(node)
    finally:
        node.close()
    assert "Docker" in found["ours"]["could not look"]
    assert found["system"]["memory"]["MemTotal"] > 0
    assert "interfaces" in found["link"]
    assert "gpu" in found["around"]
    assert found["kernel lines"] == "kernel: Out of memory: Killed process 7\n"
