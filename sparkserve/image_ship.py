"""The engine image from the head to the worker: one stream over the cable, no file in between, proved by layers."""

from __future__ import annotations

from sparkserve.cluster import Cluster, Node
from sparkserve.errors import SparkserveError
from sparkserve.image_facts import Facts, ImageFacts, check_room, gather
from sparkserve.plan import Work
from sparkserve.ssh_host import SshHost
from sparkserve.streams import join

# The first engine API whose `docker save` can be told the one platform to write.
_SAVE_PLATFORM_API = (1, 48)


def ship(cluster: Cluster, tag: str, work: Work) -> str:
    """Bring the head's image to the worker unless its layers are there already under that name."""
    head, worker = gather(cluster.head, tag), gather(cluster.worker, tag)
    image = head.image
    if image is None:
        raise SparkserveError("image_missing", f"the head has no image {tag}", "sparkserve build", "head")
    if worker.image is not None and worker.image.layers == image.layers:
        return f"{len(image.layers)} layers are there already"
    # While it loads, Docker holds the stream and the unpacked layers.
    check_room(cluster.worker, worker, 2 * image.size, "load the image")
    size = _stream(cluster, tag, head, image, work)
    loaded = gather(cluster.worker, tag).image
    if loaded is None or loaded.layers != image.layers:
        observed = "is absent" if loaded is None else f"has {len(loaded.layers)} other layers"
        message = f"{tag} {observed} after loading; needed: the {len(image.layers)} layers of the head's"
        raise SparkserveError("ship_failed", message, "sparkserve build", "worker")
    return f"{len(loaded.layers)} layers as on the head, {size / 1e9:.2f} GB moved"


def _stream(cluster: Cluster, tag: str, head: Facts, image: ImageFacts, work: Work) -> int:
    save = ["docker", "save", tag]
    if head.api_version >= _SAVE_PLATFORM_API:
        save[2:2] = ["--platform", f"linux/{image.architecture}"]

    def on_bytes(done: int) -> None:
        work.progress(done, max(image.size, done))

    joined = join(cluster.head.host, save, load_command(cluster.worker), work.check, on_bytes)
    if joined.source.exit_code != 0 and not joined.cut:
        message = "the head could not give the image out"
        raise SparkserveError("ship_failed", message, "sparkserve build", "head", joined.source.error_text)
    if joined.sink.exit_code != 0:
        details = joined.sink.error_text or joined.sink.text
        hint = "docker system df on the worker; then run the same command again"
        raise SparkserveError("ship_failed", "the worker could not load the image", hint, "worker", details)
    return joined.size


def load_command(worker: Node) -> list[str]:
    """Give the head's command that loads an image on the worker: bulk data has an SSH process of its own."""
    load = ["docker", "load"]
    if isinstance(worker.host, SshHost):
        return [*worker.host.target.bulk_command(worker.link_address), *load]
    return load
