"""What an attacker or a new user does: odd paths, locks, streams, terminals and accounts; never a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.refusal import LOCK, refused
from tests.lab.pair import HOME, SOURCE, Pair

pytestmark = pytest.mark.faults
PROGRAM = str(SOURCE / ".venv/bin/sparkserve")


def shell(pair: Pair, script: str, user: str = "spark") -> tuple[int, str]:
    """Run a script in the owner's home, where S is our command; gives its exit code and both streams."""
    argv = ["bash", "-c", f"S={PROGRAM}; cd {HOME}; exec 2>&1; {script}"]
    done = pair.head.run(argv, user=user, check=False, timeout=120)
    text = done.stdout.decode()
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    assert "bug in sparkserve" not in text, text
    return done.returncode, text


# -- the lock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", "garbage", "[1, 2]", "\0\1", "\u00ff", "{" * 5000])
def test_garbage_in_the_lock_file(locked: Pair, text: str) -> None:
    good = locked.head.run(["cat", LOCK]).stdout
    locked.write(LOCK, text)
    try:
        for command in ("up", "status"):
            code, errors = refused(locked, command)
            assert (code, errors[0]["code"]) == (2, "lock_broken")
            assert "sparkserve lock --update" in errors[0]["hint"]
    finally:
        locked.write(LOCK, good)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"recipe": "lab"', '"recipe": "other"', "lock_differs"),
        ('"path": "config.json"', '"path": "../../.ssh/authorized_keys"', "lock_broken"),
        ('"path": "config.json"', '"path": "/etc/passwd"', "lock_broken"),
        ('"commit": "', '"commit": "../', "lock_broken"),
        ('"size": 1', '"size": -1', "lock_broken"),
        ("smart-git/engine.git", "smart-git/evil.git", "lock_differs"),
    ],
)
def test_a_lock_that_someone_changed(locked: Pair, old: str, new: str, code: str) -> None:
    good = locked.head.run(["cat", LOCK]).stdout.decode()
    assert old in good
    locked.write(LOCK, good.replace(old, new))
    try:
        exit_code, errors = refused(locked, "up")
    finally:
        locked.write(LOCK, good)
    assert (exit_code, {error["code"] for error in errors}) == (2, {code})


@pytest.mark.parametrize("harm", ["chmod 000 {lock}", "mv {lock} {lock}.kept; mkdir {lock}"])
def test_a_lock_that_cannot_be_read(locked: Pair, harm: str) -> None:
    shell(locked, harm.format(lock=LOCK))
    try:
        code, errors = refused(locked, "up")
    finally:
        shell(locked, f"chmod 644 {LOCK}; test -d {LOCK} && rmdir {LOCK} && mv {LOCK}.kept {LOCK}")
    assert (code, errors[0]["code"]) == (2, "lock_unreadable")


# -- paths ------------------------------------------------------------------------------------------------------------


def test_odd_names_of_directories(pair: Pair) -> None:
    odd = """it's "a" $HOME; `x` dir"""
    shell(pair, """mkdir -p "odd place/my recipe's"; cp -r recipes/lab/. "odd place/my recipe's/" """)
    quoted = f"'{HOME}/{odd}'".replace("it's", "its")
    pair.write_settings(
        SPARKSERVE_RECIPE=f'"{HOME}/odd place/my recipe\'s"',
        SPARKSERVE_MODELS_DIR=quoted,
        SPARKSERVE_CACHE_DIR=f'"{HOME}/cache of ours"',
    )
    answer = pair.ask("up")
    assert answer["exit_code"] == 0, answer["errors"]
    assert pair.ask("up", "--check")["data"]["changes"] == []
    assert pair.ask("status")["data"]["state"] == "running"
    assert pair.ask("stop")["exit_code"] == 0
    for node in pair.lab.nodes:
        assert sorted(path.name for path in (node.root / HOME[1:]).glob("its*")) == [odd.replace("it's", "its")]
        node.run(["sh", "-c", "rm -rf ~/its* ~/'cache of ours' ~/'odd place'"])


def test_a_settings_file_from_windows(locked: Pair) -> None:
    text = "\ufeff" + "".join(f"{name}={value}\r\n" for name, value in locked.settings().items())
    locked.write(f"{HOME}/.env", text)
    assert locked.ask("status")["data"]["state"] == "stopped"


# -- streams and terminals --------------------------------------------------------------------------------------------


