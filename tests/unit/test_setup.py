from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sparkserve import setup, ssh_trust
from sparkserve.cluster import Role
from sparkserve.errors import SparkserveError
from sparkserve.link import Interface, LinkFacts
from sparkserve.link_rdma import RdmaDevice
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings, load
from sparkserve.system import DiskFacts
from sparkserve.system_text import filesystem_of, parse_mounts

RECIPE = load_recipe("smoke")
GB = 1_000_000_000


class Defaults:
    """Nobody is there: what is proposed is taken, and every question is kept."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}

    def ask(self, question: str, flag: str) -> bool:
        raise AssertionError(question)

    def ask_value(self, question: str, default: str, flag: str) -> str:
        self.asked[flag.split(maxsplit=1)[0]] = default
        return default

    def say(self, text: str) -> None:
        raise AssertionError(text)


class Typist(Defaults):
    """A person who types these answers, and hears what is wrong with them."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.answers = list(answers)
        self.heard: list[str] = []

    def ask_value(self, question: str, default: str, flag: str) -> str:
        return self.answers.pop(0) or default

    def say(self, text: str) -> None:
        self.heard.append(text)


def make_choices(env: str = "", **flags: str) -> tuple[setup.Choices, Defaults]:
    voice = Defaults()
    file = Path("/dev/null") if not env else Path(env)
    return setup.Choices(load(file, {}, flags), cast("Any", voice)), voice


def make_disk(path: str, free: int, device: int = 1, *, writable: bool = True) -> DiskFacts:
    return DiskFacts(path, device, free * GB, 4000 * GB, None, writable)


def make_link(*ports: tuple[str, str, bool]) -> LinkFacts:
    """Give a node's interfaces: name, address in a /24, and whether an RDMA device belongs to it."""
    interfaces = tuple(
        Interface(name, (address,), 9000, True, 200_000, (f"{address.rpartition('.')[0]}.0/24",))
        for name, address, _ in ports
    )
    devices = tuple(
        RdmaDevice(name=f"rdma-{name}", interface=name, active=True, gids=()) for name, _, rdma in ports if rdma
    )
    return LinkFacts(interfaces=interfaces, devices=devices)


def make_seen(home: int, *disks: DiskFacts, link: LinkFacts | None = None) -> setup.Seen:
    facts = cast("Any", type("Facts", (), {"disks": {"models": make_disk("/home/me/sparkserve/models", home)}})())
    return setup.Seen(facts, link or make_link(), disks)


# -- directories ------------------------------------------------------------------------------------------------------


def test_mounts_and_what_lies_on_them() -> None:
    text = (
        "/dev/nvme0n1p2 / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/nvme1n1 /my\\040data xfs rw 0 0\n"
        "overlay /var/lib/docker/x overlay rw 0 0\n/dev/loop3 /snap/core squashfs ro 0 0\n/dev/nvme0n1p1 /boot/efi vfat"
    )
    assert [place for place, kind in parse_mounts(text) if kind in setup._FILE_SYSTEMS] == ["/", "/my data"]
    assert filesystem_of("/my data/models", text) == "xfs"


def test_disks_are_one_for_each_file_system_and_ours_to_write() -> None:
    root, bind = make_disk("/", 900, writable=False), make_disk("/var/lib/x", 900)
    small, large = make_disk("/small", 100, 2), make_disk("/large", 2000, 3)
    assert setup.sort_disks([root, bind, small, large]) == (large, small)


@pytest.mark.parametrize(
    ("home", "disks", "place"),
    [
        (500, (make_disk("/data", 2000),), "~/sparkserve"),
        (402, (), "~/sparkserve"),
        (401, (make_disk("/data", 402), make_disk("/other", 10)), "/data/sparkserve"),
        (100, (make_disk("/", 900),), "/sparkserve"),
        (100, (make_disk("/data", 401),), ""),
        (100, (), ""),
    ],
)
def test_the_home_if_it_has_room_else_the_roomiest_disk(home: int, disks: tuple[DiskFacts, ...], place: str) -> None:
    assert setup.pick_place(make_seen(home, *disks), 400 * GB) == place


def settle_places(choices: setup.Choices, head: setup.Seen, worker: setup.Seen) -> list[str]:
    seen: dict[Role, setup.Seen] = {"head": head, "worker": worker}
    return setup.choose_places(choices, seen, RECIPE)


