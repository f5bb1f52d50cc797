"""What `sparkserve link` shows of a cable, and how it ends."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkserve import cli
from sparkserve.checks import Check
from sparkserve.link import Interface, LinkFacts, find_management, propose
from sparkserve.link_proof import prove
from sparkserve.operations import Cable
from tests.fakes import FakeSession
from tests.unit.deployments import make_pair
from tests.unit.test_link_picture import NAMES, odd, seen

OK = Check("link_tcp", "head", "ok", "the worker answers on 40001", "TCP to the worker")
UNPROVED = Check("link_tcp", "worker", "unseen", "no answer", "both ends of the cable, by a program", "wait a minute")
LOW = Check("link_bandwidth", "head", "fail", "1.0 Gb/s to the worker", "5 Gb/s; the port says 200", "look at the MTU")


def cable(*checks: Check, head: str = "head_port1", worker: str = "worker_port0_index5") -> Cable:
    links = seen(head, worker)
    return Cable(NAMES, links, find_management(links), odd(links), propose(links), list(checks))


def bare(facts: LinkFacts) -> tuple[Interface, ...]:
    """Take the addresses from every port."""
    return tuple(replace(item, addresses=(), networks=()) for item in facts.interfaces)


class Story:
    """Gives one cable, and remembers which floor was asked for."""

    def __init__(self, found: Cable) -> None:
        self.found = found
        self.floors: list[float | None] = []

    def __call__(self, session: object, *, floor: float | None) -> Cable:
        assert session
        self.floors.append(floor)
        return self.found


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Cable, *words: str) -> tuple[int, Story]:
    story = Story(found)
    monkeypatch.setattr("sparkserve.operations.see_cable", story)
    env_file = tmp_path / ".env"
    env_file.write_text("SPARKSERVE_WORKER=spark@192.168.1.22\n")
    return cli._run(["link", "--env-file", str(env_file), *words]), story


@pytest.mark.parametrize(
    ("words", "floor"),
    [((), None), (("--floor", "9"), None), (("--prove",), 5.0), (("--prove", "--floor", "0"), 0.0)],
)
def test_only_prove_proves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], floor: float | None
) -> None:
    code, story = run(monkeypatch, tmp_path, cable(), *words)
    assert (code, story.floors) == (0, [floor])


def test_proofs_are_told_below_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, tmp_path, cable(OK, LOW), "--prove")
    assert code == 1
    picture, table, advice = capsys.readouterr().out.split("\n\n", 1)[1].split("\n\n")
    assert "the cable: NCCL" in picture
    rows = [line.split() for line in table.splitlines()]
    assert [row[:2] for row in rows] == [["verdict", "check"], ["fail", "link_bandwidth"], ["ok", "link_tcp"]]
    assert advice == "link_bandwidth (head): look at the MTU\n"


def test_what_fails_of_the_picture_counts_as_it_does_for_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = cable()
    assert run(monkeypatch, tmp_path, replace(found, odd=[replace(LOW, id="link_mtu")]))[0] == 1
    assert run(monkeypatch, tmp_path, replace(found, odd=[replace(LOW, id="link_mtu", verdict="warn")]))[0] == 0


def test_what_is_odd_and_what_could_not_be_proved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, tmp_path, cable(UNPROVED, worker="twin_link_local"), "--prove")
    assert code == 6
    text = capsys.readouterr().out
    assert re.search("^could not look  link_tcp .*no answer", text, re.MULTILINE)
    assert re.search("^warn +link_halves .*one half of the port is used", text, re.MULTILINE)


def test_the_choice_is_told_as_lines_for_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cable()
    unset = {role: replace(facts, address="", interface="", twin="") for role, facts in found.links.items()}
    code, _ = run(monkeypatch, tmp_path, replace(found, links=unset, odd=odd(unset)))
    assert code == 1
    out = capsys.readouterr().out
    assert "SPARKSERVE_HEAD_LINK=10.100.8.1\nSPARKSERVE_WORKER_LINK=10.100.8.2\n" in out
    assert "10.100.9.1 and 10.100.9.2: enP2p1s0f1np1 to enP2p1s0f0np0: both in" in out


def test_a_cable_without_addresses_is_told_once_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = {role: replace(facts, address="", interface="") for role, facts in seen("nobody", "nobody").items()}
    links = {role: replace(facts, interfaces=bare(facts)) for role, facts in links.items()}
    found = Cable(NAMES, links, find_management(links), odd(links), [], [])
    assert run(monkeypatch, tmp_path, found)[0] == 1
    out = capsys.readouterr().out
    assert all(f"sudo ip address add 10.100.8.{number}/24 dev " in out for number in (1, 2))
    unknown = prove(make_pair(head=FakeSession({}), worker=FakeSession({})), {}, master_port=1)
    assert run(monkeypatch, tmp_path, replace(found, odd=[], checks=unknown), "--prove")[0] == 1
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("link_tcp (head, worker): ")]
    assert len(hints) == 1


def test_json_has_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, tmp_path, cable(LOW), "--prove", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["exit_code"], answer["status"]) == (1, 1, "failed")
    assert answer["data"]["checks"][0]["observed"] == "1.0 Gb/s to the worker"
    assert answer["data"]["links"]["worker"]["gid_index"] == 5
    assert answer["data"]["management"]["head"] == {"interface": "enP7s7", "address": "192.168.1.20"}


@pytest.mark.parametrize(("encoding", "plain"), [("ascii", True), ("latin-1", True), ("utf-8", False)])
def test_ascii_where_the_stream_cannot_show_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str, plain: bool
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    code, _ = run(monkeypatch, tmp_path, cable())
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)
    assert (code, text.isascii(), "+======+" in text) == (0, plain, plain)
