from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost, expand_home, mask, running, write_argv
from sparkserve.sudo_rules import frees
from tests.fakes import FakeHost, Unscripted
from tests.unit.cases import wait_for

WEIRD_WORDS = (
    "",
    " ",
    "two words",
    "tab\tand\nnewline\n",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${HOME} $$ !!",
    "a;b|c&d>e<f",
    "*?[a-z]{1,2}~",
    "\\ \\n \\\\",
    "#comment",
    "-rf",
    "--",
    "grüße 日本 🚀",
    "\x01\x7f",
    "x" * 20_000,
)
MEGABYTES = bytes(range(256)) * 40_960  # 10 MiB


@pytest.fixture
def host() -> LocalHost:
    return LocalHost("head")


def children(pattern: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if pattern in words:
            found.append(entry.parent.name)
    return found


def test_run_gives_both_streams_and_the_code(host: LocalHost) -> None:
    result = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.text, result.error_text) == ("out", "err")


def test_a_code_that_is_not_zero_raises_with_the_words_of_the_command(host: LocalHost) -> None:
    with pytest.raises(SparkserveError) as caught:
        host.run(["sh", "-c", "echo some; echo reason >&2; exit 7"])
    error = caught.value
    assert (error.code, error.node, error.details) == ("command_failed", "head", "reason")
    assert "exit code 7" in error.message
    with pytest.raises(SparkserveError) as caught:
        host.run(["sh", "-c", "echo only here; exit 1"])
    assert caught.value.details == "only here"


