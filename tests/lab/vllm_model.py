"""A model that vLLM really loads: a two-layer Llama of random numbers, one megabyte, the same on every machine."""

from __future__ import annotations

import array
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from tests.lab.model_repo import Tensor, safetensors_header
from tests.lab.repo_store import ModelRepo

NAME = "lab/tiny-llama"
WIDTH, HEADS, LAYERS, INNER, VOCABULARY, CONTEXT = 128, 4, 2, 256, 512, 2048
SPECIAL = ("<pad>", "<s>", "</s>")
# A grammar lets an untrained model write strings, numbers and blanks for ever; these tokens end them.
ENDING = {'"': 4.0, "}": 3.5, "]": 3.5, ",": 3.0, ":": 3.0, "{": 2.5, "1": 2.0}
TEXT = Path(__file__).parents[2] / "LICENSE"  # any English text that stays as it is
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def make_repository(root: Path) -> str:
    """Make the repository below the hub's root; give its commit."""
    repo = ModelRepo(root, NAME)
    vocabulary, merges = train(TEXT.read_text(encoding="utf-8"))
    texts = {
        "config.json": _config(),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer.json": _tokenizer(vocabulary, merges),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    }
    entries = [repo.store(path, [json.dumps(value, indent=1).encode()], lfs=False) for path, value in texts.items()]
    return repo.commit([*entries, repo.store("model.safetensors", _weights(vocabulary), lfs=True)])


def train(text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn a byte-level BPE: the special tokens, the 256 bytes, then the most frequent pair again and again."""
    letters = _byte_letters()
    counts = Counter(re.findall(r" ?\w+", text))
    words = {word: [letters[byte] for byte in word.encode()] for word in counts}
    tokens, merges = [*SPECIAL, *letters], []
    while len(tokens) < VOCABULARY:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in words.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        # Of equally frequent pairs the first in the alphabet, so that every machine learns the same.
        pair = min(pairs, key=lambda one: (-pairs[one], one))
        words = {word: _merge(parts, pair) for word, parts in words.items()}
        merges.append(pair)
        tokens += ["".join(pair)] if "".join(pair) not in tokens else []
    return {token: number for number, token in enumerate(tokens)}, merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for letter in word:
        if merged and (merged[-1], letter) == pair:
            merged[-1] += letter
        else:
            merged.append(letter)
    return merged


def _byte_letters() -> list[str]:
    """Give the printable letter that stands for each byte in every byte-level BPE."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]


def _tokenizer(vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes |= {f"{layer}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    return {**shapes, "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def _weights(vocabulary: Mapping[str, int]) -> Iterator[bytes]:
    """Yield the safetensors file."""
    tensors = [Tensor(name, "BF16", shape) for name, shape in _shapes().items()]
    yield safetensors_header(tensors)
    for tensor in tensors:
        yield _bfloat16(_numbers(tensor.name, tensor.shape, vocabulary))


def _numbers(name: str, shape: tuple[int, ...], vocabulary: Mapping[str, int]) -> array.array[float]:
    """Draw a tensor; the first dimension of the width is 1 for every token and weighed by `ENDING` at the end."""
    if len(shape) == 1:
        return array.array("f", [1.0] * shape[0])
    chance = random.Random(name)
    numbers = array.array("f", (chance.gauss(0, 0.02) for _ in range(shape[0] * shape[1])))
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        numbers[: shape[1]] = array.array("f", [0.0] * shape[1])
    if name == "model.embed_tokens.weight":
        numbers[::WIDTH] = array.array("f", [1.0] * VOCABULARY)
    if name == "lm_head.weight":
        offsets = {vocabulary[token]: offset for token, offset in ENDING.items()}
        numbers[::WIDTH] = array.array("f", (offsets.get(number, 0.0) for number in range(VOCABULARY)))
    return numbers


def _bfloat16(numbers: array.array[float]) -> bytes:
    """Keep the upper half of each number."""
    whole = numbers.tobytes()
    half = bytearray(len(whole) // 2)
    half[::2], half[1::2] = whole[2::4], whole[3::4]
    return bytes(half)
