"""The downloader against a hub that misbehaves in every way we know of."""

from __future__ import annotations

import fcntl
import re
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sparkserve.download import download
from sparkserve.errors import SparkserveError
from sparkserve.hub_file import Hub as HubClient
from sparkserve.hub_file import Source
from sparkserve.plan import Cancelled
from sparkserve.web import Exchange, Limits, Stopped, StopSign, Turns
from tests.component.weights_stage import (
    FILE,
    QUICK,
    SEGMENT,
    Recorder,
    body_bytes,
    client,
    fetch,
    refused,
    serving,
    wait_until,
    wanted,
)
from tests.lab.hub import Hub
from tests.lab.model_repo import BENCH_NAME, make_bench_repo
from tests.lab.repo_store import ModelRepo

SIZE = 20 * SEGMENT + 777
CONTENT = {"host": "content"}
TOKEN = "hf_stage_token"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    made = make_bench_repo(tmp_path_factory.mktemp("repos"), [SIZE])
    entries = list(made.entries(made.head).values())
    entries += [made.store("config.json", [b'{"a": 1}'], lfs=False), made.store("empty.txt", [b""], lfs=False)]
    entries += [made.store("a dir/ü#%?.bin", [b"odd name" * 999], lfs=True)]
    made.commit(entries)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hidden" / "partial"


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if FILE in thread.name or "hash of" in thread.name]


@pytest.mark.parametrize("name", [FILE, "config.json", "empty.txt", "a dir/ü#%?.bin"])
def test_every_kind_of_file_arrives(hub: Hub, repo: ModelRepo, path: Path, name: str) -> None:
    work = fetch(client(hub), repo, path, name)
    assert body_bytes(hub) == repo.source(name).stat().st_size
    assert all(done <= total for done, total in work.seen)


