"""Each scripted fault does what it says, as often as it says, and nothing else."""

import hashlib
import threading
import time
from http.client import RemoteDisconnected
from pathlib import Path

import pytest
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, LocalEntryNotFoundError

from tests.lab.hub import Hub
from tests.lab.hub_faults import OPTIONS, parse_fault
from tests.lab.hub_rate import RateLimit
from tests.lab.model_repo import MODEL_NAME, make_bench_repo
from tests.lab.repo_store import ModelRepo
from tests.lab_tests.hub_client import SHARD, api, download, fetch, link_to, running_hub

CONTENT = {"host": "content", "path_regex": SHARD, "method": "GET"}
HALF = 500_000


@pytest.fixture
def source(repos: Path) -> bytes:
    """What the shard really holds."""
    return ModelRepo(repos, MODEL_NAME).source(SHARD).read_bytes()


def test_status_with_headers_and_body(hub: Hub, source: bytes) -> None:
    headers = {"Retry-After": "7"}
    hub.fault("status", match=CONTENT, times=1, status=429, headers=headers, body="slow down")
    link = link_to(hub)
    limited = fetch(link)
    assert (limited.status, limited.headers["Retry-After"], limited.body) == (429, "7", b"slow down")
    assert fetch(link).body == source
    assert [entry["faults"] for entry in hub.log()] == [[], ["status"], []]


