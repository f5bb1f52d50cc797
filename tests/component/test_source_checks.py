"""Files and devices of a rank, looked at before there is one: on the node, and inside a container like its own."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkserve.checks import Check
from sparkserve.cluster import Node
from sparkserve.container import RANK_LABEL, BindMount, build_spec
from sparkserve.docker_form import docker_run_argv, reader_argv
from sparkserve.errors import SparkserveError
from sparkserve.source_checks import check_sources, remove_readers
from tests.fakes import FakeHost, FakeSession, make_node
from tests.unit.deployments import FILES, IMAGE, LINKS, make_deployment

FILTER = json.dumps({"label": ["sparkserve.reader"]}, separators=(",", ":"))
LISTING = f"/containers/json?all=1&filters={urllib.parse.quote(FILTER, safe='')}"
SPEC = replace(
    build_spec(make_deployment(), 1, LINKS, FILES, IMAGE),
    mounts=(
        BindMount("/srv/a b.txt", "/model/a.txt"),
        BindMount("/srv/open", "/model/open", owners=True),
        BindMount("/srv/cache", "/cache", read_only=False),
    ),
    user="65534",
)
TARGETS = ("/model/a.txt", "/model/open")


def make(kinds: dict[str, str] | None = None, left: tuple[str, ...] = (), **answer: Any) -> tuple[Node, FakeHost]:
    """A node on which the paths are of these kinds, and whose reader gives this answer; `left` are older readers."""
    paths = ["/srv/a b.txt", "/srv/open", *SPEC.devices]
    listing = {"status": 200, "body": [{"Id": one} for one in left]}
    facts = {"docker": {LISTING: listing}, "files": {"/proc/meminfo": ""}}
    looked = {path: {"kind": (kinds or {}).get(path, "file")} for path in paths}
    session = FakeSession({"look": looked, "facts": facts})
    node, host = make_node("worker", session=session), FakeHost("worker")
    node.__dict__["identity"] = {"home": "/home/spark"}
    node.host = host
    if answer:
        host.script(reader_argv(SPEC), **answer)
    if left:
        host.script(["docker", "rm", "--force", *left])
    return node, host


def checked(node: Node, host: FakeHost) -> Check:
    found = check_sources(node, SPEC)
    host.close()
    assert (found.id, found.node) == ("source", "worker")
    return found


def test_a_reader_is_as_the_rank_but_for_what_it_runs_and_its_devices() -> None:
    spec = replace(SPEC, env={"TOKEN": "${secret.token}"}, capabilities=("IPC_LOCK", "DAC_READ_SEARCH"))
    rank, reader = docker_run_argv(spec), reader_argv(spec)
    same = ("--user=", "--mount=", "--cap-add=", "--security-opt=", "--ipc=", "--workdir=")
    words = [word for word in rank if word.startswith(same) and "target=/cache" not in word]
    assert [word for word in reader if word.startswith(same)] != []
    assert sorted(words) == sorted(word for word in reader if word.startswith(same))
    assert {"--rm", "--pull=never", "--network=none", "--label=sparkserve.reader=sparkserve-rank1"} <= set(reader)
    assert not [word for word in reader if word.startswith(("--gpus", "--device", "--label=sparkserve.owner"))]
    assert "secret" not in " ".join(reader)
    image = reader.index(spec.image)
    assert reader[image - 1] == "--entrypoint=sh"
    assert tuple(reader[image + 1 :]) == ("-c", reader[image + 2], spec.entrypoint[0], *TARGETS)


NOWHERE = "entrypoint {here}:/nosuch:{here}:/usr/bin:/bin\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with a program, a link to nothing, a file that is no program, and a directory."""
    (tmp_path / "link").symlink_to("/of/the/rank/alone")
    (tmp_path / "engine").write_text("#!/bin/sh\n")
    (tmp_path / "engine").chmod(0o755)
    (tmp_path / "text").write_text("no program")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("engine", ""), ("{here}/engine", ""), ("./engine", ""), ("sh", ""),
        ("nosuch", NOWHERE), ("{here}/nosuch", NOWHERE), ("./text", NOWHERE), ("folder", NOWHERE),
        ("{here}/folder", NOWHERE), ("{here}/link", ""),
    ],
)  # fmt: skip
def test_what_a_reader_types_of_the_entry_point(programs: Path, entry: str, said: str) -> None:
    argv = reader_argv(replace(SPEC, entrypoint=(entry.format(here=programs),)))
    script = argv[argv.index("-c") + 1]
    environment = {"PATH": f"/nosuch:{programs}:/usr/bin:/bin"}
    words = ["sh", "-c", script, entry.format(here=programs), str(programs / "text"), str(programs / "gone")]
    done = subprocess.run(words, env=environment, cwd=programs, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said.format(here=programs)}{programs}/gone\n"


