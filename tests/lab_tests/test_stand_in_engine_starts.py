"""The lab's stand-in engine: how a pair starts, ends, and loses a rank."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.lab_tests.stand_in_pair import ENGINE, MEMINFO, Pair, wait_until, write_model


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A pair of this test's own, not started."""
    own = Pair(tmp_path)
    try:
        yield own
    finally:
        own.stop()


def test_memory_goes_down_while_loading_and_comes_back(pair: Pair) -> None:
    pair.script(meminfo_gib=99, hang_at={"at": "loading"})
    inode = pair.meminfo(1).stat().st_ino
    pair.start()
    wait_until(lambda: all("hangs here" in pair.log(rank) for rank in (0, 1)))
    assert 50_000_000 < pair.available_kib(1) < 117_000_000
    pair.script(meminfo_gib=99)
    wait_until(lambda: "serving flash" in pair.log(0))
    assert pair.available_kib(0) == pytest.approx(118_000_000 - 99 * 1024 * 1024, abs=100)
    assert pair.meminfo(1).stat().st_ino == inode
    pair.ranks[0].send_signal(signal.SIGTERM)
    assert (pair.exit_code(0), pair.exit_code(1)) == (0, 0)
    assert "rank 0 has stopped; stopping too" in pair.log(1)
    assert [pair.meminfo(rank).read_text() for rank in (0, 1)] == [MEMINFO, MEMINFO]


def test_the_second_start_finds_the_cache_and_the_memory_of_a_killed_rank(pair: Pair) -> None:
    pair.script(load_seconds_first=1.5, load_seconds_later=0.1, rank_cache_bytes=50_000)
    pair.start()
    wait_until(lambda: ".partial" in " ".join(path.name for path in (pair.folder / "cache0").iterdir()))
    wait_until(lambda: "serving flash" in pair.log(0))
    assert "to be written" in pair.log(0)
    (cache,) = (pair.folder / "cache0").iterdir()
    assert cache.name.startswith("rank0of2-")
    assert cache.stat().st_size == 50_000
    for rank in (0, 1):
        pair.ranks[rank].kill()
        pair.ranks[rank].wait()
    assert pair.available_kib(0) < 20_000_000
    pair.start_and_wait()
    assert "rank cache found" in pair.log(0)
    pair.ranks[0].terminate()
    pair.exit_code(0)
    assert pair.meminfo(0).read_text() == MEMINFO


def test_losing_rank_1_breaks_the_lane_and_leaves_http_up(pair: Pair) -> None:
    pair.script(decode_tokens_per_second=20)
    pair.start_and_wait()
    answers: list[int] = []
    running = threading.Thread(target=lambda: answers.append(pair.chat("Count from 1 to 500.").status_code))
    running.start()
    wait_until(lambda: pair.metrics()["tensorfold:requests_running"] == 1)
    pair.ranks[1].kill()
    running.join()
    assert answers == [500]
    wait_until(lambda: "the lane is broken (rank 1:" in pair.log(0))
    assert "every step fails from now on" in pair.log(0)
    response = pair.chat("What is 17*19?")
    assert response.status_code == 500
    assert "this lane lost a rank (" in response.json()["error"]["message"]
    assert pair.log(0).count("restart it on every rank") == 2
    assert pair.client.get("/health").json()["ok"] is True
    assert pair.client.get("/v1/models").json()["data"][0]["id"] == "flash"
    pair.ranks[0].terminate()
    assert pair.exit_code(0) == 0


def test_rank_1_ends_with_an_error_when_rank_0_dies(pair: Pair) -> None:
    pair.start_and_wait()
    pair.ranks[0].kill()
    assert pair.exit_code(1) == 1
    assert "the lane is broken (rank 0:" in pair.log(1)
    assert pair.meminfo(1).read_text() == MEMINFO


def test_a_silent_rank_1_is_lost_after_the_heartbeat(pair: Pair) -> None:
    pair.script(heartbeat_seconds=2)
    pair.start_and_wait()
    pair.ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: "the lane is broken (rank 1: no heartbeat for 2 s)" in pair.log(0))
    assert pair.chat("17*19").status_code == 500


@pytest.mark.parametrize("place", ["before_rendezvous", "loading", "after_ready"])
def test_scripted_exits(pair: Pair, place: str) -> None:
    word = "torch.OutOfMemoryError: CUDA out of memory"
    patience = 1.5 if place == "before_rendezvous" else 30
    fault = {"at": place, "rank": 1, "code": 70, "log": ["Traceback:", word]}
    pair.script(exit_at=fault, rendezvous_timeout_seconds=patience)
    pair.start()
    assert pair.exit_code(1) == 70
    assert f"Traceback:\n{word}\n" in pair.log(1)
    assert pair.meminfo(1).read_text() == MEMINFO
    if place == "after_ready":
        wait_until(lambda: "the lane is broken" in pair.log(0))
        assert pair.ranks[0].poll() is None
        return
    assert pair.exit_code(0) == 1
    assert ("1/2 clients joined" if place == "before_rendezvous" else "NCCL error 6") in pair.log(0)


