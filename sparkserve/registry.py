"""Digests of images from a registry's HTTP API (version 2), anonymously, with the bearer challenge that it may ask."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkserve.errors import SparkserveError

if TYPE_CHECKING:
    import httpx

_SECONDS = 20.0
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DOCKER_HUB = "registry-1.docker.io"


@dataclass(frozen=True)
class Reference:
    """An image reference, taken apart as Docker does."""

    name: str
    registry: str
    path: str
    tag: str
    digest: str

    @property
    def address(self) -> str:
        """Base address of the registry: plain HTTP for loopback only, as Docker itself does."""
        return f"{'http' if self.is_loopback else 'https'}://{self.registry}"

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine."""
        host = re.sub(r":\d+$", "", self.registry)
        return host in ("localhost", "[::1]") or host.startswith("127.")


def parse_reference(text: str) -> Reference:
    """Take `[registry/]path[:tag][@digest]` apart."""
    rest, _, digest = text.partition("@")
    name, tag = rest, ""
    if ":" in rest.rpartition("/")[2]:
        name, _, tag = rest.rpartition(":")
    first, slash, path = name.partition("/")
    is_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
    if not is_registry or first in ("docker.io", "index.docker.io"):
        bare = path if is_registry else name
        path, registry = bare if "/" in bare else f"library/{bare}", _DOCKER_HUB
    else:
        registry = first
    return Reference(name, registry, path, tag or ("" if digest else "latest"), digest)


def find_digest(reference: Reference) -> str:
    """Ask the registry for the digest of a reference; one that names a digest is only looked up.

    Where that wants a login, which only Docker has, a digest is believed: Docker takes nothing else for it.
    """
    try:
        return _ask(reference)
    except SparkserveError as error:
        if error.code == "registry_login" and reference.digest:
            return reference.digest
        raise


def _ask(reference: Reference) -> str:
    import httpx

    wanted = reference.digest or reference.tag
    address = f"{reference.address}/v2/{reference.path}/manifests/{wanted}"
    headers = {"Accept": ", ".join(_MANIFESTS)}
    try:
        # A proxy of the environment is no way to this machine itself.
        with httpx.Client(timeout=_SECONDS, follow_redirects=True, trust_env=not reference.is_loopback) as client:
            answer = client.head(address, headers=headers)
            if answer.status_code == 401:
                headers |= _authorize(client, answer.headers.get("WWW-Authenticate", ""), reference)
                answer = client.head(address, headers=headers)
            if answer.status_code == 200 and "Docker-Content-Digest" not in answer.headers:
                answer = client.get(address, headers=headers)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        hint = "look at the network of this machine, and at the name of the image"
        message = f"cannot reach the registry {reference.registry} for {reference.name}"
        raise SparkserveError("source_unreachable", message, hint, details=str(error)) from error
    if answer.status_code != 200:
        raise _refused(reference, wanted, answer.status_code)
    return _digest_of(answer, reference)


def _digest_of(answer: httpx.Response, reference: Reference) -> str:
    digest = answer.headers.get("Docker-Content-Digest") or "sha256:" + hashlib.sha256(answer.content).hexdigest()
    if not _DIGEST.fullmatch(digest) or (reference.digest and digest != reference.digest):
        message = f"{reference.registry} gives the digest {digest[:80]} for {reference.name}"
        needed = f"{message}; needed: {reference.digest or 'a sha256'}"
        raise SparkserveError("registry_failed", needed, "look at the image in the recipe, and at a proxy in between")
    return digest


def _authorize(client: httpx.Client, challenge: str, reference: Reference) -> dict[str, str]:
    """Follow a bearer challenge without any credentials."""
    scheme, _, rest = challenge.partition(" ")
    fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    realm = fields.pop("realm", "")
    if scheme.lower() != "bearer" or not realm.startswith("https://" if not reference.is_loopback else "http"):
        raise _refused(reference, reference.tag, 401)
    scope = fields.get("scope", f"repository:{reference.path}:pull")
    answer = client.get(realm, params={**fields, "scope": scope})
    if answer.status_code != 200:
        raise _refused(reference, reference.tag, answer.status_code)
    try:
        body = answer.json()
        token = str(body.get("token") or body["access_token"])
    except (ValueError, KeyError, AttributeError) as error:
        hint = "look at the image in the recipe, and at a proxy in between"
        raise SparkserveError("registry_failed", f"{realm} answers without a token", hint) from error
    return {"Authorization": f"Bearer {token}"}


def _refused(reference: Reference, wanted: str, status: int) -> SparkserveError:
    image = f"{reference.name} ({wanted or reference.digest})"
    if status in (401, 403):
        hint = "name it by its digest, NAME@sha256:…, and `docker login` there on the head"
        return SparkserveError("registry_login", f"{reference.registry} wants a login for {image}", hint)
    if status == 404:
        hint = "look at the name and tag of the image in the recipe"
        return SparkserveError("registry_missing", f"{reference.registry} has no {image}", hint)
    hint = "wait some minutes, then run the same command again"
    if status == 429:
        return SparkserveError("registry_limit", f"{reference.registry} limits our requests (429) for {image}", hint)
    return SparkserveError("registry_failed", f"{reference.registry} answers {status} for {image}", hint)
