"""Addresses and names of machines, in the forms in which settings take them (pure)."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# What ssh takes, and nothing that a shell would read as more than a word.
_HOST = re.compile(r"[\w.][\w.-]*")
_USER = re.compile(r"[\w.][\w.+@\\-]*")
# This machine's names by custom, and all that the rules of the Internet keep for it.
_HERE = re.compile(r"(.*\.)?localhost\.?|localhost[46]?\.localdomain[46]?\.?|localhost[46]|ip6-(localhost|loopback)")


def read_address(text: str) -> Address | None:
    """Read an IP address; None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address or name."""
    address = read_address(host)
    return _HERE.fullmatch(host.lower()) is not None if address is None else _bare(address).is_loopback


def can_be_peer(address: Address) -> bool:
    """Whether one other machine may have the address: it is neither this one's, nor nobody's, nor of many."""
    bare = _bare(address)
    return not (bare.is_loopback or bare.is_unspecified or bare.is_multicast or bare.is_reserved)


def _bare(address: Address) -> Address:
    return getattr(address, "ipv4_mapped", None) or address


def check_worker_name(value: str) -> None:
    """Raise ValueError, which says what is wrong, for a name that ssh could not use."""
    user, at, host = value.rpartition("@")
    if host.startswith("[") or re.fullmatch(r"[^:]*:\d+", host):
        raise ValueError("should be user@host without brackets or a port: SPARKSERVE_SSH_PORT names the port")
    address = read_address(host)
    is_host = _HOST.fullmatch(host) or (address is not None and _HOST.fullmatch(host.partition("%")[2] or "x"))
    if not is_host or (at and not _USER.fullmatch(user)):
        raise ValueError("should be a host or user@host, of letters, digits and . - _ only")
    with contextlib.suppress(OSError):  # the short forms that ssh takes for addresses, such as 127.1
        address = ipaddress.IPv4Address(socket.inet_aton(host))
    if is_loopback(host) or (address is not None and not can_be_peer(address)):
        raise ValueError("should be the second machine, not this one")