def test_streams_that_are_closed_or_full(locked: Pair) -> None:
    for script, code in (
        ("$S config | head -1", 0),
        ("$S up --dry-run --json | true", 0),
        ("$S status >&-", 5),
        ("$S status 2>&-", 5),
        ("$S status >&- 2>&- <&-", 5),
        ("$S status >/dev/full", 1),
        ("$S config --json >/dev/full", 1),
        ("$S nosuch >/dev/full 2>/dev/full", 1),
    ):
        assert (script, shell(locked, script)[0]) == (script, code)


@pytest.mark.parametrize(
    "environment",
    ["env -u HOME", "env -u TERM", "TERM=dumb", "NO_COLOR=1", "COLUMNS=60", "LC_ALL=C PYTHONUTF8=0", "env -i"],
)
def test_odd_environments(locked: Pair, environment: str) -> None:
    code, text = shell(locked, f"{environment} $S status")
    assert code == 5, text
    assert text.startswith("stopped: ")
    code, text = shell(locked, f"{environment} $S config")
    assert code == 0, text


@pytest.mark.parametrize("environment", ["TERM=xterm", "TERM=dumb", "NO_COLOR=1 TERM=xterm"])
def test_a_narrow_terminal(locked: Pair, environment: str) -> None:
    code, text = shell(locked, f"script -qec 'stty cols 60; env {environment} '$S' status; exit $?' /dev/null")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "stopped" in plain
    width = 80 if environment == "TERM=dumb" else 60  # nothing is believed of a dumb terminal
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= width
    assert (plain == text) == (environment == "TERM=dumb")
    assert code == 5


# -- accounts and places that cannot be written -----------------------------------------------------------------------


@contextmanager
def read_only_home(pair: Pair) -> Iterator[None]:
    pair.head.run(["sh", "-c", f"mount --bind {HOME} {HOME} && mount -o remount,ro,bind {HOME}"], user="root")
    try:
        yield
    finally:
        pair.head.run(["umount", HOME], user="root")


def test_a_home_that_cannot_be_written(locked: Pair) -> None:
    with read_only_home(locked):
        assert shell(locked, "$S status")[0] == 5
        assert shell(locked, "$S stop")[0] == 0
        code, text = shell(locked, "$S up")
        assert code in (1, 2, 3)
        assert "error: " in text
        assert "hint: " in text
        code, text = shell(locked, "$S lock --update")
        assert code == 1, "neither the lock nor the head's state can be written"
        assert "hint: " in text


def test_a_pair_that_serves_is_seen_where_nothing_can_be_written(steady: Pair) -> None:
    steady.head.run(["rm", "-f", f"{HOME}/.local/state/sparkserve/trend.json"])
    with read_only_home(steady):
        code, text = shell(steady, "$S status")
        assert (code, text.split(":")[0]) == (0, "running"), text


def test_root_is_another_account_with_its_own_known_hosts(locked: Pair) -> None:
    code, text = shell(locked, "HOME=/root $S status", user="root")
    assert code == 6
    assert "not in known_hosts" in text


# -- every command ----------------------------------------------------------------------------------------------------

COMMANDS = ("config", "lock", "download", "sync", "template", "build", "tune", "start", "up", "verify", "status",
            "stop", "logs")  # fmt: skip
MISTAKES = ("nosuch", "up --bogus", "up extra", "logs --rank 7", "logs --since x", "logs --grep [", "up --skip build",
            "start --recipe nosuch", "up --env-file nosuch", "--json", "up --recipe")  # fmt: skip


def test_json_is_one_object_for_every_command(locked: Pair) -> None:
    for command in COMMANDS:
        done = locked.sparkserve(command, "--json", *(["--dry-run"] if command in ("up", "start") else []))
        found = json.loads(done.stdout)
        assert (found["schema"], found["command"], found["exit_code"]) == (1, command, done.returncode)
        assert (found["status"] == "ok") == (done.returncode == 0), found
        assert b"Traceback" not in done.stderr


def test_mistakes_on_the_command_line_are_usage_errors(locked: Pair) -> None:
    for words in MISTAKES:
        done = locked.sparkserve(*words.split(), "--json")
        found = json.loads(done.stdout)
        assert (words, found["exit_code"], done.returncode) == (words, 2, 2), found
        assert found["errors"][0]["message"]
        assert found["errors"][0]["hint"], words


def test_an_interrupt_at_any_moment_is_no_traceback(locked: Pair) -> None:
    for command in ("config", "lock --update", "status", "up --dry-run", "stop", "logs", "verify"):
        for delay in (0.25, 0.6, 1.0):
            code, text = shell(locked, f"timeout --preserve-status -s INT {delay} $S {command}")
            assert code in (0, 1, 3, 4, 5, 130), (command, delay, code, text)
