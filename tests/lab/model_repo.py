"""Make the lab's model repositories: the real layout, real safetensors files, any size.

`python -m tests.lab.model_repo DIR` makes the default set, about 60 MB, and prints each repository's commit as JSON;
`--total-bytes` gives it another size.
"""

import argparse
import json
import math
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.repo_store import Entry, ModelRepo

MODEL_NAME = "LibertAIDAI/DeepSeek-V4.1-Flash-1017-EXL3-2.9bpw"
ENGRAM_NAME = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
TEMPLATE_NAME = "lab/chat-template"
BENCH_NAME = "lab/bench"
TOTAL_BYTES = 60_000_000
MODEL_SHARDS = 39
ENGRAM_SHARDS = 48
ENGRAM_LAYERS = {47: 1, 48: 14}
UNWANTED = ("README.md", ".gitattributes", "LICENSE")

_BLOCK = 8 << 20
_WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _WIDTHS[self.dtype]


def random_bytes(size: int, seed: str) -> Iterator[bytes]:
    """Yield `size` bytes that depend on `seed`: one random block, again and again, each with its number stamped in."""
    block = bytearray(random.Random(seed).randbytes(min(size, _BLOCK)))
    for number, start in enumerate(range(0, size, _BLOCK)):
        stamp = struct.pack("<Q", number)[: len(block)]
        block[: len(stamp)] = stamp
        yield bytes(memoryview(block)[: size - start])


