"""A check-up from recorded facts: what is told, with which exit code, what a record replaces, what may be done."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.table import Table

from sparkserve import (
    cli,
    cluster,
    doctor,
    doctor_record,
    doctor_repair,
    image_facts,
    link_proof,
    lock,
    ssh_trust,
    takeover_facts,
)
from sparkserve.blueprint import Seen, load_facts
from sparkserve.check_catalog import CATALOG
from sparkserve.checks import Check
from sparkserve.cluster import ROLES, Cluster, Node, NodeSession, Role
from sparkserve.doctor import Report, examine
from sparkserve.doctor_record import anonymize
from sparkserve.doctor_tables import report_data, report_view, summary
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.hosts import Host, LocalHost, UnreachableHost
from sparkserve.lifecycle import Session, open_session
from sparkserve.link import parse_interfaces
from sparkserve.link_rdma import RDMA_GLOBS
from sparkserve.output import Mode, Output
from sparkserve.pair_checks import Difference
from sparkserve.parameters import secrets_to_mask
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from sparkserve.takeover_facts import Facts, Running
from tests.fakes import FakeHost
from tests.unit.cases import case_files

REFUSED = SparkserveError("ssh_unreachable", "cannot reach it", "ssh spark true", "worker", exit_code=6)
UNKNOWN = SparkserveError("host_key_unknown", "shows a key", "", "worker", exit_code=EXIT_COULD_NOT_LOOK)
RECORDS = case_files("doctor")


class Replay:
    """A node that answers as one did when it was recorded; what was not recorded was not there."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.on_answer: Callable[[str, Any], None] = lambda _do, _result: None

    def ask(self, do: str, **fields: Any) -> Any:
        if do == "hello":
            return self.raw["identity"]
        if do == "look":
            return {file["path"]: {"kind": "missing", "size": 0, "digest": None} for file in fields["files"]}
        assert do == "facts"
        facts = self.raw["facts"]
        found: dict[str, Any] = {
            name: {key: facts.get(name, {}).get(key) for key in keys}
            for name, keys in fields.items()
            if name != "timeout"
        }
        found["docker"] = {page: facts["docker"].get(page, {"error": "failed"}) for page in fields.get("docker", ())}
        found["ports"] = {str(port): facts["ports"][str(port)] for port in fields.get("ports", ())}
        found["globs"] = {pattern: facts.get("globs", {}).get(pattern) or {} for pattern in fields.get("globs", ())}
        found |= {"time": time.time(), "kernel": facts["kernel"], "machine": facts["machine"]}
        self.on_answer(do, found)
        return found

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture(params=RECORDS, ids=lambda path: path.stem)
def seen(request: pytest.FixtureRequest) -> Seen:
    return load_facts(request.param)


def session_of(seen: Seen, directory: Path) -> Session:
    values = {f"SPARKSERVE_{role.upper()}_LINK": seen.nodes[role].address for role in ROLES}
    password = directory / "state" / "sudo-password"
    password.parent.mkdir(exist_ok=True)
    password.write_text("a password\n")
    password.chmod(0o600)
    values |= {"SPARKSERVE_WORKER": "user1@10.0.9.9", "SPARKSERVE_SUDO_PASSWORD_FILE": str(password)}
    values |= {"SPARKSERVE_API_PORT": "8888", "SPARKSERVE_MASTER_PORT": "29551"}
    environment = {"XDG_STATE_HOME": str(directory / "state"), "SPARKSERVE_RECIPE": "smoke", **values}
    run = open_session("doctor", directory / ".env", environment, {}, Output(Mode.QUIET))
    if seen.raw["head"]["facts"]["machine"] != "aarch64":
        image = run.recipe.image.model_copy(update={"architecture": "any"})
        run.recipe = run.recipe.model_copy(update={"image": image})
    return run


