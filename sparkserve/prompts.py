"""Texts that we send to a model, made anew each time so that no cache and no memory can fake an answer (pure)."""

from __future__ import annotations

import random

_WORDS = tuple(
    """
    anchor apple april arrow autumn baker barley basket beacon bell birch bottle bridge bronze brook candle canvas
    carpet cedar chalk cherry clay cliff clock cloud clover copper corner cotton crane curtain daisy desert dock
    door drum eagle east elm ember engine falcon feather fence fern ferry field flint flour forest fountain fox
    garden gate ginger glass glove granite grass gravel hammer harbor hazel hill honey horn island ivory ivy jacket
    jar kettle kite ladder lake lamp lantern leather lemon lily linen lock maple marble market meadow melon mill
    mint mirror moss mountain needle nest north oak oats olive onion orchard otter oven paddle paper path pear
    pebble pepper pine plank plum pocket pond poplar quarry quill rain raven reed ribbon river road robin roof rope
    rose saddle sail salt sand scarf shell shore silk silver slate smoke snow south spoon spring spruce stable stone
    straw sugar summer swan table tea thread tile timber tower trail valley velvet violet wagon wall walnut water
    wheat wheel willow window winter wolf wool yard
    """.split()  # noqa: SIM905 - a list of 190 quoted words would be a page
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