def test_each_node_has_its_own_directories() -> None:
    choices, _ = make_choices()
    assert settle_places(choices, make_seen(1, make_disk("/data", 900)), make_seen(900)) == []
    assert choices.values == {
        "models_dir": "/data/sparkserve/models",
        "cache_dir": "/data/sparkserve/cache",
        "worker_models_dir": "~/sparkserve/models",
        "worker_cache_dir": "~/sparkserve/cache",
    }


def test_no_room_is_told_of_that_node() -> None:
    choices, _ = make_choices()
    (note,) = settle_places(choices, make_seen(900), make_seen(1))
    assert note.startswith("worker: no file system")
    assert choices.values["models_dir"] == "~/sparkserve/models"


def test_a_given_directory_is_no_question() -> None:
    choices, voice = make_choices(models_dir="/mine")
    assert settle_places(choices, make_seen(1), make_seen(1)) == []
    assert (choices.values, voice.asked) == ({"models_dir": "/mine", "cache_dir": "~/sparkserve/cache"}, {})


def test_an_earlier_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "old.env").write_text("SPARKSERVE_MODELS_DIR=/old\n")
    choices, voice = make_choices(str(tmp_path / "old.env"))
    settle_places(choices, make_seen(900), make_seen(900))
    assert voice.asked == {"--models-dir": "/old"}


# -- the cable --------------------------------------------------------------------------------------------------------

LAN, CABLE, TWIN = ("lan", "10.0.0.1", False), ("cable", "10.1.0.1", True), ("twin", "10.2.0.1", True)
WORKER = make_link(("lan", "10.0.0.2", False), ("f0", "10.1.0.2", True), ("f0b", "10.2.0.2", True))


def settle_link(choices: setup.Choices, head: LinkFacts, recipe: Any = RECIPE) -> tuple[Any, list[str]]:
    seen: dict[Role, setup.Seen] = {"head": make_seen(1, link=head), "worker": make_seen(1, link=WORKER)}
    return setup.choose_link(choices, seen, recipe)


def test_the_cable_and_not_the_other_network() -> None:
    choices, voice = make_choices()
    settle_link(choices, make_link(LAN, CABLE))
    assert choices.values == {"head_link": "10.1.0.1", "worker_link": "10.1.0.2"}
    assert voice.asked == {"--head-link": "10.1.0.1", "--worker-link": "10.1.0.2"}


def test_one_given_end_decides_the_other() -> None:
    choices, voice = make_choices(head_link="10.2.0.1")
    settle_link(choices, make_link(LAN, CABLE, TWIN))
    assert choices.values == {"head_link": "10.2.0.1", "worker_link": "10.2.0.2"}
    assert voice.asked == {"--worker-link": "10.2.0.2"}


def test_without_a_common_network_of_the_cable_both_stay_open() -> None:
    choices, voice = make_choices()
    proposal, notes = settle_link(choices, make_link(LAN))
    assert (proposal, choices.values, voice.asked) == (None, {}, {})
    assert "docs/network.md" in notes[0]


def test_two_given_ends_stand() -> None:
    choices, _ = make_choices(head_link="10.0.0.1", worker_link="10.2.0.2")
    assert settle_link(choices, make_link(LAN)) == (None, [])
    assert choices.values == {"head_link": "10.0.0.1", "worker_link": "10.2.0.2"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"head_link": "10.7.0.1"}, ("head", "10.7.0.1", "the head has lan 10.0.0.1; cable 10.1.0.1")),
        ({"worker_link": "10.1.0.1"}, ("worker", "10.1.0.1", "the worker has lan 10.0.0.2; f0 10.1.0.2")),
        ({"head_link": "10.1.0.1", "worker_link": "10.7.0.2"}, ("worker", "10.7.0.2", "the worker has lan")),
    ],
)
def test_an_address_that_no_interface_has_is_refused(given: dict[str, str], says: tuple[str, str, str]) -> None:
    choices, _ = make_choices(**given)
    with pytest.raises(SparkserveError) as caught:
        settle_link(choices, make_link(LAN, CABLE))
    assert (caught.value.code, caught.value.exit_code) == ("link_unowned", 2)
    assert caught.value.message == f"no interface of the {says[0]} has the address {says[1]}"
    assert caught.value.hint.startswith(says[2])
    assert choices.values == {}


