from __future__ import annotations

import io
import json
import socket
import threading
from pathlib import Path

import pytest

from sparkserve.docker_program import docker_get, docker_logs, read_frames
from sparkserve.engine_facts import ContainerFacts, docker_body, parse_moment, parse_top
from sparkserve.engine_logs import LogFollower, LogLine, find_trouble, match_phase, save_log, saved_runs
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.recipe import KnownFailure, Phase
from tests.fakes import FakeSession, make_node


def frame(text: str, stream: int = 1) -> bytes:
    data = text.encode()
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def read(data: bytes, limit: int = 10_000) -> list[list[str]]:
    lines: list[list[str]] = read_frames(io.BytesIO(data), limit)["lines"]
    return lines


def test_logs_of_the_last_twenty_runs_are_kept(tmp_path: Path) -> None:
    runs = [f"20260101T0000{number:02}.000-aaaa" for number in range(21)]
    for run in runs:
        (tmp_path / run).mkdir()
        for name in ("rank0.log", "rank1.log", "record.json"):
            (tmp_path / run / name).touch()
    answer = {"status": 200, "lines": [["2026-01-01T00:00:00Z", "hello"]], "more": False, "time": 0.0}
    node = make_node("worker", session=FakeSession({"docker_logs": answer}))
    kept = save_log(node, ContainerFacts("c1", "sparkserve-rank1", "exited", rank=1, run=runs[-1]), tmp_path, ())
    assert kept.read_text() == "2026-01-01T00:00:00Z hello\n"
    assert saved_runs(tmp_path) == runs[:0:-1]
    assert [path.name for path in (tmp_path / runs[0]).iterdir()] == ["record.json"]


def test_frames_of_both_streams() -> None:
    data = frame("2026-01-01T00:00:00.000000001Z first\n") + frame("2026-01-01T00:00:00.000000002Z second : x\n", 2)
    assert read(data) == [
        ["2026-01-01T00:00:00.000000001Z", "first"],
        ["2026-01-01T00:00:00.000000002Z", "second : x"],
    ]


def test_a_long_line_comes_in_parts_each_with_its_time() -> None:
    data = frame("T1 aaa") + frame("T2 bbb") + frame("T3 c\n") + frame("T4 \n") + frame("T5 é\n")
    assert read(data) == [["T1", "aaabbbc"], ["T4", ""], ["T5", "é"]]


def test_the_limit_ends_behind_a_whole_line() -> None:
    data = frame("T1 aaaaaaaa") + frame("T2 b\n") + frame("T3 c\n")
    assert read_frames(io.BytesIO(data), 5) == {
        "status": 200,
        "lines": [["T1", "aaaaaaaab"]],
        "more": True,
        "time": read_frames(io.BytesIO(b""), 5)["time"],
    } | {"time": pytest.approx(read_frames(io.BytesIO(b""), 5)["time"], abs=5)}


def serve_once(path: Path, answer: bytes) -> list[bytes]:
    """Answer one request on a socket as the Docker engine does; gives what was asked."""
    asked: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def run() -> None:
        connection, _ = listener.accept()
        asked.append(connection.recv(65536))
        connection.sendall(answer)
        connection.close()
        listener.close()

    threading.Thread(target=run, daemon=True).start()
    return asked


