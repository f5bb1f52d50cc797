"""What the rules that `sudo -l` lists say of a command (pure)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

_RULE = re.compile(r"^ {4}\(([^):]*)[^)]*\) (.*)$", re.MULTILINE)
_ITEM = re.compile(r"((?:[A-Z_]+: ?)*)(!?)(.*)")


def frees(rules: str, command: str) -> bool:
    """Whether root's `command`, with its whole path, takes no password: as for sudo, the last rule that fits says it.

    That sudo lists a command says only that it is allowed: one free rule is enough for it to list without a password.
    """
    is_free = False
    for who, items in _RULE.findall(re.sub(r"\n {5,}", " ", rules)):  # it breaks long lines, also into a pipe
        has_tag = False
        for item in re.split(r"(?<!\\), ", items if {"root", "ALL"} & {*re.split(r"[ ,]+", who)} else ""):
            tags, denied, words = _ITEM.fullmatch(item).groups()  # type: ignore[union-attr]  # it fits everything
            has_tag = ("NOPASSWD:" in tags) if "PASSWD:" in tags else has_tag
            if _fits(words, command):
                is_free = has_tag and not denied
    return is_free or re.search(r"(?<!\S)!authenticate\b", rules) is not None


def _fits(rule: str, command: str) -> bool:
    """Whether a rule's path and words are those of the command; /bin is /usr/bin wherever we run."""
    path, _, words = rule.removeprefix("/usr").partition(" ")
    own_path, _, own_words = command.removeprefix("/usr").partition(" ")
    if rule == "ALL" or not words or not fnmatchcase(own_path, path):
        return rule == "ALL" or fnmatchcase(own_path, path)
    if words.startswith("^"):
        return re.search(words, own_words) is not None
    return fnmatchcase(own_words, "" if words == '""' else re.sub(r"\\(.)", r"\1", words))
