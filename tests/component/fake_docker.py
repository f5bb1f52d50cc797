"""A `docker` command for tests: it keeps images in a file, knows only what is foreseen, and misbehaves on request.

As a module it makes one (`FakeDocker`); as a program it is one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELP = "usage: engine serve [--rank N] [--thinking | --no-thinking] [--mtp-drafts N]"
BLOCK = b"x" * 65536
UNFORESEEN = 99


@dataclass
class FakeDocker:
    """The command in `bin`, its images (head's and worker's) and what it was asked."""

    directory: Path

    def install(self) -> str:
        """Put the command into a directory of its own; give that directory for PATH."""
        bin_directory = self.directory / "bin"
        bin_directory.mkdir(parents=True)
        program = bin_directory / "docker"
        program.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text())
        program.chmod(0o755)
        self.write("head", {})
        self.write("worker", {})
        self.write("behaviour", {})
        return str(bin_directory)

    def read(self, name: str) -> dict[str, Any]:
        """Read a part of the state."""
        found: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return found

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a part of the state."""
        (self.directory / f"{name}.json").write_text(json.dumps(value))

    def behave(self, **how: Any) -> None:
        """Script the next commands."""
        self.write("behaviour", how)

    def calls(self, *first: str) -> list[list[str]]:
        """List the calls that begin with some words."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        calls: list[list[str]] = [json.loads(line) for line in lines]
        return [call for call in calls if call[: len(first)] == list(first)]

    def answer(self, role: str, page: str) -> dict[str, Any]:
        """Answer as the engine's HTTP API."""
        how = self.read("behaviour")
        if page == "/info":
            body = {
                "DockerRootDir": "/docker",
                "DriverStatus": how.get(f"{role}_driver", [["Backing Filesystem", "x"]]),
            }
            return {"status": 200, "body": body}
        if page == "/version":
            return {"status": 200, "body": {"ApiVersion": how.get("api", "1.41")}}
        images = self.read(role)
        by_id = {id_of(image): image for image in images.values()}
        if page == "/images/json":
            return {"status": 200, "body": [{"Id": name} for name in by_id]}
        name, _, what = page.removeprefix("/images/").rpartition("/")
        image = images.get(name) or by_id.get(name)
        if image is None:
            return {"status": 404, "body": {"message": "no such image"}}
        if what == "history":
            sizes = [image["size"] // len(image["layers"])] * len(image["layers"])
            return {"status": 200, "body": [{"Size": size} for size in [0, *sizes]]}
        layers = {"Type": "layers", "Layers": image["layers"]}
        body = {"Id": id_of(image), "RootFS": layers, "Config": {"Labels": image["labels"]}}
        return {"status": 200, "body": {**body, "Architecture": image["architecture"], "Size": image["size"]}}


def id_of(image: dict[str, Any]) -> str:
    """Give the id of an image, which is the same under every name."""
    return f"sha256:{hashlib.sha256(json.dumps(image, sort_keys=True).encode()).hexdigest()}"


def option_values(words: list[str], option: str) -> list[str]:
    """List the values of an option that may be repeated."""
    return [words[index + 1] for index, word in enumerate(words) if word == option]


class Command:
    """One run of the command."""

    def __init__(self, directory: Path, words: list[str]) -> None:
        self.state = FakeDocker(directory)
        self.words = words
        self.how = self.state.read("behaviour")
        with (directory / "calls").open("a") as calls:
            calls.write(json.dumps(words) + "\n")

    def run(self) -> int:
        """Do what is asked, and nothing that was not foreseen."""
        verb = "_".join(self.words[:2]) if self.words[0] in ("image", "buildx") else self.words[0]
        action = getattr(self, f"do_{verb}", None)
        if action is None:
            return UNFORESEEN
        return int(action() or 0)

    def hang(self, what: str) -> None:
        """Stay until killed, leaving the pid to look for."""
        if self.how.get("hang") == what:
            (self.state.directory / f"{what}.pid").write_text(str(os.getpid()))
            while True:
                time.sleep(0.05)

    def do_buildx_version(self) -> int:
        return 0 if self.how.get("buildx") else 1

    def do_version(self) -> None:
        print(self.how.get("client", "28.2.2"))

    def do_build(self) -> int:
        words, context = self.words, Path(self.words[-1])
        print("#1 [internal] load build definition from Dockerfile", "#1 DONE 0.0s", sep="\n", flush=True)
        self.hang("build")
        if self.how.get("build") == "fail":
            print("pip changed packages of the base image", file=sys.stderr)
            return 1
        files = {str(path.relative_to(context)): path.read_text() for path in context.rglob("*") if path.is_file()}
        labels = dict(label.split("=", 1) for label in option_values(words, "--label"))
        arguments = dict(pair.split("=", 1) for pair in option_values(words, "--build-arg"))
        environment = {name: os.environ.get(name, "") for name in ("DOCKER_BUILDKIT", "BUILDX_NO_DEFAULT_ATTESTATIONS")}
        self.state.write("built", {"files": files, "arguments": arguments, "environment": environment})
        labels |= self.how.get("labels", {})
        self.add("head", option_values(words, "--tag")[0], labels)
        return 0

    def add(self, role: str, name: str, labels: dict[str, str]) -> None:
        """Keep an image."""
        layers = self.how.get("layers", ["sha256:1", "sha256:2"])
        architecture = self.how.get("architecture", "amd64")
        image = {"layers": layers, "labels": labels, "architecture": architecture, "size": 1_000_000}
        self.state.write(role, {**self.state.read(role), name: image})

    def do_run(self) -> int:
        self.hang("run")
        print(self.how.get("help", HELP), *range(1000), sep="\n")  # as long as a real engine's
        return int(self.how.get("run_code", 0))

    def do_rm(self) -> None:
        return

    def do_tag(self) -> int:
        images = self.state.read("head")
        if self.words[1] not in images:
            return 1
        self.state.write("head", {**images, self.words[2]: images[self.words[1]]})
        return 0

    def do_image_rm(self) -> int:
        images = self.state.read("head")
        if images.pop(self.words[-1], None) is None:
            return 1
        self.state.write("head", images)
        return 0

    def do_pull(self) -> int:
        print("0123456789ab: Pulling fs layer", "0123456789ab: Pull complete", sep="\n", flush=True)
        if self.how.get("pull") == "fail":
            print("denied", file=sys.stderr)
            return 1
        self.add("head", self.words[1], {})
        return 0

    def do_save(self) -> int:
        name = self.words[-1]
        image = self.state.read("head")[name]
        data = BLOCK * int(self.how.get("blocks", 8))
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            self.put(archive, "manifest.json", json.dumps([name, image]).encode())
            sys.stdout.flush()
            self.hang("save")
            for layer in image["layers"]:
                self.put(archive, f"blobs/{layer.replace(':', '/')}", data)
        print("cannot export", file=sys.stderr)
        return int(self.how.get("save_code", 0))

    def put(self, archive: tarfile.TarFile, name: str, data: bytes) -> None:
        """Add a file."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))

    def do_load(self) -> int:
        if self.how.get("load") == "fail":
            while self.how.get("hang") == "save" and not (self.state.directory / "save.pid").exists():
                time.sleep(0.01)
            print("no space left on device", file=sys.stderr)
            return 1
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            name, image = json.loads(read(archive))
            self.hang("load")
            # Docker may be done before the last bytes of padding came.
            names = set() if self.how.get("load") == "early" else {member.name for member in archive}
        if names:
            sys.stdin.buffer.read()
        worker = self.state.read("worker")
        for number, layer in enumerate(image["layers"]):
            below = image["layers"][: number + 1]
            is_there = any(other["layers"][: number + 1] == below for other in worker.values())
            if f"blobs/{layer.replace(':', '/')}" not in names and not is_there and self.how.get("load") != "early":
                print(f"open /docker/tmp/{layer}/layer.tar: no such file or directory", file=sys.stderr)
                return 1
        image["layers"] = self.how.get("loaded_layers", image["layers"])
        self.state.write("worker", {**worker, name: image})
        print(f"Loaded image: {name}")
        return 0


def read(archive: tarfile.TarFile) -> bytes:
    """Read the next file."""
    member = archive.next()
    file = archive.extractfile(member) if member else None
    return file.read() if file else b""


if __name__ == "__main__":
    sys.exit(Command(Path(__file__).resolve().parent.parent, sys.argv[1:]).run())
