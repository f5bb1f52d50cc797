"""The form in which the worker may be named: a host, an alias of ssh's configuration, or user@host."""

from __future__ import annotations

import ipaddress
import re

# What ssh takes, and nothing that a shell would read as more than a word.
_HOST = re.compile(r"[\w.][\w.-]*")
_USER = re.compile(r"[\w.][\w.+@\\-]*")


def check_worker_name(value: str) -> None:
    """Raise ValueError, which says what is wrong, for a name that ssh could not use."""
    user, at, host = value.rpartition("@")
    if host in ("localhost", "127.0.0.1", "127.0.1.1", "::1"):
        raise ValueError("should be the second machine, not this one")
    if host.startswith("[") or re.fullmatch(r"[^:]*:\d+", host):
        raise ValueError("should be user@host without brackets or a port: SPARKSERVE_SSH_PORT names the port")
    if not (_HOST.fullmatch(host) or _is_ipv6(host)) or (at and not _USER.fullmatch(user)):
        raise ValueError("should be a host or user@host, of letters, digits and . - _ only")


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.IPv6Address(text) is not None and _HOST.fullmatch(text.partition("%")[2] or "x") is not None
    except ValueError:
        return False
