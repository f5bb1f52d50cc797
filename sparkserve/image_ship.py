"""The engine image from the head to the worker: the layers that it lacks, in one stream, proved when they are there."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkserve import save_program
from sparkserve.cluster import Cluster, Node
from sparkserve.errors import SparkserveError
from sparkserve.image_facts import Facts, ImageFacts, check_room, find_api_version, gather
from sparkserve.plan import Work
from sparkserve.streams import Joined, join

# The first engine API whose `docker save` can be told the one platform to write.
_SAVE_PLATFORM_API = (1, 48)
# Before Docker 25 a saved layer was named by a hash of this: what an image without any settings was in Docker 1.9.
_BARE = (
    '{"container_config":{"Hostname":"","Domainname":"","User":"","AttachStdin":false,"AttachStdout":false,'
    '"AttachStderr":false,"Tty":false,"OpenStdin":false,"StdinOnce":false,"Env":null,"Cmd":null,"Image":"",'
    '"Volumes":null,"WorkingDir":"","Entrypoint":null,"OnBuild":null,"Labels":null},'
    '"created":"1970-01-01T00:00:00Z","layer_id":"%s"%s}'
)


def ship(cluster: Cluster, tag: str, work: Work) -> str:
    """Bring the head's image to the worker unless its layers are there already under that name."""
    head, worker = gather(cluster.head, tag), gather(cluster.worker, tag)
    image = head.image
    if image is None:
        raise SparkserveError("image_missing", f"the head has no image {tag}", "sparkserve build", "head")
    if worker.image is not None and worker.image.layers == image.layers:
        return f"{len(image.layers)} layers are there already"
    # Docker writes what it saves to its own directory before it gives the first byte.
    check_room(cluster.head, head, image.size, "give the image out")
    save = _save_command(cluster.head, tag, image)
    size = _Shipment(cluster, save, image, worker).send(count_shared(head, worker), work)
    loaded = gather(cluster.worker, tag).image
    if loaded is None or loaded.layers != image.layers:
        observed = "is absent" if loaded is None else f"has {len(loaded.layers)} other layers"
        message = f"{tag} {observed} after loading; needed: the {len(image.layers)} layers of the head's"
        raise SparkserveError("ship_failed", message, "sparkserve build", "worker")
    return f"{len(loaded.layers)} layers as on the head, {size / 1e6:,.1f} MB moved"


def _save_command(head: Node, tag: str, image: ImageFacts) -> list[str]:
    platform = ["--platform", f"linux/{image.architecture}"] if find_api_version(head) >= _SAVE_PLATFORM_API else []
    return ["docker", "save", *platform, tag]


@dataclass(frozen=True)
class _Shipment:
    """An image on its way: the head's command that gives it out whole, and what the worker has."""

    cluster: Cluster
    save: list[str]
    image: ImageFacts
    worker: Facts

    def send(self, shared: int, work: Work) -> int:
        """Send all but the shared layers; one of them may go meanwhile, and then the worker needs the whole image."""
        if shared:
            work.note(f"the worker has {shared} of {len(self.image.layers)} layers")
            program = Path(save_program.__file__).read_text(encoding="utf-8")
            names = " ".join(saved_names(self.image.layers[:shared]))
            thin = [self.cluster.head.host.python, "-I", "-c", program, names, *self.save]
            joined = self._stream(thin, self.image.size_above(shared), work)
            if joined.sink.exit_code == 0:
                return joined.size
            work.note("the worker cannot load these layers alone: sending the whole image")
        joined = self._stream(self.save, self.image.size, work)
        if joined.sink.exit_code != 0:
            details = joined.sink.error_text or joined.sink.text
            hint = "docker system df on the worker; then run the same command again"
            raise SparkserveError("ship_failed", "the worker could not load the image", hint, "worker", details)
        return joined.size

    def _stream(self, source: list[str], size: int, work: Work) -> Joined:
        # While it loads, Docker holds the stream and the unpacked layers.
        check_room(self.cluster.worker, self.worker, 2 * size, "load the image")

        def on_bytes(done: int) -> None:
            work.progress(done, max(size, done))

        worker = self.cluster.worker
        load = worker.host.bulk_argv(["docker", "load"], worker.link_address)
        joined = join(self.cluster.head.host, source, load, work.check, on_bytes)
        if joined.source.exit_code != 0 and not joined.cut:
            message = "the head could not give the image out"
            raise SparkserveError("ship_failed", message, "sparkserve build", "head", joined.source.error_text)
        return joined


def count_shared(head: Facts, worker: Facts) -> int:
    """Count the lowest layers that some image of the worker has too: a layer is only taken on top of the same ones."""
    if head.image is None or not head.chains:
        return 0
    return max((_count_equal(head.image.layers, chain) for chain in worker.chains), default=0)


def _count_equal(ours: Sequence[str], theirs: Sequence[str]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def saved_names(layers: Sequence[str]) -> Iterator[str]:
    """Give the files of an image's lowest layers in what `docker save` writes, as it is since Docker 25 and as it was.

    In the older form a name is made of all layers up to its own; that of an image's last layer cannot be known.
    """
    chain = name = ""
    for layer in layers:
        yield f"blobs/{layer.replace(':', '/')}"
        chain = _digest(f"{chain} {layer}") if chain else layer
        name = _digest(_BARE % (chain, f',"parent":"{name}"' if name else ""))
        yield f"{name.partition(':')[2]}/layer.tar"


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