@pytest.mark.parametrize("status", [401, 403, 404, 416])
def test_any_status_reaches_the_real_client(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.fault("status", match={"host": "hub", "path_regex": "config.json"}, status=status)
    with pytest.raises((HfHubHTTPError, LocalEntryNotFoundError)) as caught:
        download(hub, "config.json", tmp_path)
    error = caught.value if isinstance(caught.value, HfHubHTTPError) else caught.value.__cause__
    assert isinstance(error, HfHubHTTPError)
    assert error.response.status_code == status


def test_one_503_is_outlived_by_the_real_client(hub: Hub, repos: Path, tmp_path: Path) -> None:
    hub.fault("status", match={"host": "hub", "path_regex": "config.json"}, times=1, status=503)
    assert download(hub, "config.json", tmp_path).is_file()
    assert [entry["status"] for entry in hub.log()] == [503, 200, 200]


def test_cut_ends_the_body_early_and_the_real_client_asks_again(hub: Hub, source: bytes, tmp_path: Path) -> None:
    hub.fault("cut", match=CONTENT, times=1, at_byte=HALF)
    reply = fetch(link_to(hub))
    assert (reply.complete, reply.body) == (False, source[:HALF])
    assert reply.headers["Content-Length"] == str(len(source))
    hub.reset()
    hub.fault("cut", match=CONTENT, times=1, at_fraction=0.5)
    assert download(hub, SHARD, tmp_path).read_bytes() == source
    sent = [entry["bytes_sent"] for entry in hub.log() if entry["host"] == "content"]
    # It buffers 10 MB before it counts a byte as received, so it asks for all of a small file again.
    assert sent == [len(source) // 2, len(source)]


def test_cut_by_reset(hub: Hub) -> None:
    hub.fault("cut", match=CONTENT, times=1, at_byte=HALF, reset=True)
    with pytest.raises(ConnectionResetError):
        fetch(link_to(hub))
    assert hub.log()[-1]["bytes_sent"] == HALF


def test_cut_before_any_byte_of_a_listing(hub: Hub) -> None:
    hub.fault("cut", match={"path_regex": "/api/models/"}, times=1, at_byte=0)
    reply = fetch(f"{hub.endpoint}/api/models/{MODEL_NAME}")
    assert (reply.complete, reply.body) == (False, b"")


def test_stall_holds_the_connection_until_the_client_leaves(hub: Hub) -> None:
    hub.fault("stall", match=CONTENT, times=1, at_byte=HALF)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        fetch(link_to(hub), timeout=0.4)
    assert time.monotonic() - began >= 0.4
    assert hub.log()[-1]["bytes_sent"] == HALF


def test_stall_for_a_while_then_goes_on(hub: Hub, source: bytes) -> None:
    hub.fault("stall", match=CONTENT, times=1, at_fraction=0.9, seconds=0.3)
    link, began = link_to(hub), time.monotonic()
    assert fetch(link).body == source
    assert 0.3 <= time.monotonic() - began < 60
    assert fetch(link).body == source


def test_stop_does_not_wait_for_a_stalled_client(repos: Path) -> None:
    with running_hub(repos) as hub:
        hub.fault("stall", match=CONTENT, at_byte=HALF)
        replies: list[bool] = []
        link = link_to(hub)
        client = threading.Thread(target=lambda: replies.append(fetch(link, timeout=120).complete))
        client.start()
        deadline = time.monotonic() + 60
        while hub.state.log.entries()[-1]["bytes_sent"] < HALF and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    client.join(60)
    assert replies == [False]


def test_slow_first_byte(hub: Hub, source: bytes) -> None:
    hub.fault("slow", match=CONTENT, times=1, seconds=0.3)
    link, began = link_to(hub), time.monotonic()
    assert fetch(link).body == source
    assert time.monotonic() - began >= 0.3


def test_wrong_byte_only_where_it_lies(hub: Hub, source: bytes, tmp_path: Path) -> None:
    hub.fault("wrong_byte", match=CONTENT, times=2, offset=HALF)
    link = link_to(hub)
    assert fetch(link, Range="bytes=0-99").body == source[:100]
    wrong = fetch(link, Range=f"bytes={HALF - 1}-{HALF + 1}").body
    assert wrong == bytes([source[HALF - 1], source[HALF] ^ 0xFF, source[HALF + 1]])
    # The real client takes it for good: right size, wrong content.
    taken = download(hub, SHARD, tmp_path).read_bytes()
    assert len(taken) == len(source)
    assert hashlib.sha256(taken).digest() != hashlib.sha256(source).digest()
    assert fetch(link).body == source


def test_covers_picks_one_range_of_many(hub: Hub, source: bytes) -> None:
    hub.fault("cut", match={**CONTENT, "covers": HALF}, at_byte=3)
    link = link_to(hub)
    assert fetch(link, Range="bytes=0-99").complete
    assert fetch(link, Range=f"bytes={HALF - 10}-{HALF + 10}").body == source[HALF - 10 : HALF - 7]


def test_short_file_agrees_with_itself(hub: Hub, source: bytes) -> None:
    hub.fault("short", match=CONTENT, at_byte=HALF)
    link = link_to(hub)
    reply = fetch(link)
    assert (reply.complete, reply.body, reply.headers["Content-Length"]) == (True, source[:HALF], str(HALF))
    assert fetch(link, Range="bytes=10-19").headers["Content-Range"] == f"bytes 10-19/{HALF}"
    assert fetch(link, Range=f"bytes={HALF}-").status == 416


def test_page_instead_of_data(hub: Hub) -> None:
    hub.fault("html", match=CONTENT, times=1)
    reply = fetch(link_to(hub))
    assert (reply.status, reply.headers.get_content_type()) == (200, "text/html")
    assert reply.body.startswith(b"<!doctype html>")
    hub.fault("html", match={"host": "hub"}, body="<p>portal</p>")
    assert fetch(f"{hub.endpoint}/api/models/{MODEL_NAME}").body == b"<p>portal</p>"


def test_ignored_range(hub: Hub, source: bytes) -> None:
    hub.fault("ignore_range", match=CONTENT, times=1)
    link = link_to(hub)
    reply = fetch(link, Range="bytes=10-19")
    assert (reply.status, reply.body) == (200, source)
    assert fetch(link, Range="bytes=10-19").body == source[10:20]


def test_expired_link_needs_resolving_again(hub: Hub, source: bytes) -> None:
    hub.fault("expire", match=CONTENT, times=1)
    link = link_to(hub)
    assert [fetch(link).status for _ in range(3)] == [403, 403, 403]
    assert fetch(link_to(hub)).body == source


def test_masked_hashes(hub: Hub) -> None:
    hub.fault("mask_hash", times=2)
    masked = api(hub).model_info(MODEL_NAME, files_metadata=True).siblings or []
    assert all(file.lfs is None and file.size for file in masked)
    (file,) = api(hub).get_paths_info(MODEL_NAME, [SHARD])
    assert file.lfs is None  # type: ignore[union-attr]
    again = api(hub).model_info(MODEL_NAME, files_metadata=True).siblings or []
    assert sum(file.lfs is not None for file in again) == 40


def test_listing_cut_in_silence(hub: Hub) -> None:
    hub.fault("cut_listing", match={"path_regex": "/tree/"}, times=1)
    assert len(list(api(hub).list_repo_tree(MODEL_NAME, recursive=True))) == 20
    assert len(list(api(hub).list_repo_tree(MODEL_NAME, recursive=True))) == 46
    hub.fault("cut_listing", times=1)
    assert len(api(hub).model_info(MODEL_NAME, files_metadata=True).siblings or []) == 20


def test_listing_cut_to_a_page_then_429(hub: Hub) -> None:
    hub.fault("status", match={"path_regex": r"/tree/.*cursor="}, status=429)
    first = fetch(f"{hub.endpoint}/api/models/{MODEL_NAME}/tree/main?recursive=true")
    assert first.status == 200
    following = first.headers["Link"].partition("<")[2].partition(">")[0]
    assert fetch(following).status == 429


@pytest.mark.parametrize("names", [["X-Repo-Commit"], ["ETag", "X-Linked-Etag"]])
def test_missing_headers(hub: Hub, tmp_path: Path, names: list[str]) -> None:
    hub.fault("drop_headers", match={"host": "hub", "path_regex": SHARD}, names=names)
    with pytest.raises((FileMetadataError, LocalEntryNotFoundError)) as caught:
        download(hub, SHARD, tmp_path)
    assert isinstance(caught.value, FileMetadataError) or isinstance(caught.value.__cause__, FileMetadataError)


def test_missing_length(hub: Hub, source: bytes) -> None:
    hub.fault("drop_headers", match=CONTENT, names=["content-length"])
    reply = fetch(link_to(hub))
    assert "Content-Length" not in reply.headers
    assert reply.body == source


def test_branch_moves_after_a_request(tmp_path: Path) -> None:
    repo = make_bench_repo(tmp_path, [100])
    first, second = repo.head, repo.change("file-00001.bin", b"moved")
    with running_hub(tmp_path) as hub:
        match = {"path_regex": "/api/models/"}
        hub.fault("move_branch", match=match, times=1, repo=repo.name, branch="main", commit=second)
        assert [api(hub).model_info(repo.name).sha for _ in range(2)] == [first, second]
        assert api(hub).model_info(repo.name, revision=first).sha == first
        hub.reset()
        assert api(hub).model_info(repo.name).sha == first
        hub.control(move_branch={"repo": repo.name, "branch": "main", "commit": second})
        assert api(hub).model_info(repo.name).sha == second


def test_rate_limit_holds_over_all_connections(hub: Hub, source: bytes) -> None:
    links, rate = [link_to(hub) for _ in range(4)], 4e6
    hub.control(rate=rate)
    began = time.monotonic()
    threads = [threading.Thread(target=fetch, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ideal = len(links) * len(source) / rate
    assert time.monotonic() - began > ideal * 0.9
    hub.control(rate=None)
    assert fetch(links[0]).body == source


def test_rate_limit_of_one_connection(hub: Hub, source: bytes) -> None:
    link = link_to(hub)
    hub.control(connection_rate=4e6)
    began = time.monotonic()
    fetch(link)
    assert time.monotonic() - began > len(source) / 4e6 * 0.7


def test_rate_can_change_while_something_waits() -> None:
    rates: list[float | None] = [10.0]
    limit, granted = RateLimit(lambda: rates[0]), 0
    threading.Timer(0.2, lambda: rates.__setitem__(0, None)).start()
    deadline = time.monotonic() + 60
    while granted < 1_000_000 and time.monotonic() < deadline:
        granted += limit.take(1_000_000 - granted)
    assert granted == 1_000_000


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"fault": "stal"}, "stal"),
        ({"fault": "stall", "at_bite": 3}, "at_bite"),
        ({"fault": "status"}, "status"),
        ({"fault": "cut", "match": {"path": "x"}}, "path"),
        ({"fault": "cut", "match": {"host": "cdn"}}, "cdn"),
    ],
)
def test_misspelt_faults_are_refused(spec: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_fault(spec)


def test_faults_of_another_path_do_nothing(hub: Hub, source: bytes) -> None:
    for kind in ("cut", "stall", "html", "expire", "short", "slow"):
        hub.fault(kind, match={"path_regex": "no-such-file"}, **({"seconds": 9} if "seconds" in OPTIONS[kind] else {}))
    assert fetch(link_to(hub)).body == source


def test_own_failure_of_the_hub_is_not_swallowed(repos: Path) -> None:
    hub = Hub(repos, hub_name="", content_name="").start()
    with pytest.raises(RemoteDisconnected):
        fetch(f"{hub.endpoint}/api/models/{MODEL_NAME}/tree/main?cursor=***")
    with pytest.raises(RuntimeError, match="the hub itself failed"):
        hub.stop()
