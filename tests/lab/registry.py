"""A registry on the head's loopback address, where Docker asks for no TLS, with the lab's base image in it."""

import subprocess
from pathlib import Path

from tests.lab import base_image
from tests.lab.machine import LabError, wait_until
from tests.lab.node import LabNode

ADDRESS = "127.0.0.1:5000"
PORT = 5000
STORAGE = "/var/lib/lab-registry"
CONFIG = "/etc/docker/lab-registry.yml"
SETTINGS = f"""version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {STORAGE}/content}}
  delete: {{enabled: true}}
http: {{addr: '{ADDRESS}'}}
"""


def reference() -> str:
    """The base image's name in the registry."""
    return f"{ADDRESS}/{base_image.NAME}:{base_image.tag()}"


def binds(folder: Path) -> dict[str, str]:
    """Make the storage on the machine, which outlives the node; returns target -> source for binding."""
    (folder / "registry").mkdir(exist_ok=True)
    return {STORAGE: str(folder / "registry")}


def start(head: LabNode) -> None:
    """Start the registry and wait until it answers."""
    if _answers(head):
        return
    head.run(["sh", "-c", f"mkdir -p /etc/docker && cat > {CONFIG}"], user="root", stdin=SETTINGS.encode())
    head.launch_daemon("registry", ["docker-registry", "serve", CONFIG])
    wait_until(lambda: _answers(head), "the registry on the head", 60)


def publish_base(head: LabNode, folder: Path) -> None:
    """Make the base image and push it, once for each storage."""
    tags = folder / "registry/content/docker/registry/v2/repositories" / base_image.NAME / "_manifests/tags"
    if (tags / base_image.tag()).exists():
        return
    with base_image.archive(folder / "cache").open("rb") as archive:
        argv = ["docker", "import", "--change", 'CMD ["python3"]', "-", reference()]
        if head.popen(argv, stdin=archive, stdout=subprocess.DEVNULL).wait() != 0:
            raise LabError("docker import of the base image failed")
    head.docker("push", reference())


def _answers(head: LabNode) -> bool:
    probe = f"exec 3<>/dev/tcp/127.0.0.1/{PORT}"
    return head.run(["bash", "-c", probe], check=False).returncode == 0
