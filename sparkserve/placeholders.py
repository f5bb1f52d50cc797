"""Places in a recipe's texts that are filled in for each rank: `${name}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

PLACEHOLDER = re.compile(r"\$\{([^}]*)\}")
# What argv, environment and mounts may name. `link.*` and `cache` are those of the rank's own node, never the other's.
PLACEHOLDERS = {
    "rank": "0 on the head, 1 on the worker",
    "head.link.address": "the head's IPv4 address on the cable",
    "worker.link.address": "the worker's IPv4 address on the cable",
    "link.address": "this node's IPv4 address on the cable",
    "link.interface": "this node's interface that owns the link address",
    "link.hcas": "this node's RDMA devices of the cabled port, separated by commas",
    "link.hca": "the one of them that owns the link address, for engines that take a single device",
    "link.gid_index": "this node's RoCE v2 GID index of the link address (looked up at each start)",
    "ports.api": "port of the API",
    "ports.master": "port on which the ranks meet",
    "ports.NAME": "a further port, from `ports.more`",
    "api_host": "address on which the API listens",
    "cache": "this node's cache directory",
    "weights.id": "short digest of all weights commits, to keep rank caches of different weights apart",
    "image.id": "short digest of the engine image, to keep compiled code of different engines apart",
    "model_name": "name under which the API serves the model",
    "context": "longest context, in tokens",
    "requests": "requests served side by side",
    "drafts": "draft tokens per step",
    "kv_bytes": "key-value cache of one rank, in bytes",
    "dollar": "a dollar sign, for a text that holds `${` of its own",
    "secret.NAME": "a line of SPARKSERVE_SECRETS_FILE; `secret.api_key` is the key of SPARKSERVE_API_KEY_FILE",
}
SECRET = re.compile(r"secret\.[A-Za-z_][A-Za-z0-9_]*")


def render(text: str, values: Mapping[str, str]) -> str:
    """Replace `${name}`; a value that is not known stays visible as `<name>`."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], f"<{match[1]}>"), text)
