"""A lab with all that a pair of Sparks has around it: a hub, the engine's source, a recipe, settings, an owner."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.git_area import publish_commit
from tests.lab.hub import Hub
from tests.lab.model_repo import make_all
from tests.lab.nodes import Lab, LabNode
from tests.lab.recipe import write_lab_recipe

SOURCE = Path(__file__).parents[2]
ENGINE = Path(__file__).parent / "engine"
TOKEN = "hf_lab_token_of_the_owner"
HOME = "/home/spark"


@dataclass
class Pair:
    """The owner's view of a lab: type `sparkserve` on the head."""

    lab: Lab
    hub: Hub
    commits: Mapping[str, str]

    @property
    def head(self) -> LabNode:
        """The node where commands are typed."""
        return self.lab.head

    @property
    def worker(self) -> LabNode:
        """The other node."""
        return self.lab.worker

    def settings(self, **changes: str | None) -> dict[str, str]:
        """Give the owner's settings, with some changed or (None) left out."""
        values: dict[str, str | None] = {
            "SPARKSERVE_WORKER": f"spark@{self.worker.management_address}",
            "SPARKSERVE_HEAD_LINK": self.head.link_address,
            "SPARKSERVE_WORKER_LINK": self.worker.link_address,
            "SPARKSERVE_RECIPE": f"{HOME}/recipes/lab",
            "SPARKSERVE_SUDO_PASSWORD_FILE": f"{HOME}/.sudo-password",
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_TOKEN": TOKEN,
        }
        values |= changes
        return {name: value for name, value in values.items() if value is not None}

    def write_settings(self, **changes: str | None) -> None:
        """Write the owner's `.env`."""
        text = "".join(f"{name}={value}\n" for name, value in self.settings(**changes).items())
        self.write(f"{HOME}/.env", text, mode="600")

    def write(self, path: str, text: str | bytes, mode: str = "644") -> None:
        """Write a file of the owner on the head."""
        content = text.encode() if isinstance(text, str) else text
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        self.head.run(["sh", "-c", script, "sh", path, mode], stdin=content)

    def put_recipe(self, directory: Path) -> None:
        """Copy a recipe to the owner's own, under the directory's name."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.write(f"{HOME}/recipes/{directory.name}/{path.relative_to(directory)}", path.read_bytes())

    def command(self, *words: str) -> list[str]:
        """Give the argv of the installed command, run in the owner's home."""
        program = SOURCE / ".venv" / "bin" / "sparkserve"
        return ["sh", "-c", 'cd && exec "$@"', "sh", str(program), *words]

    def sparkserve(
        self, *words: str, timeout: float = 300, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the installed `sparkserve` as the owner on the head, whatever its exit code."""
        return self.head.run(self.command(*words), timeout=timeout, env=env, check=False)

    def ask(self, *words: str, timeout: float = 300) -> dict[str, Any]:
        """Run a command with `--json` and give its one object."""
        answer = self.sparkserve(*words, "--json", timeout=timeout)
        try:
            found: dict[str, Any] = json.loads(answer.stdout)
        except ValueError as error:
            raise AssertionError(f"no JSON: {answer.stdout!r} {answer.stderr.decode()}") from error
        return found

    def logins(self) -> list[str]:
        """Give the address from which each login on the worker came, since the lab is up, oldest first."""
        log = (self.worker.files / "log/sshd.log").read_text()
        return re.findall(r"Accepted publickey for \S+ from (\S+)", log)

    def script_engine(self, **states: Any) -> None:
        """Script the stand-in engine on both nodes; without states it behaves well."""
        for node in self.lab.nodes:
            control = node.root / "var/lib/lab/control.json"
            control.write_text(json.dumps(states))

    def forget_everything(self) -> None:
        """Take the pair back to the day it was unpacked: no weights, images, lock or state of ours."""
        for node in self.lab.nodes:
            node.run(["sh", "-c", "rm -rf ~/sparkserve ~/sparkserve.lock.json ~/.local/state ~/.cache"])
            node.run(["rm", "-rf", "/var/lib/sparkserve", "/etc/sysctl.d/90-sparkserve.conf"], user="root")
            # What an earlier test tuned would else be taken for the owner's own values.
            node.run(["sysctl", "-q", "-w", "vm.swappiness=60", "vm.compaction_proactiveness=20"], user="root")
            images = node.docker("images", "-q", "--filter", "label=sparkserve.recipe").split()
            if images:
                node.docker("rmi", "-f", *images)

    def tidy(self) -> None:
        """Bring the pair's surroundings back to what they should be: hub, engine's script, settings, locks."""
        self.hub.reset()
        self.script_engine()
        self.write_settings()
        # Locks of other recipes keep their weights from being pruned.
        self.head.run(["sh", "-c", "rm -f ~/sparkserve.*.lock.json"])

    def reset(self) -> None:
        """Bring the pair back to a healthy one with nothing running: surroundings, memory, containers."""
        self.tidy()
        with ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(_clear, self.lab.nodes))


def _clear(node: LabNode) -> None:
    left = node.docker("ps", "-aq").split()
    if left:
        node.docker("rm", "-f", *left)
    node.set_meminfo(MemAvailable=119_000_000, MemFree=118_000_000)


def engine_files() -> dict[str, str]:
    """Read the stand-in engine's source as the files of one commit."""
    paths = [path for path in sorted(ENGINE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ENGINE)): path.read_text(encoding="utf-8") for path in paths}


@contextmanager
def paired(checkout: Path = SOURCE) -> Iterator[Pair]:
    """Bring up the lab with everything around it, and always take it down."""
    lab = Lab.for_checkout(checkout)
    with lab.session():
        repos = lab.folder / "repos"
        commits = make_all(repos)
        engine_commit = publish_commit(repos, "engine", engine_files())
        with Hub(repos, bind=lab.gateway_address, token=TOKEN) as hub:
            for name in (hub.hub_name, hub.content_name):
                lab.add_host(name, lab.gateway_address)
            lab.trust_worker()
            pair = Pair(lab, hub, {**commits, "engine": engine_commit})
            _furnish(pair)
            yield pair


def _furnish(pair: Pair) -> None:
    directory = pair.lab.folder / "recipes" / "lab"
    write_lab_recipe(
        directory,
        commits=pair.commits,
        engine_repository=f"{pair.hub.endpoint}/smart-git/engine.git",
        base=pair.lab.registry_reference,
    )
    pair.put_recipe(directory)
    pair.write(f"{HOME}/.sudo-password", pair.head.password + "\n", mode="600")
    pair.write_settings()
    pair.script_engine()