def chunked(data: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [data[place : place + 5] for place in range(0, len(data), 5)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_logs_over_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve_once(tmp_path / "docker.sock", chunked(frame("T1 one\n") + frame("T2 two\n", 2)))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    answer = docker_logs({"container": "abc", "since": "12.500000", "tail": ""})
    assert answer["lines"] == [["T1", "one"], ["T2", "two"]]
    assert asked[0].startswith(b"GET /containers/abc/logs?stdout=1&stderr=1&timestamps=1&since=12.500000 HTTP/1.1")


def test_logs_of_a_container_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_once(
        tmp_path / "docker.sock", chunked(json.dumps({"message": "No such container"}).encode(), b"404 Not Found")
    )
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    assert docker_logs({"container": "abc"}) == {"status": 404, "body": {"message": "No such container"}}


def test_a_docker_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert docker_logs({"container": "abc"}) == docker_get("/x") == {"error": "missing"}
    with pytest.raises(SparkserveError) as caught:
        docker_body({"error": "missing"}, "worker")
    assert (caught.value.exit_code, caught.value.node) == (EXIT_COULD_NOT_LOOK, "worker")
    assert "sudo systemctl start docker" in caught.value.hint


def test_a_follower_gives_every_line_once_also_late_and_equal_ones() -> None:
    base = 1_767_225_600
    rows = [[f"2026-01-01T00:00:0{second}.{part:09}Z", text] for second, part, text in [(1, 5, "a"), (1, 5, "b")]]
    seen: list[float] = []

    def logs(container: str, since: str, tail: str, timeout: float) -> dict[str, object]:
        seen.append(float(since or 0))
        found = [row for row in rows if (parse_moment(row[0]) or 0) >= float(since or 0)]
        return {"status": 200, "lines": found, "more": False, "time": 0.0}

    follower = LogFollower(make_node("head", session=FakeSession({"docker_logs": logs})), "abc", 0)
    assert [line.text for line in follower.read()] == ["a", "b"]
    assert follower.read() == []
    rows += [["2026-01-01T00:00:01.000000004Z", "written late"], ["2026-01-01T00:00:03.000000000Z", "c"]]
    assert [line.text for line in follower.read()] == ["written late", "c"]
    assert seen[0] == 0
    assert base <= seen[-1] < base + 1


def test_a_follower_reads_on_while_there_is_more() -> None:
    pages = [([["2026-01-01T00:00:01.0Z", "a"]], True), ([["2026-01-01T00:00:02.0Z", "b"]], False)]

    def logs(**_fields: object) -> dict[str, object]:
        lines, more = pages.pop(0)
        return {"status": 200, "lines": lines, "more": more, "time": 0.0}

    follower = LogFollower(make_node("head", session=FakeSession({"docker_logs": logs})), "abc", 1)
    assert [(line.rank, line.text) for line in follower.read()] == [(1, "a"), (1, "b")]


# -- what went wrong --------------------------------------------------------------------------------------------------

GONE = KnownFailure(pattern="NCCL error 6", cause="peer gone", advice="look there")
NOTICE = KnownFailure(pattern="slow Error", cause="slow", advice="wait", fatal=False)


def trouble(*lines: tuple[float, int, str]) -> tuple[int, str, str] | None:
    found = find_trouble([LogLine(*line) for line in lines], [GONE, NOTICE])
    return (found.line.rank, found.line.text, found.known.cause if found.known else "") if found else None


def test_the_cause_and_not_its_echo() -> None:
    own = (1.0, 1, "ValueError: shard 7")
    echo = (2.0, 0, "RuntimeError: NCCL error 6")
    assert trouble(echo, own) == (1, "ValueError: shard 7", "")
    assert trouble(echo) == (0, "RuntimeError: NCCL error 6", "peer gone")
    assert trouble((0.5, 0, "ImportWarning Error: no extras"), echo) == (0, "RuntimeError: NCCL error 6", "peer gone")


def test_the_line_under_a_traceback_names_the_error() -> None:
    lines = [
        (1.0, 0, "Traceback (most recent call last):"),
        (1.1, 0, "  File x"),
        (1.15, 1, "rank 1 goes on"),
        (1.2, 0, "    raise"),
        (1.3, 0, "engine.Broken: no room"),
    ]
    assert trouble(*lines) == (0, "engine.Broken: no room", "")
    assert trouble(*lines[:2]) == (0, "Traceback (most recent call last):", "")


def test_harmless_lines_are_no_trouble() -> None:
    for text in ("NCCL WARN ibv_query_port_speed failed on rocep1s0f1 errno 93", "slow Error of no harm", "loading"):
        assert trouble((1.0, 0, text)) is None


def test_phases() -> None:
    phases = [
        Phase(name="loading", pattern=r"layers (?P<done>\d+)( of (?P<total>\d+))?"),
        Phase(name="ready", pattern="^up$"),
    ]
    assert [match_phase(text, phases) for text in ("layers 3 of 9", "layers 4", "up", "else")] == [
        "loading 3/9",
        "loading 4",
        "ready",
        "",
    ]


def test_moments_and_processes() -> None:
    assert parse_moment("1970-01-01T00:01:00.5Z") == 60.5
    assert parse_moment("1970-01-01T01:01:00+01:00") == 60.0
    assert parse_moment("0001-01-01T00:00:00Z") is None
    assert parse_moment("") is None
    (process,) = parse_top({"Processes": [["7", "Tl", "engine", "serve"]]})
    assert (process.pid, process.command, process.works) == (7, "engine serve", False)
