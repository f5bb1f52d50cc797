"""The first day: from a worker to a settings file, its host key trusted once, and an app that is connected."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkserve.settings import parse_env
from tests.lab.node import LabNode
from tests.lab.pair import HOME, TOKEN, Pair

pytestmark = pytest.mark.faults
KNOWN = f"{HOME}/.ssh/known_hosts"
RECIPE = ("--recipe", "recipes/lab")


@pytest.fixture
def new(pair: Pair) -> Iterator[Pair]:
    """A pair of which the head knows nothing: no settings, no host key, no neighbour on the cable."""
    pair.head.run(["rm", "-f", ".env", ".ssh/known_hosts"])
    for port in (pair.head.link_interface, pair.head.twin_interface):
        pair.head.run(["ip", "neigh", "flush", "dev", port], user="root")
    yield pair
    pair.head.run(["rm", "-f", ".ssh/known_hosts", ".env"])
    pair.lab.trust_worker()
    pair.write_settings()


@pytest.fixture
def shown(pair: Pair) -> str:
    """The fingerprint of the worker's host key, as the worker's own screen shows it."""
    found = pair.worker.run(["ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub"]).stdout
    return found.decode().split()[1]


def written(pair: Pair) -> dict[str, str]:
    values, errors = parse_env(pair.head.run(["cat", ".env"]).stdout.decode())
    assert errors == []
    assert pair.head.run(["stat", "-c", "%a %U", ".env"]).stdout == b"600 spark\n"
    return values


def expected(pair: Pair, worker: str) -> dict[str, str]:
    return {
        "SPARKSERVE_WORKER": worker,
        "SPARKSERVE_HEAD_LINK": pair.head.link_address,
        "SPARKSERVE_WORKER_LINK": pair.worker.link_address,
        "SPARKSERVE_RECIPE": "recipes/lab",
        "SPARKSERVE_MODELS_DIR": "~/sparkserve/models",
        "SPARKSERVE_CACHE_DIR": "~/sparkserve/cache",
    }


def type_to(pair: Pair, typed: str, *words: str) -> tuple[int, str]:
    """Run `sparkserve init` on a terminal and type these lines; gives its exit code and the screen."""
    line = f"cd && exec {shlex.join(pair.command(*words)[4:])}"
    done = pair.head.run(["script", "-qec", line, "/dev/null"], stdin=typed.encode(), check=False, timeout=60)
    return done.returncode, done.stdout.decode()


def strict_ssh(pair: Pair) -> bytes:
    """Log in as the owner's own ssh does, with no key accepted that is not known."""
    argv = ["ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", pair.worker.management_address, "echo", "well"]
    return pair.head.run(argv, check=False).stdout


def codes(answer: dict[str, Any]) -> tuple[int, list[str]]:
    return answer["exit_code"], [error["code"] for error in answer["errors"]]


# -- the settings file ------------------------------------------------------------------------------------------------


def test_from_nothing_with_the_address_alone(new: Pair, shown: str) -> None:
    address = new.worker.management_address
    code, screen = type_to(new, f"{address}\ny\n\n\n\n\n", "init", *RECIPE)
    assert code == 0, screen
    assert screen.count(shown) == 1
    assert written(new) == expected(new, address)
    assert strict_ssh(new) == b"well\n"
    for text in (new.head.hostname, new.worker.hostname, "NVIDIA GB10", new.head.link_interface, " ok, in "):
        assert text in screen
    assert new.ask("config")["exit_code"] == 0
    code, screen = type_to(new, "", "init", *RECIPE, "--yes", "--force")
    assert (code, shown in screen, "]: " in screen) == (0, False, False), screen