def test_a_late_rank_0_is_nccl_error_6_on_rank_1(pair: Pair) -> None:
    pair.script(rendezvous_timeout_seconds=0.5)
    pair.launch(1)
    assert pair.exit_code(1) == 1
    assert "NCCL error 6" in pair.log(1)


@pytest.mark.parametrize("place", ["loading", "after_ready"])
def test_scripted_hangs(pair: Pair, place: str) -> None:
    pair.script(hang_at={"at": place, "rank": 1}, log_lines=["an odd line"], heartbeat_seconds=2)
    pair.start()
    if place == "loading":
        wait_until(lambda: "hangs here" in pair.log(1))
        wait_until(lambda: "allocator ceiling" in pair.log(0))
        assert [pair.ranks[rank].poll() for rank in (0, 1)] == [None, None]
        assert "an odd line\n" in pair.log(1)
        pair.script()
        wait_until(lambda: "serving flash" in pair.log(0))
    else:
        wait_until(lambda: "no heartbeat for 2 s" in pair.log(0))
        assert pair.ranks[1].poll() is None


def test_sigterm_while_loading_and_ignored_sigterm(pair: Pair) -> None:
    pair.script(load_seconds_first=20)
    pair.start()
    wait_until(lambda: pair.available_kib(0) < 118_000_000)
    pair.script(load_seconds_first=20, ignore_sigterm=True)
    pair.ranks[0].terminate()
    wait_until(lambda: "SIGTERM ignored" in pair.log(0))
    pair.script(load_seconds_first=20)
    pair.ranks[0].terminate()
    assert pair.exit_code(0) == 143
    assert pair.exit_code(1) == 1
    assert [pair.meminfo(rank).read_text() for rank in (0, 1)] == [MEMINFO, MEMINFO]


def test_different_settings_are_refused_on_both(pair: Pair) -> None:
    pair.launch(1, "--parallel", "2")
    pair.launch(0)
    assert (pair.exit_code(0), pair.exit_code(1)) == (1, 1)
    for rank in (0, 1):
        assert "--vision and --parallel must be the same on every rank" in pair.log(rank)


def test_different_weights_are_refused_on_both(pair: Pair, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    (other / "chat_template.jinja").write_text("other")
    pair.launch(1, model=other)
    pair.launch(0)
    assert (pair.exit_code(0), pair.exit_code(1)) == (1, 1)
    assert "the model files must be the same on every rank" in pair.log(1)


def test_missing_tables_give_a_warning_and_wrong_answers(pair: Pair) -> None:
    pair.start_and_wait(env={"TF_DS_ENGRAM": str(pair.folder / "nowhere")})
    assert "WARNING: no Engram tables (TF_DS_ENGRAM)" in pair.log(0)
    assert pair.says("What is 17*19?") == "656"


def test_short_and_missing_weights(pair: Pair) -> None:
    shard = pair.model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    pair.launch(1)
    assert pair.exit_code(1) == 1
    assert f"{shard}: " in pair.log(1)
    (pair.model / "chat_template.jinja").unlink()
    pair.launch(1)
    assert pair.exit_code(1) == 1
    assert "chat_template.jinja" in pair.log(1)


def test_api_key(pair: Pair, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# ours\nlab: s3cret\n")
    key_file.chmod(0o644)
    pair.launch(0, "--api-key-file", str(key_file))
    assert pair.exit_code(0) == 1
    assert "mode 0644" in pair.log(0)
    key_file.chmod(0o600)
    pair.start_and_wait(env={"TF_API_KEY_FILE": str(key_file)})
    assert pair.client.get("/health").json() == {"status": "ok"}
    assert [pair.client.get(route).status_code for route in ("/v1/models", "/metrics")] == [401, 401]
    pair.client.headers["Authorization"] = "Bearer s3cret"
    assert pair.says("17*19") == "323"
    assert "s3cret" not in pair.log(0)


def test_what_the_command_line_refuses(pair: Pair) -> None:
    pair.launch(0, "--unheard-of", "1")
    assert pair.exit_code(0) == 2
    assert "unrecognized arguments: --unheard-of" in pair.log(0)
    pair.script(unheard_of=1)
    pair.launch(0)
    assert pair.exit_code(0) == 2
    assert "unknown key unheard_of" in pair.log(0)
    shown = subprocess.run(
        [ENGINE / "bin" / "tensorfold", "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert all(flag in shown.stdout for flag in ("--master-port", "--mtp-drafts", "--no-thinking", "--api-key-file"))


def test_an_interface_that_the_node_lacks_is_refused(pair: Pair) -> None:
    pair.launch(1, env={"NCCL_SOCKET_IFNAME": "enp1s0f1np1"})
    assert pair.exit_code(1) == 1
    assert "no socket interface found" in pair.log(1)


def test_no_http(pair: Pair) -> None:
    pair.script(no_http=True)
    pair.start()
    wait_until(lambda: "engine ready" in pair.log(0))
    with pytest.raises(httpx.ConnectError):
        pair.client.get("/health")
