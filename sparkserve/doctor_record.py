"""Facts of both nodes in one file that can be shown around: names, addresses, serials and secrets are replaced."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from sparkserve.blueprint import Place, Seen, save_facts
from sparkserve.cluster import Deployment, Node, NodeSession, Role
from sparkserve.container import OWNER, OWNER_LABEL
from sparkserve.hosts import mask
from sparkserve.parameters import secrets_to_mask

_MOUNTS = "/proc/mounts"
_INFO = ("ServerVersion", "DockerRootDir", "Driver", "Runtimes", "DiscoveredDevices")
_MAC = re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE)
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\.\d)")
_IPV6 = re.compile(r"(?<![\w:])[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:]*(?![\w:.])", re.IGNORECASE)
# Names that many machines have say nothing of anybody, and are words of the facts themselves.
_EVERYBODY = {"", "root", "nvidia", "ubuntu", "docker", "localhost"}


class Recorder:
    """Stands between us and a node's program and keeps the raw facts that it gave, as far as a check reads them."""

    def __init__(self, node: Node) -> None:
        self._node, self._session = node, node.session
        self.facts: dict[str, Any] = {}
        node.__dict__["session"] = cast("NodeSession", self)

    def ask(self, do: str, **fields: Any) -> Any:  # noqa: ANN401 - the JSON answer
        """Pass a request on."""
        found = self._session.ask(do, **fields)
        for name, value in found.items() if do == "facts" else ():
            if isinstance(value, dict):
                self.facts.setdefault(name, {}).update(_shorten(name, value))
            else:
                self.facts[name] = value
        return found

    def close(self) -> None:
        """End the node's program."""
        self._session.close()

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
    if kept.get("/proc/cmdline"):
        kept["/proc/cmdline"] = " ".join(word for word in kept["/proc/cmdline"].split() if word.startswith("kho="))
    return kept


def _container(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    ours = (row.get("Labels") or {}).get(OWNER_LABEL) == OWNER
    return {
        "Id": row["Id"],
        "Names": row["Names"] if ours else [f"/container-{number}"],
        "Image": row["Image"] if ours else f"image-{number}",
        "Labels": {OWNER_LABEL: OWNER} if ours else {},
        "Ports": [{"PublicPort": port["PublicPort"]} for port in row.get("Ports") or () if "PublicPort" in port],
        "HostConfig": {"NetworkMode": (row.get("HostConfig") or {}).get("NetworkMode", "")},
    }


def write_record(
    path: Path, deployment: Deployment, places: Mapping[Role, Place], recorders: Mapping[Role, Recorder]
) -> None:
    """Write what was seen, without what tells whose it is; `plan --facts` and our own tests read it."""
    raw = {role: recorders[role].raw for role in places}
    seen = Seen(seconds=time.time(), nodes=dict(places), raw=raw)
    text = mask(seen.model_dump_json(), secrets_to_mask(deployment.settings))
    words = _names(raw, deployment.settings.worker)
    save_facts(path, Seen.model_validate_json(anonymize(text, words)))


def _names(raw: Mapping[Role, Mapping[str, Any]], worker: str) -> dict[str, str]:
    """Give what names a person or a machine, and the word in its place."""
    words: dict[str, str] = {}
    for role, found in raw.items():
        identity = found["identity"]
        group = (found["facts"].get("commands") or {}).get("docker_group") or {}
        members = str(group.get("out", "")).strip().rpartition(":")[2].split(",")
        for user in (identity["user"], *members):
            words.setdefault(user, f"user{len([word for word in words.values() if word.startswith('user')]) + 1}")
        words[identity["hostname"]] = role
    host = worker.rpartition("@")[2]
    if not _is_address(host):
        words.setdefault(host, "worker")
    return {word: shown for word, shown in words.items() if word not in _EVERYBODY}


def anonymize(text: str, words: Mapping[str, str]) -> str:
    """Replace names, serials and addresses; the same one by the same one, and networks stay networks."""
    for word in sorted(words, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", words[word], text)
    text = _MAC.sub(_numbered(lambda number: f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"), text)
    text = _UUID.sub(_numbered(lambda number: f"00000000-0000-0000-0000-{number:012d}"), text)
    networks: dict[str, int] = {}
    text = _IPV6.sub(lambda match: _replace_ipv6(match[0], networks), text)
    return _IPV4.sub(lambda match: _replace_ipv4(match[0], networks), text)


def _numbered(show: Callable[[int], str]) -> Callable[[re.Match[str]], str]:
    known: dict[str, int] = {}
    return lambda match: show(known.setdefault(match[0].lower(), len(known) + 1))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _replace_ipv4(text: str, networks: dict[str, int]) -> str:
    """Give another address for each; those of one /24 stay together, and what is special stays so."""
    if not _is_address(text):
        return text
    address = ipaddress.IPv4Address(text)
    if address.is_loopback or address.is_unspecified or text.startswith("255."):
        return text
    network, _, last = text.rpartition(".")
    beginning = "169.254" if address.is_link_local else "10.0"
    return f"{beginning}.{networks.setdefault(network, len(networks) + 1)}.{last}"


def _replace_ipv6(text: str, networks: dict[str, int]) -> str:
    """Give another address for each; an IPv4 address inside (as RDMA has it) is replaced as it is elsewhere."""
    if not _is_address(text):
        return text
    address = ipaddress.IPv6Address(text)
    if address.is_loopback or address.is_unspecified:
        return text
    if address.ipv4_mapped:
        replaced = ipaddress.IPv6Address(f"::ffff:{_replace_ipv4(str(address.ipv4_mapped), networks)}")
    else:
        number = networks.setdefault(str(address), len(networks) + 1)
        replaced = ipaddress.IPv6Address((0xFE80 << 112 if address.is_link_local else 0x20010DB8 << 96) + number)
    return replaced.exploded if text == address.exploded else str(replaced)
