"""What every refused command has to keep: one JSON object, whole errors, no traceback, nothing changed."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx

from tests.lab.node import LabNode
from tests.lab.pair import HOME, TOKEN, Pair

LOCK = f"{HOME}/sparkserve.lock.json"
MODELS = f"{HOME}/sparkserve/models"
# Everything of ours that a command could change.
PLACES = ("home/spark/sparkserve", "home/spark/recipes", "var/lib/sparkserve", "etc/sysctl.d")
# And what a command that is only refused may write: who held the lock.
EVERYWHERE = ("home/spark", "var/lib/sparkserve", "etc/sysctl.d", "etc/sudoers.d", "etc/systemd")


def look(pair: Pair, places: tuple[str, ...] = PLACES) -> list[Any]:
    """See both nodes' files of ours with size and time, their containers and their images."""
    return [
        (_files(node, places), _docker(node, "/containers/json?all=1"), _docker(node, "/images/json"))
        for node in pair.lab.nodes
    ]


def connections(pair: Pair) -> int:
    """Count the logins at the worker so far."""
    return (pair.worker.files / "log/sshd.log").read_text().count("Accepted publickey")


def _files(node: LabNode, places: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    paths = [path for place in places for path in (node.root / place).rglob("*")]
    paths += (node.root / "home/spark").glob("sparkserve.lock.json")
    states = {str(path.relative_to(node.root)): path.lstat() for path in paths}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}


def _docker(node: LabNode, page: str) -> list[tuple[str, str]]:
    path = f"{node.root}/run/docker.sock"
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path):
            return []
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        found = client.get(f"http://docker{page}").json()
    # By their ids: the engine sorts by whole seconds, and gives those of one second in any order.
    return sorted((item["Id"], item.get("State", "")) for item in found)


def refused(pair: Pair, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command that must fail: one JSON object, no traceback, every error complete, nothing changed."""
    before = look(pair)
    answer = pair.sparkserve(*words, "--json")
    found = json.loads(answer.stdout)
    assert found["exit_code"] == answer.returncode != 0
    assert (found["schema"], found["command"], found["status"]) == (1, words[0], "failed")
    assert found["errors"]
    for error in found["errors"]:
        assert error["code"] not in ("", "bug")
        assert error["message"]
        assert error["hint"], error
    for stream in (answer.stdout, answer.stderr):
        assert b"Traceback" not in stream, stream.decode()
        assert TOKEN.encode() not in stream
    assert look(pair) == before
    return answer.returncode, found["errors"]


def codes(errors: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(error["code"], error["node"]) for error in errors]
