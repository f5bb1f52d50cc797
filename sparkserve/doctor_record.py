"""Facts of both nodes in one file that can be shown around: names, addresses, serials and secrets are replaced."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkserve.addresses import read_address
from sparkserve.blueprint import Place, Seen, save_facts
from sparkserve.cluster import ROLES, Deployment, Node, Role
from sparkserve.container import OWNER, OWNER_LABEL, is_ours
from sparkserve.hosts import mask
from sparkserve.parameters import secrets_to_mask
from sparkserve.system_text import output_of, published_ports

_MOUNTS = "/proc/mounts"
_INFO = ("ServerVersion", "DockerRootDir", "Driver", "Runtimes", "DiscoveredDevices")
# MAC addresses, names of interfaces and RDMA devices that are made of one, and UUIDs.
_SERIAL = re.compile(
    r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"
    r"|(?<=\b(?:en|wl|ww|ib)x)[0-9a-f]{12,16}\b|(?<=\brocex)[0-9a-f]{12,16}\b"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    re.IGNORECASE,
)
# Keys that no owner names: the words of a record, and the kernel's paths.
_OURS = re.compile(r"[^/]|/(proc|sys|etc)/")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\.\d)")
_IPV6 = re.compile(r"(?<![\w:])[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:]*(?![\w:.])", re.IGNORECASE)
# Names that many machines have say nothing of anybody, and are words of the facts themselves.
_EVERYBODY = {"", "root", "nvidia", "ubuntu", "debian", "docker", "localhost", "sudo", "users"}


class Recorder:
    """Keeps the raw facts that a node's program gives from now on, as far as a check reads them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.facts: dict[str, Any] = {}
        node.session.on_answer = self._keep

    def _keep(self, do: str, found: Mapping[str, Any]) -> None:
        for name, value in found.items() if do == "facts" else ():
            if isinstance(value, dict):
                self.facts.setdefault(name, {}).update(_shorten(name, value))
            else:
                self.facts[name] = value

    @property
    def raw(self) -> dict[str, Any]:
        """All that was told of this node; of its mounts those that the wanted directories lie on."""
        files, places = self.facts.get("files", {}), [row.get("place", "") for row in self.facts["disks"].values()]
        rows = [line.split() for line in (files.get(_MOUNTS) or "").splitlines()]
        rows = [row for row in rows if len(row) >= 3 and any(Path(place).is_relative_to(row[1]) for place in places)]
        mounts = "".join(f"device {row[1]} {row[2]}\n" for row in rows)
        return {"identity": self._node.identity, "facts": {**self.facts, "files": {**files, _MOUNTS: mounts}}}


