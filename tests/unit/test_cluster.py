from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkserve import cluster
from sparkserve.cluster import Cluster, Deployment, Node, connect, pair_lock
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, EXIT_USAGE, Failures, SparkserveError, flatten
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.planning import is_warm
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings, state_dir
from tests.fakes import FakeSession, make_cluster, make_node
from tests.unit.cases import ROOT
from tests.unit.deployments import make_lock

HOLDER = """
import sys, time
from pathlib import Path
from sparkserve.cluster import pair_lock
with pair_lock(Path(sys.argv[1]), "up"):
    print("held", flush=True)
    sys.stdin.read()
"""


def fail(code: str, exit_code: int = 1, *, after: float = 0.0) -> Callable[[], None]:
    def action() -> None:
        time.sleep(after)
        raise SparkserveError(code, f"{code} went wrong", exit_code=exit_code)

    return action


# -- both nodes -------------------------------------------------------------------------------------------------------


def test_both_nodes_are_asked_side_by_side() -> None:
    both = threading.Barrier(2)

    def meet(node: Node) -> str:
        both.wait(60)
        return f"{node.role} {node.rank}"

    assert make_cluster().on_both(meet) == {"head": "head 0", "worker": "worker 1"}


def test_both_failures_are_told_with_their_nodes() -> None:
    actions = {"head": fail("one", after=0.1), "worker": fail("two")}
    with pytest.raises(Failures) as caught:
        make_cluster().on_both(lambda node: actions[node.role]())
    assert [(error.code, error.node) for error in flatten(caught.value)] == [("one", "head"), ("two", "worker")]
    assert (caught.value.message, caught.value.exit_code) == ("2 problems", 1)


def test_one_failure_waits_for_the_other_node() -> None:
    done: list[str] = []

    def action(node: Node) -> str:
        if node.role == "worker":
            raise SparkserveError("bad", "went wrong")
        time.sleep(0.2)
        done.append(node.role)
        return "well"

    results, errors = make_cluster().try_both(action)
    assert (results, done, list(errors)) == ({"head": "well"}, ["head"], ["worker"])
    assert errors["worker"].node == "worker"


def test_could_not_look_outranks_the_rest() -> None:
    actions = {"head": fail("one"), "worker": fail("two", EXIT_COULD_NOT_LOOK)}
    with pytest.raises(Failures) as caught:
        make_cluster().on_both(lambda node: actions[node.role]())
    assert caught.value.exit_code == EXIT_COULD_NOT_LOOK


def test_a_bug_is_raised_as_it_is() -> None:
    def bug(node: Node) -> None:
        raise ZeroDivisionError(node.role)

    with pytest.raises(ZeroDivisionError):
        make_cluster().on_both(bug)


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_places_of_each_node() -> None:
    settings = Settings(worker_models_dir=Path("/data/models"), head_link="10.0.0.1", worker_link="10.0.0.2")
    head = FakeSession({"hello": {"home": "/home/a"}})
    worker = FakeSession({"hello": {"home": "/home/b"}})
    cluster = make_cluster(settings, head=head, worker=worker)
    places = {node.role: (node.models_dir, node.cache_dir, node.link_address) for node in cluster.nodes}
    assert places == {
        "head": ("/home/a/sparkserve/models", "/home/a/sparkserve/cache", "10.0.0.1"),
        "worker": ("/data/models", "/home/b/sparkserve/cache", "10.0.0.2"),
    }
    assert cluster.head.proofs_file == "/home/a/sparkserve/models/.sparkserve/proofs.json"
    assert [do for do, _ in head.asked] == ["hello"]


@pytest.mark.parametrize(
    ("adopted", "place"),
    [(None, f"/m/org/name/{'1' * 40}/f"), (f'{{"org/name/{"1" * 40}/f": "/cache/blob"}}', "/cache/blob")],
)
def test_an_adopted_file_is_used_where_it_is(adopted: str | None, place: str) -> None:
    file = ManifestFile(path="f", size=1, sha256="a" * 64)
    manifest = Manifest(name="m", repository="org/name", commit="1" * 40, files=(file,))
    session = FakeSession({"hello": {"home": "/h"}, "facts": {"files": {"/m/.sparkserve/adopted.json": adopted}}})
    node = make_node("head", Settings(models_dir=Path("/m")), session=session)
    assert node.place(manifest, file) == place


@pytest.mark.parametrize("found", [True, False])
def test_a_finished_first_start_is_seen_without_reading_what_it_left(found: bool) -> None:
    recipe = load_recipe("tensorfold-1017")
    session = FakeSession({"hello": {"home": "/h"}, "facts": lambda exist: {"exist": dict.fromkeys(exist, found)}})
    node = make_node("head", session=session)
    assert is_warm(Deployment(node.settings, recipe, make_lock(recipe), Cluster(node, node)), node) is found
    assert session.asked[-1][1]["exist"][0].startswith("/h/sparkserve/cache/")


def test_no_worker_is_a_matter_of_settings() -> None:
    with pytest.raises(SparkserveError) as caught, connect(Settings()):
        pytest.fail("it connected to nobody")
    assert (caught.value.code, caught.value.exit_code) == ("worker_unset", EXIT_USAGE)
    assert caught.value.hint == "sparkserve init"


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"XDG_STATE_HOME": "/x"}, Path("/x/sparkserve")),
        ({"XDG_STATE_HOME": ""}, Path.home() / ".local/state/sparkserve"),
        ({}, Path.home() / ".local/state/sparkserve"),
    ],
)
def test_state_dir(environment: dict[str, str], place: Path) -> None:
    assert state_dir(environment) == place


# -- the one lock -----------------------------------------------------------------------------------------------------


def start_holder(directory: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    with start_holder(tmp_path / "state") as holder:
        with pytest.raises(SparkserveError) as caught, pair_lock(tmp_path / "state", "start"):
            pytest.fail("two hold the lock")
        holder.communicate()
    assert (caught.value.code, caught.value.exit_code) == ("locked", EXIT_NOT_READY)
    assert f"`sparkserve up`, process {holder.pid}, since " in caught.value.message
    with pair_lock(tmp_path / "state", "start"):
        assert f"`sparkserve start`, process {os.getpid()}" in (tmp_path / "state" / "lock").read_text()
    assert (tmp_path / "state" / "lock").read_text() == ""


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with start_holder(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        with pair_lock(tmp_path, "start", wait_seconds=60):
            pass


def test_waiting_for_the_lock(tmp_path: Path) -> None:
    with start_holder(tmp_path) as holder:
        assert holder.stdin is not None
        threading.Timer(0.3, holder.stdin.close).start()
        begun = time.monotonic()
        with pair_lock(tmp_path, "start", wait_seconds=60):
            assert 0.2 < time.monotonic() - begun < 50


def test_a_failure_inside_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), pair_lock(tmp_path, "up"):
        raise ZeroDivisionError
    with pair_lock(tmp_path, "up"):
        pass
    assert tmp_path.joinpath("lock").read_text() == ""


def test_threads_that_ask_a_node_at_once_share_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    head_waits = threading.Event()

    def slow(host: object) -> object:
        made.append(host)
        if host == "head":  # the other node's program does not wait for it
            assert head_waits.wait(60)
        return object()

    monkeypatch.setattr(cluster, "NodeSession", slow)
    head, worker = (Node(role, role, Settings()) for role in ("head", "worker"))  # type: ignore[arg-type]
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(head.session)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert worker.session is worker.session
    head_waits.set()
    for thread in threads:
        thread.join(60)
    assert made.count("head") == made.count("worker") == 1
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