def test_a_given_end_without_a_partner_is_named() -> None:
    choices, _ = make_choices(head_link="10.0.0.1")
    _, notes = settle_link(choices, make_link(LAN, CABLE))
    assert notes[0].startswith("10.0.0.1 and the other node share no network of RDMA ports")


def test_a_wrong_answer_is_told_and_asked_again() -> None:
    voice = Typist("xyz", "10.7.0.1", "10.1.0.1", "")
    choices = setup.Choices(load(Path("/dev/null"), {}, {}), cast("Any", voice))
    settle_link(choices, make_link(LAN, CABLE))
    assert choices.values == {"head_link": "10.1.0.1", "worker_link": "10.1.0.2"}
    assert [text.partition(": ")[0] for text in voice.heard] == [
        "SPARKSERVE_HEAD_LINK (answer)",
        "no interface of the head has the address 10.7.0.1; the head has lan 10.0.0.1; cable 10.1.0.1",
    ]


def test_a_wrong_default_is_not_asked_for_ever() -> None:
    choices = setup.Choices(load(Path("/dev/null"), {}, {}), cast("Any", Typist("", "")))
    with pytest.raises(SparkserveError):
        choices.choose("models_dir", "relative")


def test_a_recipe_without_rdma_takes_any_network() -> None:
    choices, _ = make_choices()
    recipe = replace_devices()
    settle_link(choices, make_link(LAN), recipe)
    assert choices.values == {"head_link": "10.0.0.1", "worker_link": "10.0.0.2"}


def replace_devices() -> Any:
    return RECIPE.model_copy(update={"container": RECIPE.container.model_copy(update={"devices": ()})})


# -- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], ""),
        ([("10.1.0.2", "enp1s0f1np1", "aa:bb")], "10.1.0.2"),
        ([("10.1.0.3", "enp1s0f1np1", None)], ""),
        ([("10.0.0.2", "lan", "aa:bb")], ""),
        ([("10.2.0.2", "enP2p1s0f1np1", "aa:cc"), ("10.1.0.2", "enp1s0f1np1", "aa:bb")], "10.1.0.2"),
        ([("10.1.0.2", "enp1s0f1np1", "aa:bb"), ("10.1.0.3", "enp1s0f1np1", "aa:cc")], ""),
        ([("10.1.0.2", "enp1s0f1np1", "aa:bb"), ("10.3.0.2", "enp1s0f0np0", "aa:cc")], ""),
    ],
)
def test_the_one_machine_on_the_ports_of_the_cable(rows: list[tuple[str, str, str | None]], found: str) -> None:
    told = [{"dst": address, "dev": port, "lladdr": mac} for address, port, mac in rows]
    text = json.dumps([{name: value for name, value in row.items() if value} for row in told])
    assert setup.parse_neighbours(text, {"enp1s0f1np1", "enP2p1s0f1np1", "enp1s0f0np0"}) == found


def test_only_small_networks_of_the_cable_are_asked_through() -> None:
    facts = make_link(("cable", "10.1.0.1", True), ("lan", "10.0.0.1", False))
    assert list(setup.list_unheard(facts, {"cable"})) == [f"10.1.0.{last}" for last in range(2, 255)]
    wide = replace(facts.interfaces[0], networks=("10.0.0.0/16",))
    assert list(setup.list_unheard(replace(facts, interfaces=(wide,)), {"cable"})) == []
    point = replace(facts.interfaces[0], networks=("10.1.0.0/31",))
    assert list(setup.list_unheard(replace(facts, interfaces=(point,)), {"cable"})) == ["10.1.0.0"]


def test_the_proposed_address_is_told_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(settings: Settings, *_given: object) -> None:
        raise SparkserveError("stop", settings.worker)

    monkeypatch.setattr(setup, "_find_neighbour", lambda _settings: "10.1.0.2")
    monkeypatch.setattr(ssh_trust, "meet", stop)
    voice = Typist("")
    wish = setup.Wish(tmp_path / ".env", {}, {})
    with pytest.raises(SparkserveError, match=r"10\.1\.0\.2"), setup.init(wish, cast("Any", voice), lambda _: None):
        raise AssertionError
    assert voice.heard == ["10.1.0.2 answers at the other end of the cable; any address that ssh reaches will do"]