def _shorten(name: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what no check reads: the Docker engine's proxies and labels, files that were not wanted for it."""
    kept = dict(answers)
    for path, answer in answers.items() if name == "docker" else ():
        body = answer.get("body")
        if path == "/info" and isinstance(body, dict):
            kept[path] = {**answer, "body": {key: body[key] for key in _INFO if key in body}}
            kept[path]["body"]["Runtimes"] = {key: {} for key in body.get("Runtimes") or ()}
        elif path == "/containers/json" and isinstance(body, list):
            kept[path] = {**answer, "body": [_container(row, number) for number, row in enumerate(body, 1)]}
        else:
            kept[path] = {"status": answer.get("status"), "body": None}
    if name == "commands":
        kept |= {key: {**kept[key], "out": cut(kept[key]["out"])} for key, cut in _CUT.items() if kept.get(key)}
    if kept.get("/proc/cmdline"):
        kept["/proc/cmdline"] = " ".join(word for word in kept["/proc/cmdline"].split() if word.startswith("kho="))
    return kept


def _cut_interfaces(text: str) -> str:
    """Keep what link reads of `ip -json address`: other keys may hold hardware addresses, in any form."""
    try:
        return json.dumps([_pick(row, _OF_INTERFACE) for row in json.loads(text)])
    except ValueError:
        return ""


def _pick(found: Any, wanted: Mapping[str, Any]) -> Any:  # noqa: ANN401 - anything that JSON knows
    if isinstance(found, list) and wanted:
        return [_pick(one, wanted) for one in found]
    return {key: _pick(found[key], below) for key, below in wanted.items() if key in found} if wanted else found


def _cut_names(text: str) -> str:
    """Keep the addresses of what `getent` says."""
    return "".join(f"{words[0]}\n" for line in text.splitlines() if (words := line.split()))


_OF_INTERFACE: dict[str, Any] = {
    "ifname": {}, "mtu": {}, "flags": {}, "master": {}, "linkinfo": {"info_kind": {}},
    "addr_info": {"family": {}, "local": {}, "prefixlen": {}},
}  # fmt: skip
_CUT = {"ip": _cut_interfaces, "own_name": _cut_names}


def _container(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    ours = is_ours(row.get("Labels"))
    return {
        "Id": row["Id"],
        "Names": row["Names"] if ours else [f"/container-{number}"],
        "Image": row["Image"] if ours else f"image-{number}",
        "Labels": {OWNER_LABEL: OWNER} if ours else {},
        "Ports": [{"PublicPort": port} for port in published_ports(row)],
        "HostConfig": {"NetworkMode": (row.get("HostConfig") or {}).get("NetworkMode", "")},
    }


def write_record(
    path: Path, deployment: Deployment, places: Mapping[Role, Place], recorders: Mapping[Role, Recorder]
) -> None:
    """Write what was seen, without what tells whose it is; `plan --facts` and our own tests read it."""
    raw = {role: recorders[role].raw for role in places}
    seen = Seen(seconds=time.time(), nodes=dict(places), raw=raw)
    text = mask(seen.model_dump_json(), secrets_to_mask(deployment.settings))
    shown = anonymize(json.loads(text), _names(raw, deployment.settings.worker))
    save_facts(path, Seen.model_validate(shown))


def _names(raw: Mapping[Role, Mapping[str, Any]], worker: str) -> dict[str, str]:
    """Give what names a person, a group or a machine, and the word in its place."""
    users, groups, words = [], [], {}
    for role, found in raw.items():
        commands, identity = found["facts"].get("commands") or {}, found["identity"]
        users += [identity["user"], *output_of(commands.get("docker_group")).rpartition(":")[2].split(",")]
        groups += output_of(commands.get("groups")).split()
        words[identity["hostname"]] = role
    for kind, names in (("user", users), ("group", groups)):
        new = [name for name in dict.fromkeys(names) if name not in {*words, *_EVERYBODY}]
        words |= {name: f"{kind}{number}" for number, name in enumerate(new, 1)}
    host = worker.rpartition("@")[2]
    if read_address(host) is None:
        words.setdefault(host, "worker")
    return {word: shown for word, shown in words.items() if word not in _EVERYBODY}


def anonymize(found: Any, words: Mapping[str, str]) -> Any:  # noqa: ANN401 - anything that JSON knows
    """Replace names, serials and addresses in all texts; the same one by the same one, and networks stay networks."""
    serials: dict[str, int] = {}
    networks: dict[str, int] = {}
    names = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    # Of a machine the domain goes with the name.
    name = re.compile(rf"(?<![\w.-])({names})(?![\w-])((?:\.[\w-]+)*)" if words else r"(?!)")

    def put(text: str) -> str:
        text = _SERIAL.sub(lambda match: _replace_serial(match[0], serials), text)
        text = _IPV6.sub(lambda match: _replace_ipv6(match[0], networks), text)
        return _IPV4.sub(lambda match: _replace_ipv4(match[0], networks), text)

    def walk(found: Any, key: str = "") -> Any:  # noqa: ANN401
        if isinstance(found, dict):
            return {(put if _OURS.match(key) else walk)(key): walk(value, key) for key, value in found.items()}
        if isinstance(found, list):
            return [walk(value, key) for value in found]
        if not isinstance(found, str) or (found in words and key not in ("user", "hostname")):
            return found  # a whole text that is a name is a word of the facts
        if found.startswith("[{"):  # as `ip -json` writes it
            return json.dumps(walk(json.loads(found)), separators=(",", ":"))
        return put(name.sub(lambda match: words[match[1]] + match[2] * (words[match[1]] not in ROLES), found))

    return walk(found)


def _replace_serial(text: str, serials: dict[str, int]) -> str:
    """Give a number for a MAC address, also where an interface is named after it, or for a UUID."""
    digits = re.sub("[:-]", "", text.lower())
    number = serials.setdefault(digits, len(serials) + 1)
    if "-" in text:
        return f"00000000-0000-0000-0000-{number:012d}"
    shown = f"02{number:0{len(digits) - 2}x}"
    return ":".join(re.findall("..", shown)) if ":" in text else shown


def _replace_ipv4(text: str, networks: dict[str, int]) -> str:
    """Give another address for each; those of one /24 stay together, and what is special stays so."""
    address = read_address(text)
    if address is None or address.is_loopback or address.is_unspecified or text.startswith("255."):
        return text
    network, _, last = text.rpartition(".")
    beginning = "169.254" if address.is_link_local else "10.0"
    return f"{beginning}.{networks.setdefault(network, len(networks) + 1)}.{last}"


def _replace_ipv6(text: str, networks: dict[str, int]) -> str:
    """Give another address for each; an IPv4 address inside (as RDMA has it) is replaced as it is elsewhere."""
    address = read_address(text)
    if not isinstance(address, ipaddress.IPv6Address) or address.is_loopback or address.is_unspecified:
        return text
    if address.ipv4_mapped:
        replaced = ipaddress.IPv6Address(f"::ffff:{_replace_ipv4(str(address.ipv4_mapped), networks)}")
    else:
        number = networks.setdefault(str(address), len(networks) + 1)
        replaced = ipaddress.IPv6Address((0xFE80 << 112 if address.is_link_local else 0x20010DB8 << 96) + number)
    return replaced.exploded if text == address.exploded else str(replaced)