def test_without_a_terminal_flags_say_all(new: Pair, shown: str) -> None:
    address = new.worker.management_address
    answer = new.ask("init", address, *RECIPE)
    assert codes(answer) == (2, ["needs_yes"])
    assert answer["errors"][0]["hint"] == f"add --accept-host-key {shown}"
    words = (f"spark@{address}", "--models-dir", "~/models", "--worker-link", new.worker.twin_address)
    answer = new.ask("init", *words, *RECIPE, "--accept-host-key", shown, "--yes")
    assert answer["exit_code"] == 0, answer["errors"]
    found = written(new)
    assert found["SPARKSERVE_WORKER"] == f"spark@{address}"
    assert found["SPARKSERVE_MODELS_DIR"] == "~/models"
    assert found["SPARKSERVE_HEAD_LINK"] == new.head.twin_address
    assert found["SPARKSERVE_WORKER_LINK"] == new.worker.twin_address
    assert answer["data"]["link"]["rdma"] is True
    assert answer["data"]["trusted"]["fingerprint"] == shown
    assert {check["verdict"] for check in answer["data"]["doctor"]["checks"]} <= {"ok", "warn"}


def test_a_file_that_is_there_is_kept_unless_it_is_said(pair: Pair) -> None:
    before = pair.head.run(["cat", ".env"]).stdout
    assert codes(pair.ask("init", *RECIPE)) == (2, ["needs_yes"])
    assert type_to(pair, "n\n", "init", *RECIPE)[0] == 2
    assert pair.head.run(["cat", ".env"]).stdout == before
    answer = pair.ask("init", "--force", *RECIPE)
    assert answer["exit_code"] == 0, answer["errors"]
    found = written(pair)
    assert found["HF_TOKEN"] == TOKEN
    assert TOKEN not in json.dumps(answer)
    assert {**found, **expected(pair, found["SPARKSERVE_WORKER"])} == found
    pair.write_settings()


def test_a_wrong_answer_is_told_and_nothing_is_written(pair: Pair) -> None:
    pair.head.run(["rm", "-f", ".env"])
    address = pair.worker.management_address
    for words, code in (
        (("--recipe", "nosuch"), "recipe_unknown"),
        (("--recipe", "recipes/lab", "--head-link", "nonsense"), "settings_invalid"),
    ):
        answer = pair.ask("init", address, *words)
        assert codes(answer) == (2, [code])
    assert pair.head.run(["ls", ".env"], check=False).returncode != 0
    pair.write_settings()


# -- networks ---------------------------------------------------------------------------------------------------------


NO_ROUTE = ["ip route del default"]
# One network of both nodes, as a LAN is: only its default route tells it from a cable.
OVER_A_THIRD = [
    "ip link add third type veth peer name fourth",
    "ip address add 10.31.0.{number}/24 dev third",
    "ip link set third up",
    "ip link set fourth up",
    "ip route replace default dev third",
]


