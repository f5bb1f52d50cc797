"""A plain HTTP client and the real hub client, for the tests of the hub itself."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, hf_hub_download

from tests.lab.hub import Hub
from tests.lab.model_repo import MODEL_NAME

SHARD = "model-00003-of-00039.safetensors"


@dataclass
class Reply:
    """What came back; `body` is what arrived, even when the connection ended early."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    complete: bool


def fetch(url: str, method: str = "GET", content: bytes | None = None, timeout: float = 5, **headers: str) -> Reply:
    """Ask once, following nothing."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, target, content, headers)
        response = connection.getresponse()
        try:
            return Reply(response.status, response.headers, response.read(), complete=True)
        except http.client.IncompleteRead as error:
            return Reply(response.status, response.headers, error.partial, complete=False)
    finally:
        connection.close()


def link_to(hub: Hub, path: str = SHARD, repo: str = MODEL_NAME, token: str | None = None) -> str:
    """Resolve an LFS file at the hub and return the signed link."""
    url = f"{hub.endpoint}/{repo}/resolve/main/{path}"
    reply = fetch(url, "HEAD", Authorization=f"Bearer {token}") if token else fetch(url, "HEAD")
    assert reply.status == 302, reply
    return str(reply.headers["Location"])


@contextmanager
def running_hub(repos: Path, token: str | None = None) -> Iterator[Hub]:
    """Serve on loopback without names."""
    with Hub(repos, hub_name="", content_name="", token=token) as hub:
        yield hub


def api(hub: Hub, token: str | bool = False) -> HfApi:
    """Return the real client; False keeps it from using a token of the machine."""
    return HfApi(endpoint=hub.endpoint, token=token)


def download(hub: Hub, path: str, target: Path, token: str | bool = False) -> Path:
    """Download one file of the model with the real client."""
    return Path(hf_hub_download(MODEL_NAME, path, endpoint=hub.endpoint, local_dir=target, token=token))
