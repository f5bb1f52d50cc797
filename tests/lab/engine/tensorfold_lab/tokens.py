"""Tokens, and the prefix cache over them."""

import hashlib
import re
import threading
import zlib
from collections import OrderedDict

BLOCK_TOKENS = 256
VOCABULARY = 129_280
_PIECE = re.compile(r" ?\w{1,4}|\s+| ?[^\w\s]")


def split_tokens(text: str) -> list[str]:
    """Cut a text into pieces that join back to it: at most four letters each, and single signs."""
    return _PIECE.findall(text)


def token_number(piece: str) -> int:
    """A fixed number for a piece."""
    return zlib.crc32(piece.encode()) % VOCABULARY


def block_names(tokens: list[str]) -> list[bytes]:
    """One name for each whole block, which also stands for everything before it."""
    names: list[bytes] = []
    name = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = "\0".join(tokens[start : start + BLOCK_TOKENS])
        name = hashlib.blake2b(name + block.encode(), digest_size=16).digest()
        names.append(name)
    return names


class PrefixCache:
    """Remembers the blocks of past prompts, the longest unused forgotten first."""

    def __init__(self, window: int) -> None:
        self._capacity = max(window // BLOCK_TOKENS, 1)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def known_tokens(self, names: list[bytes], prompt_tokens: int) -> int:
        """How many tokens at the start of the prompt need no prefill; the last token always does."""
        with self._lock:
            known = 0
            for name in names:
                if name not in self._blocks:
                    break
                self._blocks.move_to_end(name)
                known += 1
        return max(min(known * BLOCK_TOKENS, prompt_tokens - 1), 0)

    def remember(self, names: list[bytes]) -> None:
        """Keep a prompt's blocks."""
        with self._lock:
            for name in names:
                self._blocks[name] = None
                self._blocks.move_to_end(name)
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)

    @property
    def share_used(self) -> float:
        """How full the cache is, 0 to 1."""
        return len(self._blocks) / self._capacity