def test_weird_words_arrive_unchanged(host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = host.run(["printf", "%s\\0", *WEIRD_WORDS]).stdout
    assert answer == b"".join(word.encode() + b"\0" for word in WEIRD_WORDS)
    assert list(tmp_path.iterdir()) == []


def test_ten_megabytes_both_ways(host: LocalHost) -> None:
    assert host.run(["cat"], stdin=MEGABYTES, timeout=60).stdout == MEGABYTES


def test_much_on_stderr_blocks_nothing(host: LocalHost) -> None:
    script = "head -c 5000000 /dev/zero | tr '\\0' e >&2; echo last >&2; cat"
    result = host.run(["sh", "-c", script], stdin=b"in", timeout=60)
    assert (result.stdout, result.error_text[-4:]) == (b"in", "last")


def test_a_command_that_reads_nothing_ends_well(host: LocalHost) -> None:
    assert host.run(["true"], stdin=MEGABYTES, timeout=60).exit_code == 0


@pytest.mark.parametrize("stdin", [b"", MEGABYTES])
def test_timeout_ends_the_command_and_its_children(host: LocalHost, stdin: bytes) -> None:
    seconds = f"98.{os.getpid()}{len(stdin)}"
    begun = time.monotonic()
    with pytest.raises(SparkserveError, match=r"gave no end within 0\.5 s") as caught:
        host.run(["sh", "-c", f"sleep {seconds} & wait"], stdin=stdin, timeout=0.5)
    assert caught.value.code == "command_timeout"
    assert time.monotonic() - begun < 60
    wait_for(lambda: not children(seconds), "the child is gone")


def test_a_child_that_refuses_to_end_is_ended(host: LocalHost) -> None:
    seconds = f"97.{os.getpid()}"
    script = f"(trap '' TERM; sleep {seconds}) & wait"
    begun = time.monotonic()
    with pytest.raises(SparkserveError, match="gave no end"):
        host.run(["sh", "-c", script], timeout=0.3)
    assert time.monotonic() - begun < 60
    wait_for(lambda: not children(seconds), "the child is gone")


def test_a_command_that_closed_its_output_is_still_waited_for(host: LocalHost) -> None:
    begun = time.monotonic()
    with pytest.raises(SparkserveError, match="gave no end"):
        host.run(["sh", "-c", "exec >&- 2>&-; exec sleep 95"], timeout=0.5)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("tool", ["sparkserve-no-such-tool", "/nonexistent/tool", "/etc/passwd"])
def test_a_missing_tool_is_named(host: LocalHost, tool: str) -> None:
    with pytest.raises(SparkserveError, match=f"cannot run `{tool}`") as caught:
        host.run([tool, "x"], check=False)
    assert (caught.value.code, caught.value.node) == ("tool_missing", "head")


def test_running_ends_what_still_runs(host: LocalHost) -> None:
    seconds = f"96.{os.getpid()}"
    with running(host, ["sleep", seconds]) as process:
        wait_for(lambda: bool(children(seconds)), "it runs")
        with pytest.raises(TimeoutError):
            process.wait(0.05)
    assert children(seconds) == []


def test_interactive_exchange(host: LocalHost) -> None:
    with running(host, ["cat"]) as process:
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line
        process.stdin.close()
        assert process.wait(60) == 0


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "with space", "-x", "quo'te", "$(x)", "new\nline", "日本"])
@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)), MEGABYTES])
def test_write_and_read(host: LocalHost, tmp_path: Path, name: str, content: bytes) -> None:
    host.write(tmp_path / name, content)
    assert host.read(tmp_path / name) == content
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_mode_of_a_written_file(host: LocalHost, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    host.write(path, b"new", mode)
    assert (path.stat().st_mode & 0o777, path.read_text()) == (mode, "new")


def test_a_relative_name_with_a_dash(host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    host.write("-rf", b"x", 0o600)
    assert (tmp_path / "-rf").read_bytes() == host.read("-rf") == b"x"


def test_whoever_reads_sees_all_of_one_version(host: LocalHost, tmp_path: Path) -> None:
    path = tmp_path / "f"
    versions = {b"a" * 300_000, b"b" * 300_000}
    path.write_bytes(min(versions))
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for version in sorted(versions) * 5:
        host.write(path, version)
    stop.set()
    reader.join()
    assert seen <= versions


@pytest.mark.parametrize("arrived", [0, 1, 99])
def test_a_write_that_is_cut_leaves_the_old_file(host: LocalHost, tmp_path: Path, arrived: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    cut = host.run(write_argv(path, 0o644, 100), stdin=b"n" * arrived, check=False)
    assert (cut.exit_code == 0, path.read_bytes()) == (False, b"old")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["d", "none/f", "f/x"])
def test_a_place_that_takes_no_file_is_named(host: LocalHost, tmp_path: Path, name: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SparkserveError) as caught:
        host.write(tmp_path / name, b"x")
    assert (caught.value.code, caught.value.node, "df " in caught.value.hint) == ("file_unwritable", "head", True)
    assert re.fullmatch(f"cannot write {tmp_path / name}: .*[Dd]irectory.*", caught.value.message)
    assert sorted(tmp_path.rglob("*")) == before


def test_reading_what_is_not_there(host: LocalHost, tmp_path: Path) -> None:
    with pytest.raises(SparkserveError) as caught:
        host.read(tmp_path / "none")
    assert caught.value.code == "command_failed"
    assert "No such file" in caught.value.details


# -- sudo -------------------------------------------------------------------------------------------------------------


REFUSED = b"sudo: unable to resolve host spark\nsudo: a password is required\n"


def sudo_host(*, uid: bytes = b"1000\n") -> FakeHost:
    host = FakeHost("worker")
    host.script(["id", "-u"], uid, always=True)
    return host


def test_root_needs_no_sudo() -> None:
    host = sudo_host(uid=b"0\n")
    host.script(["tee", "/x"], b"in")
    assert host.sudo(["tee", "/x"], stdin=b"in").stdout == b"in"
    assert host.calls[-1].stdin == b"in"


def test_sudo_that_asks_nothing() -> None:
    host = sudo_host()
    host.script(["sudo", "-n", "--", "tee", "/x"])
    host.sudo(["tee", "/x"], stdin=b"in")
    assert host.calls[-1].stdin == b"in"


def test_the_password_goes_by_stdin_only() -> None:
    host = sudo_host()
    host.sudo_password = SecretStr("pa ss")
    host.script(["sudo", "-n", "--", "tee", "/x"], exit_code=1, stderr=REFUSED)
    host.script(["sudo", "-k", "-S", "-p", "", "--", "tee", "/x"])
    host.sudo(["tee", "/x"], stdin=b"in")
    assert host.calls[-1].stdin == b"pa ss\nin"
    assert not any("pa ss" in word for call in host.calls for word in call.argv)


def test_a_password_that_nobody_gave() -> None:
    host = sudo_host()
    host.script(["sudo", "-n", "--", "sysctl"], exit_code=1, stderr=REFUSED)
    with pytest.raises(SparkserveError) as caught:
        host.sudo(["sysctl"])
    assert (caught.value.code, caught.value.node, caught.value.exit_code) == ("sudo_password", "worker", 3)


def test_a_command_that_needs_no_password_never_gets_it_as_its_input() -> None:
    host = sudo_host()
    host.sudo_password = SecretStr("pa ss")
    host.script(["sudo", "-n", "--", "tee", "/x"])
    host.sudo(["tee", "/x"], stdin=b"in")
    assert host.calls[-1].stdin == b"in"


def test_a_command_that_fails_by_itself_asks_for_no_password() -> None:
    host = sudo_host()
    host.script(["sudo", "-n", "--", "tee", "/x"], exit_code=1, stderr=b"tee: /x: Read-only file system\n")
    with pytest.raises(SparkserveError) as caught:
        host.sudo(["tee", "/x"])
    assert caught.value.code == "command_failed"


def test_a_rule_for_other_paths_than_sudo_takes_leaves_a_password_to_be_asked() -> None:
    host = sudo_host()
    listing = b"User spark may run:\n    (ALL : ALL) ALL\n    (root) NOPASSWD: /usr/bin/true, /usr/bin/sysctl -w\n"
    host.script(["sudo", "-n", "--", "true"], always=True)
    host.script(["sudo", "-n", "-l"], listing, always=True)
    host.script(["sudo", "-n", "-l", "--", "true"], b"/usr/bin/true\n", always=True)
    host.script(["sudo", "-n", "-l", "--", "sysctl", "-w"], b"/usr/sbin/sysctl -w\n", always=True)
    assert host.find_locked([["true"], ["sysctl", "-w"]]) == "sysctl -w"
    assert host.asks_sudo_password([["sysctl", "-w"]])
    assert not host.asks_sudo_password([["true"]])


def test_a_wrong_password_is_tried_although_some_commands_need_none() -> None:
    host = sudo_host()
    host.sudo_password = SecretStr("wrong")
    host.script(["sudo", "-k", "-S", "-p", "", "-v"], exit_code=1, stderr=b"sudo: 1 incorrect password attempt\n")
    with pytest.raises(SparkserveError, match="refuses the password") as caught:
        host.check_sudo_password()
    assert caught.value.details == "sudo: 1 incorrect password attempt"


ALL, SYSCTL = "(ALL : ALL) ALL", r"(root) NOPASSWD: /usr/sbin/sysctl ^-q -w( (vm\.swappiness|vm\.x)=[-0-9]+)+$"
WRITE = "/usr/sbin/sysctl -q -w vm.swappiness=0 vm.x=1"
COMMAS = r"(root) NOPASSWD: /bin/a, /bin/b c\, d, PASSWD: /bin/e"


@pytest.mark.parametrize(
    ("rules", "command", "is_free"),
    [
        ([ALL], "/usr/bin/true", False),
        ([ALL, "(ALL) NOPASSWD: ALL"], "/usr/bin/true", True),
        (["(ALL) NOPASSWD: ALL", ALL], "/usr/bin/true", False),  # the last one holds
        ([ALL, SYSCTL], WRITE, True),
        ([ALL, SYSCTL.replace(" ^", "\n        ^")], WRITE, True),  # as sudo breaks a long line
        ([ALL, SYSCTL], "/usr/sbin/sysctl -q -w kernel.panic=1", False),
        ([ALL, SYSCTL], "/usr/bin/sysctl -q -w vm.x=1", False),
        (["(root) NOPASSWD: /bin/tee /x"], "/usr/bin/tee /x", True),
        (["(root) NOPASSWD: /usr/bin/tee"], "/usr/bin/tee /x", True),
        (["(root) NOPASSWD: /usr/bin/tee /y*"], "/usr/bin/tee /x", False),
        (['(root) NOPASSWD: /usr/bin/tee ""'], "/usr/bin/tee /x", False),
        (['(root) NOPASSWD: /usr/bin/tee ""'], "/usr/bin/tee", True),
        (["(anna) NOPASSWD: ALL"], "/usr/bin/tee", False),
        ([COMMAS], "/bin/b c, d", True),
        ([COMMAS], "/bin/e", False),
        (["(root) NOPASSWD: ALL, !/bin/e"], "/bin/e", False),
        (["env_reset, !authenticate", ALL], "/bin/e", True),
    ],
)
def test_what_the_rules_of_sudo_let_go_without_a_password(rules: list[str], command: str, is_free: bool) -> None:
    text = "".join(f"    {rule}\n" for rule in (r"env_reset, secure_path=/usr/sbin\:/bin", *rules))
    assert frees(f"Matching Defaults entries for spark on head:\n{text}", command) is is_free


# -- words ------------------------------------------------------------------------------------------------------------


def test_mask() -> None:
    secrets = [SecretStr("hf_abcdef"), None, SecretStr(""), SecretStr("abc")]
    assert mask("hf_abcdef and abc, hf_abcdef", secrets) == "*** and abc, ***"


@pytest.mark.parametrize(
    ("path", "expanded"),
    [("~/models", "/home/a/models"), ("/models", "/models"), ("~", "/home/a/"), ("~b/x", "~b/x"), ("a/~/b", "a/~/b")],
)
def test_expand_home(path: str, expanded: str) -> None:
    assert expand_home(Path(path), "/home/a") == expanded


def test_the_fake_is_strict() -> None:
    host = FakeHost()
    host.script(["a"], b"1")
    assert host.run(["a"]).stdout == b"1"
    with pytest.raises(Unscripted):
        host.run(["a"])
    host.script(["b"])
    with pytest.raises(Unscripted):
        host.close()
