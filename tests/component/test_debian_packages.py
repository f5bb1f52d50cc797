"""What installs the lab's Debian packages, or prints the one command that does; every tool of the machine is a stub."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cases import ROOT

WORDS = ("sh=dash", "no-such-tool=lacking", "no-such-daemon=lacking-too", "bare")
MISSING = "lacking lacking-too bare"
COMMAND = f"sudo sh -c 'apt-get update && apt-get install --yes --no-install-recommends {MISSING}'"
UPDATE = "apt-get update --quiet=2"
INSTALL = f"apt-get install --yes --quiet=2 --no-install-recommends {MISSING}"
STUBS = {
    "apt-get": '[ "$1" != "$FAILS" ]',
    "systemctl": '[ "$1" != cat ]',
    # As sudo does: without a password it is refused, or becomes root, which a stub is as it is.
    "sudo": '[ -z "$ASKS" ] || exit 1; [ "$1" = -n ] && shift; exec "$@"',
}
ROOT_ACCOUNT, NOBODY = 0, 65534


class Machine:
    """A folder that anybody can read: the checkout's scripts, and stubs that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self.log.chmod(0o666)
        (folder / "stubs").mkdir()
        for name, script in STUBS.items():
            self.put(name, f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{script}\n')
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        shutil.copy(ROOT / "Makefile", folder)
        for path in (folder / "Makefile", *(folder / ".ci").iterdir()):
            path.chmod(0o755)

    def put(self, name: str, text: str) -> None:
        path = self.folder / "stubs" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, account: int, *argv: str, path: str = "/usr/bin:/bin", **environment: str) -> tuple[int, str]:
        """Run it as an account; gives the exit code and what it said."""
        search = ":".join(filter(None, (str(self.folder / "stubs"), path)))
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env={"PATH": search, "FAILS": "", "ASKS": "", **environment},
            user=account,
            group=account,
            extra_groups=(),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        return done.returncode, done.stderr

    def packages(self, account: int, *words: str, **environment: str) -> tuple[int, str]:
        return self.run(account, "/bin/bash", ".ci/debian_packages.sh", *words, **environment)

    def calls(self, name: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.split()[0] == name]


@pytest.fixture
def machine() -> Iterator[Machine]:
    assert os.geteuid() == 0, "only root can take other accounts: sudo"
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to everybody else
        Path(folder).chmod(0o755)
        yield Machine(Path(folder))


@pytest.mark.parametrize("account", [ROOT_ACCOUNT, NOBODY])
def test_where_all_is_there_nothing_is_called(machine: Machine, account: int) -> None:
    assert machine.packages(account, "sh=dash", "bash=bash") == (0, "")
    assert machine.log.read_text() == ""


def test_root_installs_what_is_missing_and_nothing_else(machine: Machine) -> None:
    code, said = machine.packages(ROOT_ACCOUNT, *WORDS)
    assert (code, said) == (0, f"installing Debian packages: {MISSING}\n")
    assert machine.calls("apt-get") == [UPDATE, INSTALL]
    assert machine.calls("sudo") == []


def test_an_account_with_sudo_installs_by_it(machine: Machine) -> None:
    code, said = machine.packages(NOBODY, *WORDS)
    assert (code, said) == (0, f"installing Debian packages: {MISSING}\n")
    assert machine.calls("apt-get") == [UPDATE, INSTALL]
    asked = [line for line in machine.calls("sudo") if "apt-get" in line]
    assert asked == [f"sudo {UPDATE}", f"sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 {INSTALL}"]


def test_whom_sudo_asks_for_a_password_gets_the_one_command(machine: Machine) -> None:
    code, said = machine.packages(NOBODY, *WORDS, ASKS="yes")
    assert (code, said) == (1, f"missing: {MISSING}. This command installs them: {COMMAND}\n")
    assert machine.calls("apt-get") == []


def test_a_machine_without_apt_gets_the_names(machine: Machine) -> None:
    (machine.folder / "stubs/apt-get").unlink()
    code, said = machine.packages(ROOT_ACCOUNT, *WORDS[1:], path="")
    assert code == 1
    assert f"missing, by their Debian names: {MISSING};" in said


@pytest.mark.parametrize("verb", ["update", "install"])
def test_an_installation_that_fails_is_a_failure_and_unmasks(machine: Machine, verb: str) -> None:
    code, _ = machine.packages(ROOT_ACCOUNT, *WORDS, FAILS=verb)
    assert code == 1
    masked = [line.partition("mask --runtime ") for line in machine.calls("systemctl") if "mask" in line]
    assert [units for _, _, units in masked[:1]] == [units for _, _, units in masked[1:]]


@pytest.mark.parametrize("asks", ["", "yes"])
@pytest.mark.parametrize(
    ("target", "typed"), [("test", "sudo make test"), ("rehearse ENGINE=vllm", "sudo make rehearse ENGINE=vllm")]
)
def test_make_tells_an_account_all_that_it_needs_at_once(machine: Machine, target: str, typed: str, asks: str) -> None:
    lab = f"lab_commands={' '.join(WORDS)}"
    code, said = machine.run(NOBODY, "make", "--silent", *target.split(), lab, ASKS=asks)
    assert code != 0
    assert (COMMAND in said) == bool(asks)
    assert f"needs root: {typed}\n" in said
    assert machine.calls("apt-get") == ([] if asks else [UPDATE, INSTALL])


@pytest.mark.parametrize(("fails", "good"), [("", True), ("install", False)])
def test_make_goes_on_as_root_unless_the_installation_fails(machine: Machine, fails: str, good: bool) -> None:
    lab = f"lab_commands={' '.join(WORDS)}"
    code, said = machine.run(ROOT_ACCOUNT, "make", "--silent", "lab-ready", lab, FAILS=fails)
    assert (code == 0) == good, said
    assert INSTALL in machine.calls("apt-get")