def test_an_entry_point_that_is_not_in_the_image() -> None:
    said = b"x: 1: cannot open /model/a.txt: No such file"
    found = checked(*make(stdout=b"entrypoint /srv:/usr/bin\n/model/a.txt\n", stderr=said))
    assert found.verdict == "fail"
    assert found.observed == f"rank 1 has no program {SPEC.entrypoint[0]} in {SPEC.image}"
    assert "`entrypoint`" in found.hint


@pytest.mark.parametrize(
    ("entry", "looked", "verdict"),
    [
        ("engine", "/cache:/usr/bin", "fail"),
        ("engine", "/:/usr/bin:/cache/bin", "ok"),
        ("/cache/engine", "/:/usr/bin", "ok"),
        ("bin/engine", "/cache:/usr/bin", "ok"),
        ("bin/engine", "/opt:/cache/bin", "fail"),
    ],
)
def test_an_entry_point_may_be_in_what_only_the_rank_is_given(entry: str, looked: str, verdict: str) -> None:
    spec, (node, host) = replace(SPEC, entrypoint=(entry,), env={"PATH": "/some"}), make()
    host.script(reader_argv(spec), f"entrypoint {looked}\n".encode())
    assert check_sources(node, spec).verdict == verdict
    assert "--env=PATH=/some" in reader_argv(spec)


def test_all_is_there_and_open() -> None:
    found = checked(*make(stdout=b""))
    assert (found.verdict, found.observed) == ("ok", "all are there and open")


@pytest.mark.parametrize("path", ["/srv/open", *SPEC.devices])
def test_what_is_missing_is_told_without_any_container(path: str) -> None:
    found = checked(*make({path: "missing"}))
    assert (found.verdict, found.observed) == ("fail", f"not there: {path}")


def test_what_is_closed_to_us_may_be_open_to_the_container() -> None:
    assert checked(*make({"/srv/open": "unreadable"}, stdout=b"")).verdict == "ok"


def test_files_that_the_containers_user_may_not_open() -> None:
    words = [f"sh: 1: cannot open {target}: Permission denied" for target in TARGETS]
    said = "\n".join(["WARNING: no swap limit", *words]).encode()
    found = checked(*make(stdout=b"/model/a.txt\n/model/open\n", stderr=said))
    assert found.verdict == "fail"
    assert found.observed == (
        "rank 1 cannot read /srv/a b.txt and 1 more files from inside its container: Permission denied"
    )
    assert found.hint.startswith("`ls -l '/srv/a b.txt'`: the container's user must be able to read it,")


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (
            {"exit_code": 127, "stderr": b'docker: exec: "sh": not found\n\nRun it with --help'},
            "unseen",
            '"sh": not found',
        ),
        ({"exit_code": 125, "stderr": b"docker: No such image: x\n"}, "fail", "No such image: x"),
        ({"exit_code": 137}, "unseen", "exit code 137"),
    ],
)
def test_a_container_that_does_not_run(answer: dict[str, Any], verdict: str, words: str) -> None:
    found = checked(*make(**answer))
    assert (found.verdict, words in found.observed) == (verdict, True), found


def test_a_file_that_gives_no_answer_proves_nothing_and_its_reader_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    node, host = make(left=("r1",))
    run = host.run

    def hang(argv: list[str], **more: Any) -> Any:
        if argv[1] == "run":
            raise SparkserveError("command_timeout", "no end", node="worker")
        return run(argv, **more)

    monkeypatch.setattr(host, "run", hang)
    found = checked(node, host)
    assert (found.verdict, "no end within 10 s" in found.observed) == ("unseen", True)


def test_a_reader_that_a_killed_start_left_is_removed_by_its_label() -> None:
    node, host = make(left=("r1", "r2"))
    remove_readers(node)
    host.close()
    assert RANK_LABEL not in " ".join(reader_argv(SPEC))
