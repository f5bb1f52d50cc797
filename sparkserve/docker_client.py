"""Docker clients: the head's over its socket, the worker's over the SSH connection that is open already."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
from docker.transport.sshconn import SSHHTTPAdapter

from sparkserve.errors import EXIT_NOT_READY, SparkserveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import paramiko

    from sparkserve.ssh_host import SshHost

# Long enough for a slow answer of a loaded machine; waits that may take longer pass their own limit.
_SECONDS = 120


class _SharedConnectionAdapter(SSHHTTPAdapter):
    """Docker's own SSH transport on our connection: the same host key, user and key as everything else.

    It overrides two private methods of the docker package; `tests/unit/test_docker_client.py` holds them in place.
    """

    def __init__(self, client: paramiko.SSHClient) -> None:
        self._shared = client
        super().__init__("ssh://worker", timeout=_SECONDS, pool_connections=3, max_pool_size=3, shell_out=False)

    def _create_paramiko_client(self, base_url: str) -> None:
        del base_url
        self.ssh_client = self._shared

    def _connect(self) -> None:
        """Stay on the connection that is open."""

    def close(self) -> None:
        pools: Any = self.pools
        pools.clear()


def local_client(node: str) -> docker.DockerClient:
    """Open the engine of this machine, as the environment names it."""
    with explained(node):
        return docker.from_env(version="auto", timeout=_SECONDS)


def remote_client(host: SshHost) -> docker.DockerClient:
    """Open the worker's engine over the one SSH connection."""
    with explained(host.name):
        # The constructor needs some address and a fixed version to stay quiet until our transport is in place.
        client = docker.DockerClient(base_url="tcp://worker:2375", version="1.41", timeout=_SECONDS)
        api: Any = client.api
        api.mount("http+docker://", _SharedConnectionAdapter(host.client))
        api.base_url = "http+docker://ssh"
        api._version = api._retrieve_server_version()
        return client


@contextlib.contextmanager
def explained(node: str) -> Iterator[None]:
    """Turn the Docker package's errors into ours, with the daemon's own words as details."""
    try:
        yield
    except docker.errors.APIError as error:
        details, hint = str(error.explanation or error), "`sudo journalctl -u docker -n 50` on that node says more"
        raise SparkserveError("docker_refused", "Docker refuses a request", hint, node, details) from error
    except (docker.errors.DockerException, OSError) as error:
        message = "cannot talk to the Docker engine"
        hint = "`docker version` on that node tells why; a new member of the docker group must log in again"
        raise SparkserveError("docker_unreachable", message, hint, node, str(error), EXIT_NOT_READY) from error
