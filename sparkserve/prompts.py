"""Texts that we send to a model, made anew each time so that no cache and no memory can fake an answer (pure)."""

from __future__ import annotations

import random

_WORDS = tuple(
    """
    anchor apple april autumn baker barley basket beacon birch bottle bridge bronze brook candle canvas carpet cedar
    cherry clay cliff cloud clover copper corner cotton crane curtain daisy desert door drum eagle east ember falcon
    feather fern ferry field flint forest fountain fox garden ginger glass granite harbor hazel hill honey island ivory
    kettle kite ladder lake lamp leather lemon lily linen maple marble market meadow mill mint mirror moss mountain
    nest north oak olive onion orchard otter paddle paper pear pebble pepper pine plank pond poplar quarry rain raven
    ribbon river road robin rope rose saddle sail salt sand shell silver slate smoke snow south spring stable stone
    """.split()  # noqa: SIM905 - a list of so many quoted words would be a page
)


def random_words(count: int, chance: random.Random) -> str:
    """Make sentences of random everyday words: no two calls agree, so nothing of them can be cached."""
    sentences = []
    while count > 0:
        length = min(chance.randint(6, 12), count)
        words = chance.choices(_WORDS, k=length)
        sentences.append(" ".join([words[0].capitalize(), *words[1:]]) + ".")
        count -= length
    return " ".join(sentences)


def random_name(chance: random.Random) -> str:
    """Make a capitalised name that no text knows."""
    return "".join(chance.choice(part) for part in ("BDKLMNRTV", "aeiou", "lmnrs", "aeiou", "dknrtx", "aeiou", "n"))
