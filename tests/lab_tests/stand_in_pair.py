"""Two ranks of the stand-in engine as plain processes on loopback."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.unit.cases import free_port

ENGINE = Path(__file__).parents[1] / "lab" / "engine"
FAST = {"load_seconds_first": 0.3, "load_seconds_later": 0.1, "rendezvous_timeout_seconds": 30, "heartbeat_seconds": 30}
MEMINFO = "MemTotal:       125000000 kB\nMemFree:        110000000 kB\nMemAvailable:   118000000 kB\nCached: 5 kB\n"


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {condition}")


def write_shard(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shards = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}}
    (folder / "config.json").write_text('{"model_type": "deepseek_v41"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards:
        write_shard(folder / shard)
    return folder


class Pair:
    """Two ranks, each with a LAB_DIR of its own, as on two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.engram = folder / "engram"
        self.engram.mkdir()
        for number in (47, 48):
            write_shard(self.engram / f"model-000{number}-of-00048.safetensors")
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.master_port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)
        for rank in (0, 1):
            (folder / f"lab{rank}").mkdir()
            (folder / f"cache{rank}").mkdir()
            self.meminfo(rank).write_text(MEMINFO)
        self.script()

    def meminfo(self, rank: int) -> Path:
        return self.folder / f"lab{rank}" / "meminfo"

    def available_kib(self, rank: int) -> int:
        return int(self.meminfo(rank).read_text().split("MemAvailable:")[1].split()[0])

    def script(self, **keys: Any) -> None:
        for rank in (0, 1):
            place = self.folder / f"lab{rank}" / "control.json"
            place.with_suffix(".new").write_text(json.dumps({**FAST, **keys}))
            place.with_suffix(".new").rename(place)

    def launch(self, rank: int, *more: str, env: dict[str, str] | None = None, model: Path | None = None) -> None:
        argv = [str(ENGINE / "bin" / "tensorfold"), "serve", str(model or self.model), "--tp", "2", "--rank", str(rank)]
        argv += ["--master", "127.0.0.1", "--master-port", str(self.master_port), "--context", "1048576"]
        argv += ["--mtp-drafts", "5", "--no-thinking", "--no-update-check", *more]
        if "--parallel" not in more:
            argv += ["--parallel", "4"]
        if rank == 0:
            argv += ["--host", "127.0.0.1", "--port", str(self.port), "--name", "flash", "--max-tokens", "4096"]
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LAB_DIR": str(self.folder / f"lab{rank}"),
            "TF_DS_ENGRAM": str(self.engram),
            "TF_DS_RANK_CACHE": str(self.folder / f"cache{rank}"),
        }
        with self.log_path(rank).open("wb") as output:
            self.ranks[rank] = subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, env={**own, **(env or {})}
            )

    def start(self, *more: str, env: dict[str, str] | None = None) -> None:
        for rank in (1, 0):
            self.launch(rank, *more, env=env)

    def start_and_wait(self, *more: str, env: dict[str, str] | None = None) -> None:
        self.start(*more, env=env)
        wait_until(lambda: "serving flash at" in self.log(0) and "following rank 0" in self.log(1))

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def log(self, rank: int) -> str:
        return self.log_path(rank).read_text()

    def exit_code(self, rank: int, seconds: float = 60.0) -> int:
        return self.ranks[rank].wait(seconds)

    def stop(self) -> None:
        self.client.close()
        for process in self.ranks.values():
            process.kill()
            process.wait()

    def chat(self, text: str, **keys: Any) -> httpx.Response:
        body = {"model": "flash", "messages": [{"role": "user", "content": text}], **keys}
        return self.client.post("/v1/chat/completions", json=body)

    def chat_with_timeout(self, text: str, seconds: float) -> httpx.Response:
        body = {"model": "flash", "messages": [{"role": "user", "content": text}]}
        return self.client.post("/v1/chat/completions", json=body, timeout=seconds)

    def reply(self, text: str, **keys: Any) -> dict[str, Any]:
        response = self.chat(text, **keys)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def says(self, text: str, **keys: Any) -> str:
        content = self.reply(text, **keys)["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    def stream(self, text: str, **keys: Any) -> list[dict[str, Any]]:
        body = {"model": "flash", "messages": [{"role": "user", "content": text}], "stream": True, **keys}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@contextmanager
def serving(folder: Path) -> Iterator[Pair]:
    """Start both ranks, and end them whatever happens."""
    pair = Pair(folder)
    try:
        pair.start_and_wait()
        yield pair
    finally:
        pair.stop()