@pytest.fixture
def session(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    run = session_of(seen, tmp_path)
    replayed(monkeypatch, run, {role: seen.raw[role] for role in ROLES})
    return run


def replayed(
    monkeypatch: pytest.MonkeyPatch, run: Session, raw: dict[Role, dict[str, Any]], refuses: tuple[Role, ...] = ()
) -> None:
    """Let both nodes answer as recorded; those of `refuses` do not take the sudo password."""

    @contextlib.contextmanager
    def connected(*_given: object, **_options: object) -> Iterator[Cluster]:
        hosts: dict[Role, Host] = {
            role: FakeHost(role) if role in raw else UnreachableHost(role, REFUSED) for role in ROLES
        }
        nodes = [Node(role, hosts[role], run.settings) for role in ROLES]
        for host in hosts.values():
            if isinstance(host, FakeHost):
                host.script(["id", "-u"], b"1000\n", always=True)
                is_refused = host.name in refuses
                host.script(["sudo", "-k", "-S", "-p", "", "-v"], exit_code=int(is_refused), always=True)
        for node in nodes:
            if node.role in raw:
                node.__dict__["session"] = cast("NodeSession", Replay(raw[node.role]))
        yield Cluster(*nodes)

    monkeypatch.setattr(doctor, "connect", connected)


def verdicts(report: Report) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for check in report.checks:
        found.setdefault(check.verdict, set()).add(check.id)
    return found


def test_a_recorded_pair_is_in_order(session: Session, seen: Seen) -> None:
    report = examine(session)
    assert verdicts(report).keys() == {"ok"}
    assert len(report.checks) > 55
    assert (report.exit_code, report.unseen) == (0, {})
    assert summary(report) == f"{len(report.checks)} ok"
    owners = {check.node: check.observed for check in report.checks if check.id == "link_address"}
    assert owners == {role: f"{place.interface} owns {place.address}" for role, place in seen.nodes.items()}


def test_a_record_holds_what_was_seen(session: Session, seen: Seen, tmp_path: Path) -> None:
    report = examine(session, record=tmp_path / "again.json")
    again = load_facts(tmp_path / "again.json")
    assert report.recorded == str(tmp_path / "again.json")
    assert {role: place.hcas for role, place in again.nodes.items()} == {
        role: place.hcas for role, place in seen.nodes.items()
    }
    assert {role: raw["facts"]["tools"] for role, raw in again.raw.items()} == {
        role: raw["facts"]["tools"] for role, raw in seen.raw.items()
    }


@pytest.mark.parametrize(
    ("source", "head_link", "verdict"),
    [
        ("flag", "", "ok"),
        ("environment", "", "fail"),
        ("environment", "10.9.9.9", "fail"),
        ("flag", "10.9.9.9", "fail"),
    ],
)
def test_the_cable_is_found_only_for_a_worker_without_settings(
    session: Session, seen: Seen, source: str, head_link: str, verdict: str
) -> None:
    settings = session.settings.model_copy(update={"head_link": head_link, "worker_link": ""})
    session.loaded = replace(session.loaded, settings=settings, sources={**session.loaded.sources, "worker": source})
    found = [check for check in examine(session, proves_link=verdict == "fail").checks if check.id == "link_address"]
    assert [check.verdict for check in found] == [verdict, verdict]
    lines = [f"SPARKSERVE_{role.upper()}_LINK={seen.nodes[role].address}" for role in ROLES]
    assert [check.advice.splitlines()[1:] for check in found] == [[] if verdict == "ok" else lines] * 2


def test_a_network_without_rdma_is_not_taken_for_the_cable_of_a_recipe_that_needs_it(
    session: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {role: copy.deepcopy(seen.raw[role]) for role in ROLES}
    for found in raw.values():
        found["facts"]["globs"][RDMA_GLOBS["state"]] = {}
    replayed(monkeypatch, session, raw)
    settings = session.settings.model_copy(update={"head_link": "", "worker_link": ""})
    session.loaded = replace(session.loaded, settings=settings, sources={**session.loaded.sources, "worker": "flag"})
    links = [check for check in examine(session).checks if check.id.startswith("link_")]
    assert [(check.id, check.verdict) for check in links] == [("link_address", "fail")] * 2
    assert all(check.observed.endswith("_LINK is not set") for check in links)


def test_a_key_that_cannot_be_read_is_no_key(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(*_given: object, is_idle: Callable[[], bool], **_more: object) -> list[Check]:
        return [check("link_tcp", "ok", observed=f"idle: {is_idle()}")]

    monkeypatch.setattr(link_proof, "prove", prove)
    (tmp_path / "secrets").write_text("NAME=word\n")
    (tmp_path / "secrets").chmod(0o600)
    changes = {"api_key_file": tmp_path / "none", "secrets_file": tmp_path / "secrets"}
    settings = session.settings.model_copy(update=changes)
    assert [secret and secret.get_secret_value() for secret in secrets_to_mask(settings)] == [None, "word"]
    session.loaded = replace(session.loaded, settings=settings)
    report = examine(session, proves_link=True, record=tmp_path / "record")
    assert load_facts(tmp_path / "record").nodes.keys() == {*ROLES}
    assert "idle: False" in [one.observed for one in report.checks], "the cable is proved all the same"
    (found,) = [check for check in report.checks if check.id == "api_key"]
    assert (found.verdict, found.advice) == ("fail", f"sparkserve key new -e {tmp_path}/.env --set")
    assert "cannot read" in found.observed


def test_a_hint_carries_what_the_command_was_given(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = session_of(seen, tmp_path)
    run.loaded = replace(run.loaded, sources={**run.loaded.sources, "worker": "flag", "recipe": "flag"})
    replayed(monkeypatch, run, {"head": seen.raw["head"]})
    monkeypatch.setattr(REFUSED, "hint", "sparkserve doctor --fix  (asks once)")
    (found,) = [check for check in examine(run).checks if check.verdict == "unseen"]
    assert found.advice == f"sparkserve doctor -e {tmp_path}/.env user1@10.0.9.9 -r smoke --fix  (asks once)"


def test_a_record_needs_a_file(session: Session, tmp_path: Path) -> None:
    with pytest.raises(SparkserveError, match="is a directory") as caught:
        examine(session, record=tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("facts_unreadable", 2)


@pytest.mark.parametrize("content", ["SPARKSERVE_WORKER=a\n", None])
def test_a_record_replaces_no_file_of_others(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(doctor, "connect", None)  # nobody is asked before
    path = tmp_path / "mine"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(SparkserveError) as caught:
        examine(session, record=path)
    assert caught.value.hint == "nothing was written; name a new file"
    assert content is None or path.read_text() == content
    assert {one.name for one in tmp_path.iterdir()} == {"state", "mine"}


def test_a_worker_that_was_not_reached_leaves_the_heads_checks_and_the_reason(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session_of(seen, tmp_path)
    replayed(monkeypatch, run, {"head": seen.raw["head"]})
    report = examine(run, proves_link=True, record=tmp_path / "head.json")
    assert report.exit_code == EXIT_COULD_NOT_LOOK
    head, worker = [check for check in report.checks if check.id == "reach"]
    assert (head.node, head.verdict, head.observed) == ("head", "ok", "this machine")
    assert (worker.node, worker.verdict, worker.observed) == ("worker", "unseen", "cannot reach it")
    assert [check.advice for check in report.checks if check.verdict != "ok"] == ["ssh spark true"]
    assert summary(report).startswith("the worker could not be looked at, 1 could not look, ")
    assert load_facts(tmp_path / "head.json").nodes.keys() == {"head"}


def check(name: str, verdict: Any, node: str = "head", observed: str = "seen", hint: str = "") -> Check:
    return Check(name, node, verdict, observed, "wanted", hint)


@pytest.mark.parametrize(
    ("given", "unseen", "code"),
    [
        (["ok", "warn"], {}, 0),
        (["ok", "fail"], {}, 1),
        (["unseen", "fail"], {}, 1),
        (["unseen", "warn"], {}, 6),
        (["fail"], {"worker": REFUSED}, 6),
    ],
)
def test_exit_codes(given: list[str], unseen: dict[Role, SparkserveError], code: int) -> None:
    report = Report(tuple(check("memory", verdict) for verdict in given), (), unseen)
    assert report.exit_code == code


def test_what_is_wrong_comes_first_and_says_what_to_type() -> None:
    found = [
        check("docker", "ok"), check("docker", "ok", "worker"), check("memory", "ok"), check("clock", "warn", ""),
        check("memory", "fail", "worker", "too little"), check("gpu", "unseen", hint="look yourself"),
    ]  # fmt: skip
    report = Report(tuple(found), (Difference("driver", "580", "590"), Difference("kernel", "6", "6")))
    short, _, *rest = report_view(report)
    assert isinstance(short, Table)
    assert [str(cell) for cell in short.columns[1].cells] == ["memory", "gpu", "clock"]
    table, _, *lines = report_view(report, shows_all=True)
    assert isinstance(table, Table)
    assert table.columns[1].no_wrap
    assert len(rest) == len(lines)
    assert [str(cell) for cell in table.columns[1].cells] == ["memory", "gpu", "clock", "docker"]
    assert [str(cell) for cell in table.columns[0].cells] == ["fail", "could not look", "warn", "ok"]
    assert [str(cell) for cell in table.columns[3].cells] == ["too little", "", "", "seen"]
    assert lines[0] == "memory (worker): close other programs: `ps aux --sort=-rss | head` shows the largest"
    assert lines[1] == "gpu (head): look yourself"
    assert lines[2] == "clock: sudo timedatectl set-ntp true"
    (differs,) = [line for line in lines if isinstance(line, Table)]
    assert [str(cell) for cell in differs.columns[0].cells] == ["driver"]
    assert str(lines[-1]).startswith("1 fail, 1 could not look, 1 warn, 3 ok, in ")
    data = report_data(report)
    assert [row["hint"] for row in data["checks"] if row["verdict"] == "ok"] == ["", "", ""]
    assert [row["why"] for row in data["checks"]] == [CATALOG[row["id"]].why for row in data["checks"]]
    assert len(data["differences"]) == 1


def test_what_is_in_order_takes_one_line_and_one_advice_for_both_nodes_is_told_once() -> None:
    (line,) = report_view(Report((check("docker", "ok"), check("docker", "ok", "worker")), ()))
    assert str(line).startswith("2 ok, in ")
    wrong = [check("swap", "warn", node, hint="make some") for node in ROLES]
    assert list(report_view(Report(tuple(wrong), ())))[2] == "swap (head, worker): make some"


# -- what gives no answer ---------------------------------------------------------------------------------------------


def silenced(seen: Seen, room: str, name: str, answer: Any) -> dict[Role, dict[str, Any]]:
    """Let one thing on the worker give another answer."""
    raw = {role: copy.deepcopy(seen.raw[role]) for role in ROLES}
    raw["worker"]["facts"][room][name] = answer
    return raw


def test_a_node_without_ip_keeps_all_its_other_checks(
    session: Session, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = examine(session)
    replayed(monkeypatch, session, silenced(seen, "commands", "ip", None))
    report = examine(session, proves_link=True, record=tmp_path / "record")
    found = [one for one in report.checks if one.verdict != "ok"]
    assert [(one.id, one.node, one.verdict, one.advice) for one in found] == [
        ("link_address", "worker", "unseen", "sudo apt-get install iproute2")
    ]
    lost = {(one.id, one.node) for one in whole.checks} - {(one.id, one.node) for one in report.checks}
    assert {name for name, _ in lost} <= {name for name in CATALOG if name.startswith("link_")}
    assert (report.exit_code, report.unseen) == (EXIT_COULD_NOT_LOOK, {})
    assert load_facts(tmp_path / "record").nodes.keys() == {*ROLES}


def test_a_proof_that_breaks_off_leaves_the_report(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_given: object, **_options: object) -> None:
        raise SparkserveError("node_silent", "gave no answer to `listen`", "wait a minute", "worker", exit_code=6)

    monkeypatch.setattr(link_proof, "_open_ends", breaks)
    report = examine(session, proves_link=True)
    found = [one for one in report.checks if one.verdict != "ok"]
    assert [one.id for one in found] == ["link_mtu_path", "link_tcp", "link_bandwidth", "link_rdma_bandwidth"]
    assert {(one.node, one.verdict, one.advice) for one in found} == {("worker", "unseen", "wait a minute")}
    assert len(report.checks) > 50


@pytest.mark.parametrize(
    ("page", "unseen"),
    [("/info", {"docker", "docker_match", "containers"}), ("/images/ours:1/json", set())],
)
def test_an_image_that_docker_could_not_be_asked_for_is_not_absent(
    session: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch, page: str, unseen: set[str]
) -> None:
    known = lock.Lock(schema=1, recipe=session.recipe.name, weights=(), image=lock.LockedImage(reference=""))
    monkeypatch.setattr(lock, "read_lock", lambda *_: known)
    monkeypatch.setattr(image_facts, "tag_of", lambda *_: "ours:1")
    raw = silenced(seen, "docker", page, {"error": "timeout"})
    raw["head"]["facts"]["docker"]["/images/ours:1/json"] = {"status": 404, "body": None}
    if unseen:
        raw["worker"]["facts"]["docker"] = {name: {"error": "timeout"} for name in ("/info", "/containers/json")}
    replayed(monkeypatch, session, raw)
    report = examine(session)
    shown = {one.what: (one.head, one.worker) for one in report.differences}
    assert shown["engine image"] == ("absent", "could not look")
    assert {one.id for one in report.checks if one.verdict == "unseen"} - {"docker_runtime"} == unseen
    assert not report.unseen


def test_ranks_of_others_are_named_and_could_not_look_is_not_none(
    session: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("serve", "/model", "--tp", "2", "--rank", "1")
    theirs = Running(
        role="worker", name="tf-worker", is_ours=False, image="x", image_id="y", digests=(), layers=(),
        entrypoint=("tensorfold",), argv=argv, env={}, image_env={}, mounts=(), options={},
    )  # fmt: skip
    silent = SparkserveError("docker_unreachable", "the Docker engine gives no answer", "wait")

    def gather(node: Node) -> Facts:
        if node.role == "head":
            raise silent
        return Facts((theirs,), 0, 0)

    monkeypatch.setattr(takeover_facts, "gather", gather)
    wrong = [one for one in examine(session).checks if one.verdict != "ok"]
    assert [(one.id, one.node, one.verdict) for one in wrong] == [
        ("containers", "head", "unseen"), ("containers", "worker", "fail")
    ]  # fmt: skip
    assert "tf-worker runs rank 1 of " in wrong[1].observed
    assert "`sparkserve init -e" in wrong[1].advice


def test_a_sudo_password_file_that_is_not_there(session: Session, tmp_path: Path) -> None:
    session.loaded = replace(
        session.loaded, settings=session.settings.model_copy(update={"sudo_password_file": tmp_path / "none"})
    )
    found = [one for one in examine(session).checks if one.verdict != "ok"]
    assert {(one.id, one.verdict) for one in found} <= {("sudo", "fail")}
    assert found


def test_a_sudo_password_that_one_node_refuses(session: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch, session, {role: seen.raw[role] for role in ROLES}, refuses=("worker",))
    report = examine(session)
    wrong = [one for one in report.checks if one.verdict != "ok"]
    assert [(one.id, one.node, one.verdict) for one in wrong] == [("sudo", "worker", "fail")]
    assert "sudo refuses the password" in wrong[0].observed
    assert report.exit_code == 1


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["doctor", "--explain", "kernel"]) == 0
    why, fix, whose = (line.strip() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert (why, fix) == (CATALOG["kernel"].why, CATALOG["kernel"].fix)
    assert whose == "That is yours to do."
    assert cli._run(["doctor", "--explain", "writable", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["safe"] is True
    assert cli._run(["doctor", "--explain", "kernell"]) == 2


def test_fix_looks_again_as_it_looked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def look(_session: object, _opened: object = None, **how: Any) -> Report:
        asked.append(how)
        return Report((check("docker", "ok"),), (), {"worker": UNKNOWN} if len(asked) == 1 else {})

    monkeypatch.setattr(doctor, "examine", look)
    monkeypatch.setattr(cluster, "connect", lambda *_, **_how: contextlib.nullcontext())
    monkeypatch.setattr(ssh_trust, "meet", lambda *_: None)
    (tmp_path / ".env").write_text("SPARKSERVE_WORKER=spark@192.168.1.22\n")
    words = ["--env-file", str(tmp_path / ".env"), "--link", "--record", str(tmp_path / "facts"), "--fix", "--yes"]
    assert cli._run(["doctor", *words]) == 0
    assert asked == [{"proves_link": True, "record": tmp_path / "facts"}] * 2
    assert "1 ok, in " in capsys.readouterr().out


# -- a record names nobody --------------------------------------------------------------------------------------------


def test_names_and_addresses_are_replaced_each_by_the_same() -> None:
    text = (
        "spark-3a7f: /home/anna/x, anna@10.100.8.1, 10.100.8.2/24 169.254.77.7 127.0.1.1 0.0.0.0:22 255.255.255.0 "
        "08:c0:eb:12:34:56 08:C0:EB:12:34:56 GPU-6d2f0b1e-3c4a-5d6e-8f90-a1b2c3d4e5f6 "
        "0000:0000:0000:0000:0000:ffff:0a64:0801 fe80:0000:0000:0000:0ac0:ebff:fe12:3456 ::1 [::]:22 12:34:56 "
        "annabel spark-3a7f2 6.17.0-1032 580.173.02 0000000F:01:00.0"
    )
    shown = anonymize(text, {"anna": "user1", "spark-3a7f": "head"})
    assert shown == (
        "head: /home/user1/x, user1@10.0.1.1, 10.0.1.2/24 169.254.3.7 127.0.1.1 0.0.0.0:22 255.255.255.0 "
        "02:00:00:00:00:01 02:00:00:00:00:01 GPU-00000000-0000-0000-0000-000000000002 "
        "0000:0000:0000:0000:0000:ffff:0a00:0101 fe80:0000:0000:0000:0000:0000:0000:0002 ::1 [::]:22 12:34:56 "
        "annabel spark-3a7f2 6.17.0-1032 580.173.02 0000000F:01:00.0"
    )


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("enx3c6d66aabbcc: 3c:6d:66:aa:bb:cc wlx00c0caabcdef", "enx020000000001: 02:00:00:00:00:01 wlx020000000002"),
        ({"/sys/class/net/enx3c6d66aabbcc/speed": "x"}, {"/sys/class/net/enx020000000001/speed": "x"}),
        ("rocex3c6d660300aabbcc roceP2p1s0f1 enp1s0f0np0", "rocex0200000000000001 roceP2p1s0f1 enp1s0f0np0"),
        ({"gpu": {"out": "gpu: NVIDIA GB10"}}, {"gpu": {"out": "worker: NVIDIA GB10"}}),
        ({"user": "free", "8888": "free"}, {"user": "user1", "8888": "free"}),
        ({"/home/free/x": "/home/free/x"}, {"/home/user1/x": "/home/user1/x"}),
        ({"/sys/class/net/gpu": ""}, {"/sys/class/net/gpu": ""}),
        ('[{"gpu":"free","dev":"at gpu"}]\n', '[{"gpu":"free","dev":"at worker"}]'),
        ("worker and head", "head and worker"),
        ("free docker lab-7", "user1 docker group1"),
        ("gpu.home.lan. 10.0.0.9 gpu-2.home.lan free.d", "worker. 10.0.1.9 gpu-2.home.lan user1.d"),
    ],
)  # fmt: skip
def test_only_what_tells_whose_it_is_is_replaced(found: Any, shown: Any) -> None:
    words = {"gpu": "worker", "free": "user1", "worker": "head", "head": "worker", "lab-7": "group1"}
    assert anonymize(found, words) == shown


def test_persons_groups_and_machines_are_named_anew(seen: Seen) -> None:
    raw = copy.deepcopy(seen.raw)
    raw["head"]["identity"] |= {"user": "anna", "hostname": "gpu"}
    raw["head"]["facts"]["commands"]["groups"]["out"] = "anna sudo docker secret-lab\n"
    raw["head"]["facts"]["commands"]["docker_group"]["out"] = "docker:x:106:anna,bert\n"
    found = doctor_record._names(raw, "bert@box.example.org")
    wanted = {"anna": "user1", "bert": "user2", "secret-lab": "group1", "gpu": "head", "box.example.org": "worker"}
    assert wanted.items() <= found.items()
    assert not {"sudo", "docker", "root"} & found.keys()


def test_of_an_interface_and_of_a_name_no_more_is_kept_than_is_read() -> None:
    address = {"family": "inet", "local": "10.100.8.1", "prefixlen": 24}
    told = {"phys_switch_id": "3c6d66aabbcc", "phys_port_id": "3c6d66aabbcc", "ifalias": "of anna", "permaddr": "3c:6d"}
    row: dict[str, Any] = {"ifname": "enp1s0f1np1", "mtu": 9000, "flags": ["UP", "LOWER_UP"], "master": "br0"}
    row |= {"linkinfo": {"info_kind": "veth"}, "addr_info": [{**address, "label": "anna"}]}
    full = {**row, **told, "linkinfo": {**row["linkinfo"], "info_data": {"id": "3c6d66aabbcc"}}}
    ip = {"code": 0, "out": json.dumps([full, {"ifname": "lo"}]), "err": ""}
    name = {"code": 0, "out": "10.0.0.1      STREAM box.anna.example\n10.0.0.1      DGRAM  \n", "err": ""}
    kept = doctor_record._shorten("commands", {"ip": ip, "own_name": name, "gpu": None})
    assert json.loads(kept["ip"]["out"]) == [{**row, "addr_info": [address]}, {"ifname": "lo"}]
    assert kept["own_name"]["out"].split() == ["10.0.0.1", "10.0.0.1"]
    globs: dict[str, Any] = {name: {} for name in ("wireless", "speed")}
    assert parse_interfaces(kept["ip"], globs) == parse_interfaces(ip, globs)
    old = {"ip": {"code": 0, "out": "1: of anna", "err": ""}, "own_name": None}
    assert doctor_record._shorten("commands", old) == {"ip": {"code": 0, "out": "", "err": ""}, "own_name": None}


def test_the_same_containers_are_recorded_alike() -> None:
    """Docker keeps published ports in a map, one entry for each address: it tells them in another order each time."""
    ports = [{"PublicPort": 9000}, {"PrivatePort": 80}, {"PublicPort": 8000}, {"PublicPort": 9000}]
    rows = [{"Id": "1", "Names": ["/web"], "Image": "x", "Ports": told} for told in (ports, ports[::-1])]
    first, second = (doctor_record._container(row, 1) for row in rows)
    assert first == second
    assert first["Ports"] == [{"PublicPort": 8000}, {"PublicPort": 9000}]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_ours_names_nobody(path: Path) -> None:
    text = path.read_text()
    found = set(re.findall(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", text))
    assert {one for one in found if not one.startswith(("10.0.", "127.", "0.0.0.0", "172.17.", "255."))} == set()
    assert "spark-" not in text
    assert "GPU-" not in text


# -- what it may put right --------------------------------------------------------------------------------------------


def test_a_sudo_rule_allows_what_tuning_runs_and_nothing_else(tmp_path: Path) -> None:
    tools = {"tee": "/usr/bin/tee", "sysctl": "/usr/sbin/sysctl"}
    recipe = load_recipe("tensorfold-1017")
    assert {"vm.swappiness", "vm.compaction_proactiveness"} <= recipe.tuning.sysctl.keys()
    text = doctor_repair.sudo_rule("anna", tools, recipe)
    (tmp_path / "rule").write_text(text)
    done = subprocess.run(["visudo", "-c", "-f", str(tmp_path / "rule")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "anna ALL=(root) NOPASSWD: /usr/bin/tee /var/lib/sparkserve/tuning.json.new\n" in text
    pattern = re.compile(re.search(r"sysctl (\^.*\$)", text)[1])  # type: ignore[index]
    assert pattern.match("-q -w vm.swappiness=60 vm.compaction_proactiveness=20")
    for words in (
        "-q -w kernel.panic=1",
        "-q -w vm.swappiness=60 kernel.panic=1",
        "-p /tmp/x",
        "-q -w vmxswappiness=1",
    ):
        assert not pattern.match(words)


def test_the_paths_of_a_sudo_rule_are_those_that_sudo_takes(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "true").write_text("#!/bin/sh\n")
    (tmp_path / "true").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")  # as Debian gives it to a plain user, with one of the own
    head = Node("head", LocalHost("head"), session.settings)
    try:
        told = doctor_repair._do(session, Cluster(head, head), check("sudo", "warn", "head", "sudo: password"))
        text = (session.state / "sudoers-head").read_text()
    finally:
        head.close()
    assert "NOPASSWD: /usr/bin/true\n" in text
    assert "NOPASSWD: /usr/sbin/sysctl ^-q -w" in text
    assert "/etc/sudoers.d/sparkserve" in told


def test_an_unknown_host_key_takes_a_person_whatever_was_agreed_to(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def meet(settings: object, accept: object, ask: Any) -> None:
        assert (settings, accept) == (session.settings, None)
        assert ask("Trust it?", "--accept-host-key SHA256:abc")

    def person(question: str, flag: str) -> bool:
        asked.append((question, flag))
        return True

    monkeypatch.setattr(ssh_trust, "meet", meet)
    reports = [Report((), (), {"worker": UNKNOWN}), Report((check("docker", "ok"),), ())]
    left = list(reports)
    found = doctor_repair.repair(session, lambda _=None: left.pop(0), lambda _: False, person)
    assert asked == [("Trust it?", "it to init: --accept-host-key SHA256:abc")]
    assert found is reports[1]


def test_a_lock_of_other_settings_keeps_nobody_from_looking(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_given: object) -> None:
        raise SparkserveError("lock_differs", "the lock is of another recipe")

    monkeypatch.setattr(lock, "read_lock", refuse)
    assert examine(session).exit_code == 0
    assert "warning: the lock is of another recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "changes", "line"),
    [
        ("head", {}, "sudo install -m 440 /s/rule /etc/sudoers.d/sparkserve"),
        ("worker", {}, "scp /s/rule a@b: && ssh -t a@b 'sudo install -m 440 rule /etc/sudoers.d/sparkserve'"),
        (
            "worker",
            {"ssh_port": 222, "ssh_key": "/k"},
            "scp -P 222 -i /k /s/rule a@b: && ssh -t -p 222 -i /k a@b 'sudo",
        ),
    ],
)
def test_a_sudo_rule_is_put_in_place_by_one_line(role: Role, changes: dict[str, Any], line: str) -> None:
    settings = Settings.model_validate({"worker": "a@b", **changes})
    assert doctor_repair._install_rule(settings, role, Path("/s/rule")).startswith(line)


def test_nothing_is_done_that_nobody_agreed_to(session: Session) -> None:
    wrong = Report(
        (
            check("writable", "fail", hint="sudo install -d -o anna /data"),
            check("writable", "fail", "worker", hint="sudo chown anna /data"),
            check("sudo", "warn", "worker", "sudo: password"),
            check("sudo", "warn", "head", "sudo: missing"),
            check("sudo", "warn", "head", "sudo: password for `sysctl -q -w vm.swappiness=0`"),
            check("docker_group", "fail", "worker"),
        ),
        (),
    )
    asked: list[str] = []
    assert [node for node, _ in doctor_repair.list_deeds(Report((), (), {"worker": UNKNOWN}))] == ["worker"]
    planned = [f"{node}: {deed}?" for node, deed in doctor_repair.list_deeds(wrong)]

    def refuse(question: str) -> bool:
        asked.append(question)
        return False

    assert doctor_repair.repair(session, lambda _=None: wrong, refuse, lambda *_: False) is wrong
    assert asked == [
        "head: sudo install -d -o anna /data?",
        "worker: write a rule for /etc/sudoers.d to a file on the head, for you to read?",
        "head: write a rule for /etc/sudoers.d to a file on the head, for you to read?",
    ]
    assert planned == asked, "a dry run tells the same"