def safetensors_header(tensors: Sequence[Tensor]) -> bytes:
    """Give the beginning of a safetensors file: length and header; the tensors' data follow without a gap."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end := end + tensor.size],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def safetensors(tensors: Sequence[Tensor], seed: str) -> Iterator[bytes]:
    """Yield a safetensors file of random data."""
    yield safetensors_header(tensors)
    yield from random_bytes(sum(tensor.size for tensor in tensors), seed)


def make_model_repo(root: Path, *, total_bytes: int = 40_000_000, seed: int = 1) -> ModelRepo:
    """Make the quantised model: 43 wanted files (39 shards, index, config, two tokenizer files) and three others."""

    def fill(repo: ModelRepo) -> Iterator[Entry]:
        share = total_bytes // MODEL_SHARDS
        shards = {_shard(number, MODEL_SHARDS): _model_tensors(number, share) for number in range(1, MODEL_SHARDS + 1)}
        yield from _store_shards(repo, shards, seed)
        yield from _store_small(repo, {"lab_marker": f"model-{seed}", "hidden_size": 4096, "num_hidden_layers": 39})

    return _make(root, MODEL_NAME, {"total_bytes": total_bytes, "seed": seed}, fill)


def make_engram_repo(root: Path, *, total_bytes: int = 20_000_000, seed: int = 1) -> ModelRepo:
    """Make the original model: 48 shards, of which only the large 47 and 48, with the Engram tables, are wanted."""

    def fill(repo: ModelRepo) -> Iterator[Entry]:
        shards = {_shard(number, ENGRAM_SHARDS): _model_tensors(number, 4096) for number in range(1, 47)}
        for number, layer in ENGRAM_LAYERS.items():
            shards[_shard(number, ENGRAM_SHARDS)] = _engram_tensors(layer, total_bytes // 2)
        yield from _store_shards(repo, shards, seed)
        yield from _store_small(repo, {"lab_marker": f"engram-{seed}", "hidden_size": 4096, "num_hidden_layers": 48})

    return _make(root, ENGRAM_NAME, {"total_bytes": total_bytes, "seed": seed}, fill)


def make_template_repo(root: Path) -> ModelRepo:
    """Make the repository that holds the chat template as a plain file."""
    template = Path(__file__).with_name("chat_template.jinja").read_bytes()

    def fill(repo: ModelRepo) -> Iterator[Entry]:
        yield repo.store("chat_template.jinja", [template], lfs=False)
        yield repo.store("README.md", [b"A chat template for the lab.\n"], lfs=False)

    return _make(root, TEMPLATE_NAME, {"template": template.decode()}, fill)


def make_bench_repo(root: Path, sizes: Sequence[int], *, name: str = BENCH_NAME) -> ModelRepo:
    """Make a repository of LFS files `file-NNNNN.bin` of these sizes, as fast as they can be hashed."""

    def fill(repo: ModelRepo) -> Iterator[Entry]:
        for number, size in enumerate(sizes, start=1):
            yield repo.store(f"file-{number:05d}.bin", random_bytes(size, f"{name}/{number}"), lfs=True)

    return _make(root, name, {"sizes": list(sizes)}, fill)


def make_all(root: Path, total_bytes: int = TOTAL_BYTES) -> dict[str, str]:
    """Make the default set, two thirds of it the quantised model; return each repository's commit."""
    model = make_model_repo(root, total_bytes=total_bytes * 2 // 3)
    made = (model, make_engram_repo(root, total_bytes=total_bytes // 3), make_template_repo(root))
    return {repo.name: repo.head for repo in made}


def _make(root: Path, name: str, order: dict[str, object], fill: Callable[[ModelRepo], Iterable[Entry]]) -> ModelRepo:
    """Fill a repository once; the same order again costs nothing."""
    repo = ModelRepo(root, name)
    meta = repo.directory / "meta.json"
    if not (meta.is_file() and json.loads(meta.read_text()) == order):
        repo.commit(fill(repo))
        meta.write_text(json.dumps(order))
    return repo


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _model_tensors(number: int, size: int) -> list[Tensor]:
    """Return tensors of about `size` bytes in all; shards differ a little in size, as real ones do."""
    rows = max(1, size // 512 - number % 5)
    layer = f"layers.{number - 1}"
    return [
        Tensor(f"{layer}.attn.norm.weight", "BF16", (64,)),
        Tensor(f"{layer}.ffn.experts.w1.trellis", "I16", (rows, 256)),
        Tensor(f"{layer}.ffn.experts.w1.svh", "F16", (64,)),
    ]


def _engram_tensors(layer: int, size: int) -> list[Tensor]:
    """Return an Engram table (256 bytes of weight and 8 of scale a row) and a small tensor beside it."""
    rows = max(1, size // 264)
    return [
        Tensor(f"layers.{layer}.engram.norm.weight", "BF16", (64,)),
        Tensor(f"layers.{layer}.engram.embed.weight", "F8_E4M3", (rows, 256)),
        Tensor(f"layers.{layer}.engram.embed.scale", "F8_E8M0", (rows, 8)),
    ]


def _store_shards(repo: ModelRepo, shards: dict[str, list[Tensor]], seed: int) -> Iterator[Entry]:
    for path, tensors in shards.items():
        yield repo.store(path, safetensors(tensors, f"{repo.name}/{path}/{seed}"), lfs=True)
    index = {
        "metadata": {"total_size": sum(tensor.size for tensors in shards.values() for tensor in tensors)},
        "weight_map": {tensor.name: path for path, tensors in shards.items() for tensor in tensors},
    }
    yield repo.store("model.safetensors.index.json", [json.dumps(index, indent=2).encode()], lfs=True)


def _store_small(repo: ModelRepo, config: dict[str, object]) -> Iterator[Entry]:
    vocabulary = {f"token{number}": number for number in range(2000)}
    texts = {
        "config.json": json.dumps(config, indent=2),
        "tokenizer.json": json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "token0"}),
        "README.md": f"# {repo.name}\nRandom numbers in the layout of a model.\n",
        ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
        "LICENSE": "Random numbers belong to nobody.\n",
    }
    for path, text in texts.items():
        yield repo.store(path, [text.encode()], lfs=False)


def main() -> None:
    """Make the default set below the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--total-bytes", type=int, default=TOTAL_BYTES, help="size of both models together")
    order = parser.parse_args()
    json.dump(make_all(order.directory, order.total_bytes), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