@pytest.fixture(params=[NO_ROUTE, OVER_A_THIRD], ids=["no default route at all", "it goes over a third network"])
def routed(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair without settings; the default route of both nodes is not where it was."""
    pair.head.run(["rm", "-f", ".env"])
    for number, node in enumerate(pair.lab.nodes, 1):
        node.run(["sh", "-ec", "\n".join(request.param).format(number=number)], user="root")
    yield pair
    for node in pair.lab.nodes:
        node.run(["ip", "link", "delete", "third"], user="root", check=False)
        node.run(["ip", "route", "replace", "default", "via", pair.lab.gateway_address], user="root")
    pair.write_settings()


def test_the_default_route_has_no_say(routed: Pair) -> None:
    address = routed.worker.management_address
    answer = routed.ask("init", address, *RECIPE)
    assert answer["exit_code"] == 0, answer["errors"]
    assert answer["data"]["link"] is not None
    assert written(routed) == expected(routed, address)
    proposed = {one["head_interface"] for one in routed.ask("link")["data"]["proposals"]}
    assert routed.head.link_interface in proposed
    assert "third" not in proposed


@pytest.fixture
def unaddressed(pair: Pair) -> Iterator[Pair]:
    """The worker's ports on the cable have no address."""
    ports = {pair.worker.link_interface: pair.worker.link_address, pair.worker.twin_interface: pair.worker.twin_address}
    for port in ports:
        pair.worker.run(["ip", "address", "flush", "dev", port, "scope", "global"], user="root")
    yield pair
    for port, address in ports.items():
        pair.worker.run(["ip", "address", "add", f"{address}/24", "dev", port], user="root")


def test_a_cable_without_addresses_leaves_them_open(unaddressed: Pair) -> None:
    unaddressed.head.run(["rm", "-f", ".env"])
    gone = ["ip", "neigh", "replace", unaddressed.worker.link_address, "lladdr", "02:00:00:00:00:09", "nud", "stale"]
    unaddressed.head.run([*gone, "dev", unaddressed.head.link_interface], user="root")
    answer = unaddressed.ask("init", *RECIPE)
    assert codes(answer) == (2, ["needs_value"]), "nobody answers on the cable"
    assert answer["errors"][0]["hint"] == "add ADDRESS, as in `sparkserve init spark@192.168.1.22`"
    answer = unaddressed.ask("init", unaddressed.worker.management_address, *RECIPE)
    assert (answer["exit_code"], answer["data"]["link"]) == (0, None)
    assert "docs/network.md" in answer["data"]["notes"][0]
    assert "SPARKSERVE_HEAD_LINK" not in written(unaddressed)
    assert b"\n# SPARKSERVE_HEAD_LINK=\n" in unaddressed.head.run(["cat", ".env"]).stdout
    unaddressed.write_settings()


def test_the_one_neighbour_on_the_cable_is_proposed(pair: Pair) -> None:
    pair.head.run(["rm", "-f", ".env"])
    known = f"{pair.worker.link_address} {pair.head.run(['cat', KNOWN]).stdout.decode().partition(' ')[2]}"
    pair.write(KNOWN, known)
    for port in (pair.head.link_interface, pair.head.twin_interface):  # nobody has ever used the cable
        pair.head.run(["ip", "neigh", "flush", "dev", port], user="root")
    answer = pair.ask("init", *RECIPE)
    assert answer["exit_code"] == 0, answer["errors"]
    assert written(pair) == expected(pair, pair.worker.link_address)
    pair.head.run(["rm", "-f", KNOWN])
    pair.lab.trust_worker()
    pair.write_settings()


# -- the host key -----------------------------------------------------------------------------------------------------


def test_another_fingerprint_is_refused(new: Pair, shown: str) -> None:
    answer = new.ask("init", new.worker.management_address, *RECIPE, "--accept-host-key", "SHA256:" + "A" * 43)
    assert codes(answer) == (6, ["host_key_refused"])
    assert shown in answer["errors"][0]["message"]
    assert new.head.run(["ls", ".ssh/known_hosts", ".env"], check=False).stdout == b""
    code, screen = type_to(new, "n\n", "init", new.worker.management_address, *RECIPE)
    assert (code, "not trusted" in screen) == (6, True)
    assert new.head.run(["ls", ".ssh/known_hosts", ".env"], check=False).stdout == b""


def test_a_changed_key_stops_with_both_fingerprints(new: Pair, shown: str) -> None:
    new.head.run(["sh", "-c", "rm -f k k.pub; ssh-keygen -q -t ed25519 -N '' -f k"])
    public = new.head.run(["cat", "k.pub"]).stdout.decode()
    other = new.head.run(["ssh-keygen", "-lf", "k.pub"]).stdout.decode().split()[1]
    text = f"{new.worker.management_address} {' '.join(public.split()[:2])}\n"
    new.write(KNOWN, text)
    answer = new.ask("init", new.worker.management_address, *RECIPE, "--accept-host-key", shown)
    assert codes(answer) == (6, ["host_key_changed"])
    assert (shown in answer["errors"][0]["message"], other in answer["errors"][0]["message"]) == (True, True)
    assert new.head.run(["cat", KNOWN]).stdout.decode() == text


OVER_THE_CABLE = """
import subprocess, sys
from sparkserve import settings, ssh
target = ssh.resolve_target(settings.Settings(worker=sys.argv[1]))
sys.exit(subprocess.run([*target.bulk_command(sys.argv[2]), "printenv", "SSH_CONNECTION"]).returncode)
"""


def test_one_trusted_key_is_good_for_the_cable_too(new: Pair, shown: str) -> None:
    new.head.run(["sh", "-c", "printf 'HashKnownHosts yes\\n' > .ssh/config"])
    address, link = new.worker.management_address, new.worker.link_address
    answer = new.ask("init", address, *RECIPE, "--accept-host-key", shown)
    assert answer["exit_code"] == 0, answer["errors"]
    assert address.encode() not in new.head.run(["cat", KNOWN]).stdout
    assert new.head.run(["stat", "-c", "%a", KNOWN]).stdout == b"600\n"
    used = new.head.run([str(Path(sys.prefix) / "bin/python"), "-c", OVER_THE_CABLE, address, link]).stdout.decode()
    assert used.split()[2] == link
    new.head.run(["rm", "-f", ".ssh/config"])


# -- an app -----------------------------------------------------------------------------------------------------------


def ask_by_sdk(node: LabNode, script: str) -> bytes:
    """Run what `connect` prints for the OpenAI SDK as it is; gives the model's answer."""
    done = node.run([str(Path(sys.prefix) / "bin/python"), "-c", script])
    assert done.stderr == b""
    return done.stdout.strip()


def test_what_connect_prints_works_as_it_is(prepared: Pair) -> None:
    prepared.head.run(["rm", "-f", "api-key"])
    assert prepared.ask("key", "new", "--set")["exit_code"] == 0
    assert codes(prepared.ask("key", "new")) == (2, ["key_exists"])
    assert prepared.ask("start")["exit_code"] == 0
    found = prepared.ask("connect")["data"]
    key = prepared.head.run(["cat", "api-key"]).stdout.decode().strip()
    assert key not in json.dumps(found)
    assert prepared.ask("connect", "--show-key")["data"]["key"] == key
    curl = prepared.head.run(["bash", "-c", found["curl"]])
    reply = json.loads(curl.stdout)
    assert reply["model"] == found["model"]
    assert reply["choices"][0]["message"]["content"]
    refused = prepared.head.run(["bash", "-c", found["curl"].replace("Bearer ", "Bearer x")])
    assert "API key" in refused.stdout.decode()
    assert ask_by_sdk(prepared.head, found["python"])
    assert found["tunnel"] == f"ssh -N -L 8888:127.0.0.1:8888 spark@{prepared.head.management_address}"
    with prepared.worker.popen(["ssh", "-oStrictHostKeyChecking=accept-new", *found["tunnel"].split()[1:]]) as tunnel:
        patient = "curl --retry 20 --retry-delay 1 --retry-connrefused"
        remote = found["curl"].replace(f"$(cat {found['key_file']})", key).replace("curl", patient)
        reply = json.loads(prepared.worker.run(["bash", "-c", remote]).stdout)
        prepared.worker.run(["tee", found["key_file"]], stdin=key.encode())
        assert ask_by_sdk(prepared.worker, found["python"])
        tunnel.terminate()
    assert reply["model"] == found["model"]
    prepared.worker.run(["rm", "-f", KNOWN, found["key_file"]])


def test_others_reach_an_api_that_is_open_to_them(prepared: Pair) -> None:
    prepared.write_settings(SPARKSERVE_API_HOST="0.0.0.0")
    assert codes(prepared.ask("start")) == (2, ["api_open"])
    prepared.write_settings(SPARKSERVE_API_HOST="0.0.0.0", SPARKSERVE_API_OPEN="yes")
    answer = prepared.ask("start")
    assert answer["exit_code"] == 0, answer["errors"]
    found = prepared.ask("connect")["data"]
    assert found["remote_urls"] == [f"http://{prepared.head.management_address}:8888/v1"]
    assert found["tunnel"] == ""
    remote = found["curl"].replace(found["base_url"], found["remote_urls"][0])
    reply = json.loads(prepared.worker.run(["bash", "-c", remote]).stdout)
    assert reply["choices"][0]["message"]["content"]
    assert ask_by_sdk(prepared.worker, found["python"].replace(found["base_url"], found["remote_urls"][0]))