def test_segments_come_over_several_connections_and_reuse_them(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.control(connection_rate=2_000_000)
    fetch(client(hub), repo, path)
    served = [entry for entry in hub.log() if entry["host"] == "content"]
    assert len(served) > 10
    overlapping = max(sum(e["time"] <= s["time"] < e["time"] + e["seconds"] for e in served) for s in served)
    assert overlapping == QUICK.connections


def test_a_redirect_inside_the_hub_is_followed(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.control(plain_redirect=True)
    fetch(client(hub), repo, path, "config.json")
    assert any("resolve-cache" in entry["path"] for entry in hub.log())


def test_token_is_never_shown_to_the_host_of_the_redirect(repo: ModelRepo, path: Path) -> None:
    with serving(repo.root, token=TOKEN) as hub:
        fetch(client(hub, hf_token=TOKEN), repo, path)
        seen = {(entry["host"], entry["had_token"]) for entry in hub.log()}
    assert seen == {("hub", True), ("content", False)}


@pytest.mark.parametrize(
    ("access", "token", "expected"),
    [
        ("token", None, ("hub_login", "HF_TOKEN")),
        ("token", "hf_wrong_token", ("hub_token", "HF_TOKEN")),
        ("gated", TOKEN, ("hub_gated", "accept its terms")),
    ],
)
def test_refusals_say_what_to_do(
    repo: ModelRepo, path: Path, access: str, token: str | None, expected: tuple[str, str]
) -> None:
    with serving(repo.root, token=TOKEN) as hub:
        hub.control(access={BENCH_NAME: access})
        error = refused(client(hub, hf_token=token), repo, path)
        assert sum(entry["host"] == "hub" for entry in hub.log()) <= QUICK.connections  # nothing was tried again
    assert error.code == expected[0]
    assert expected[1] in error.hint
    assert "hf_wrong_token" not in f"{error.message}{error.hint}{error.details}"


def test_a_missing_file_names_file_and_commit(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("status", match={"path_regex": "resolve"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
    error = refused(client(hub), repo, path)
    assert error.code == "hub_file_missing"
    assert FILE in error.message
    assert repo.head[:8] in error.message


def test_a_stall_near_the_end_costs_one_segment_at_most(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("stall", match={**CONTENT, "covers": int(SIZE * 0.99)}, at_fraction=0.5, times=1)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) <= SIZE + 2 * SEGMENT


def test_what_came_before_a_stall_is_not_fetched_again(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("stall", match={**CONTENT, "covers": SIZE - 1}, at_byte=SEGMENT // 2, times=1)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) == SIZE


def test_a_server_that_only_drips_is_given_up(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.control(connection_rate=5)  # a byte every 0.2 s, half of what a read waits for
    work = Recorder()
    patience = threading.Timer(15, work.cancelled.set)
    patience.start()
    with pytest.raises(SparkserveError, match=r"gave less than 1024 bytes in 0\.4 s") as caught:
        download(client(hub), wanted(repo, FILE), path, work)
    patience.cancel()
    assert caught.value.code == "stalled"


def test_a_stall_for_ever_is_an_error_and_keeps_what_came(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("stall", match={**CONTENT, "covers": SIZE - 1}, at_byte=0)
    error = refused(client(hub), repo, path)
    assert (error.code, "0.4 s" in error.message) == ("stalled", True)
    hub.control(clear_faults=True)
    before = body_bytes(hub)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) - before < SIZE / 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_in_the_middle_goes_on_where_it_was(hub: Hub, repo: ModelRepo, path: Path, reset: bool) -> None:
    hub.fault("cut", match=CONTENT, at_fraction=0.5, times=6, reset=reset)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) <= SIZE + 6 * SEGMENT


def test_a_server_that_always_cuts_at_once_is_given_up(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("cut", match=CONTENT, at_byte=0)
    assert refused(client(hub), repo, path).code in ("connection_cut", "cut_short")


def test_ranges_beyond_the_file_and_short_files_are_told_with_both_sizes(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("short", match=CONTENT, at_byte=SIZE - 5 * SEGMENT)  # the ranges behind it answer 416
    error = refused(client(hub), repo, path)
    assert error.code == "wrong_size"
    assert f"{SIZE - 5 * SEGMENT} bytes" in error.message
    assert str(SIZE) in error.message


def test_a_range_refused_once_is_asked_for_again(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("status", match=CONTENT, status=416, headers={"Content-Range": "bytes */0"}, times=1)
    fetch(client(hub), repo, path)


def test_retry_after_is_obeyed_by_all_connections(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.control(rate=SIZE)  # without the pause it goes on for more than a second
    hub.fault("status", match=CONTENT, status=429, headers={"Retry-After": "1"}, times=1)
    fetch(client(hub, replace(QUICK, span_segments=1, connections=4)), repo, path)
    (refusal,) = [entry for entry in hub.log() if entry["status"] == 429]
    answered = refusal["time"] + refusal["seconds"]
    begun = [entry["time"] - answered for entry in hub.log()]
    # What was on its way already may still come in.
    assert [seconds for seconds in begun if 0.3 < seconds < 0.99] == []
    assert len([seconds for seconds in begun if seconds >= 0.99]) > 4


def test_retry_after_beyond_reason_is_an_error(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("status", match={"host": "hub"}, status=429, headers={"Retry-After": "3600"})
    error = refused(client(hub), repo, path)
    assert (error.code, "3600 s" in error.message) == ("hub_limit", True)


@pytest.mark.parametrize("host", ["hub", "content"])
def test_a_server_that_is_down_for_a_while(hub: Hub, repo: ModelRepo, path: Path, host: str) -> None:
    hub.fault("status", match={"host": host}, status=503, times=8)
    fetch(client(hub), repo, path)


def test_a_short_retry_after_does_not_shorten_our_own_patience(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("status", match={"host": "hub"}, status=503, headers={"Retry-After": "1"})
    threading.Timer(2.5, hub.control, kwargs={"clear_faults": True}).start()
    patient = replace(QUICK, connections=1, tries=3, first_wait=2.0, longest_wait=2.0)
    fetch(client(hub, patient), repo, path, "config.json")


def test_a_hub_that_is_down_for_two_minutes_is_waited_for() -> None:
    limits = Limits()
    waits = [min(limits.longest_wait, limits.first_wait * 2.0**number) for number in range(limits.tries - 1)]
    assert 0.75 * sum(waits) > 100


def test_a_server_that_stays_down_is_an_error(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("status", match=CONTENT, status=502)
    error = refused(client(hub), repo, path)
    assert "502" in error.message


def test_one_wrong_byte_is_noticed_and_fetched_again(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("wrong_byte", match=CONTENT, offset=3 * SEGMENT + 5, times=1)
    work = fetch(client(hub), repo, path)
    assert any("wrong content" in note for note in work.notes)
    assert body_bytes(hub) == 2 * SIZE


def test_wrong_bytes_for_ever_leave_nothing_behind(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("wrong_byte", match=CONTENT, offset=1)
    error = refused(client(hub), repo, path)
    assert error.code == "wrong_content"
    right = wanted(repo, FILE).file.digest
    assert FILE in error.message
    assert f"needed: {right}" in error.message
    assert error.message.count(right) == 1  # the observed one is another
    assert len(re.findall(r"[0-9a-f]{64}", error.message)) == 2
    assert list(path.parent.iterdir()) == []


def test_a_web_page_is_not_taken_for_the_file(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("html")
    error = refused(client(hub), repo, path)
    assert (error.code, "web page" in error.message) == ("not_data", True)
    assert b"html" not in path.read_bytes()


def test_an_expired_link_is_resolved_anew(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("expire", match=CONTENT, times=3)
    fetch(client(hub), repo, path)
    assert sum(entry["host"] == "hub" for entry in hub.log()) >= 2
    assert any(entry["status"] == 403 for entry in hub.log())


def test_links_that_never_open_are_given_up(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.control(signature_seconds=-1)
    error = refused(client(hub), repo, path)
    assert (error.code, "403" in error.message) == ("link_refused", True)
    assert "Signature" not in f"{error.message}{error.hint}{error.details}"


def test_a_server_that_ignores_ranges_gives_the_file_in_one_stream(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("ignore_range", match=CONTENT)
    work = fetch(client(hub), repo, path)
    assert any("ignores ranges" in note for note in work.notes)


def wait_until_full(exchange: Exchange) -> None:
    """Wait until no more bytes fit into the socket of an answer that nobody reads."""
    seen = [0]

    def unchanged() -> bool:
        time.sleep(0.5)  # longer than the sender waits until it asks for room
        assert exchange._connection.sock is not None
        waiting = fcntl.ioctl(exchange._connection.sock.fileno(), termios.FIONREAD, bytes(4))
        seen.append(int.from_bytes(waiting, sys.byteorder))
        return 0 < seen[-1] == seen[-2]

    wait_until(unchanged)


def test_a_server_learns_at_once_that_an_answer_was_given_up(tmp_path: Path) -> None:
    """A shut socket that is read to its end and closed leaves the sender waiting for room for a minute."""
    size = 64 << 20  # more than any socket buffer holds
    repo = make_bench_repo(tmp_path, [size])
    with serving(repo.root) as hub:
        shared, stop = client(hub), StopSign()
        exchange, _ = Source(shared, wanted(repo, FILE), stop).open(0, size)
        with exchange:
            wait_until_full(exchange)
            stop.raise_it()
            while exchange.read_into(memoryview(bytearray(1 << 20))):
                pass
        shared.connections.close()
        wait_until(lambda: all(entry["done"] for entry in hub.state.log.entries()), 10)


def test_one_stream_survives_cuts(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("ignore_range", match=CONTENT)
    hub.fault("cut", match={**CONTENT, "covers": SIZE - 1}, at_fraction=0.5, times=2)
    hub.fault("cut", match={**CONTENT, "covers": SIZE - 1}, at_fraction=0.75, times=1)
    fetch(client(hub, replace(QUICK, connections=2)), repo, path)


def test_headers_that_a_mirror_loses_are_not_needed(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("drop_headers", names=["ETag", "X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit", "Accept-Ranges"])
    fetch(client(hub), repo, path)


def test_the_rate_limit_holds_over_all_connections(hub: Hub, repo: ModelRepo, path: Path) -> None:
    began = time.monotonic()
    fetch(client(hub, rate_limit=SIZE), repo, path)
    assert time.monotonic() - began >= 0.85


def test_a_proxy_of_the_environment_is_used(
    hub: Hub, repo: ModelRepo, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", hub.endpoint)
    monkeypatch.delenv("no_proxy", raising=False)
    shared = HubClient(client(hub).settings.model_copy(update={"hf_endpoint": "http://no-such-host.invalid"}), QUICK)
    fetch(shared, repo, path, "config.json")


def test_cancelling_ends_soon_also_when_the_server_is_silent(hub: Hub, repo: ModelRepo, path: Path) -> None:
    hub.fault("stall", match={**CONTENT, "covers": SIZE - 1}, at_byte=10)
    hub.fault("slow", match={**CONTENT, "path_regex": "lfs"}, seconds=30, times=1)
    work = Recorder()
    began: list[float] = []

    def cancel() -> None:
        began.append(time.monotonic())
        work.cancelled.set()

    threading.Timer(0.6, cancel).start()
    with pytest.raises(Cancelled):
        download(client(hub, replace(QUICK, read_seconds=60)), wanted(repo, FILE), path, work)
    assert time.monotonic() - began[0] < 25, "no silent server was waited for"
    assert threads_left() == []
    hub.control(clear_faults=True)
    before = body_bytes(hub)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) - before < SIZE / 2


def test_no_file_and_no_thread_stays_open(hub: Hub, repo: ModelRepo, path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    fetch(client(hub), repo, path)
    # The hub's side of a connection that we closed may live a moment longer.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    assert threads_left() == []


def test_connections_go_to_the_file_that_was_begun_first() -> None:
    turns, stop = Turns(1), StopSign()
    order: list[int] = []
    first, second = turns.begin(), turns.begin()

    def take(place: int) -> None:
        with turns.take(place, stop):
            order.append(place)

    with turns.take(first, stop):
        threads = [threading.Thread(target=take, args=(place,)) for place in (second, second, first)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(turns._waiting) == 3)
    for thread in threads:
        thread.join(10)
    assert order == [first, second, second]


def test_who_is_stopped_waits_for_no_turn_and_takes_none() -> None:
    turns, stop = Turns(1), StopSign()
    with turns.take(turns.begin(), stop):
        stop.raise_it()
        with pytest.raises(Stopped), turns.take(turns.begin(), stop):
            pytest.fail("took a turn that nobody gave")
    with turns.take(turns.begin(), StopSign()):
        assert not turns._waiting
