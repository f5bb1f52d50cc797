"""Their arguments and environment in a recipe's words: secrets by name, the cable's facts by placeholder (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkserve.cluster import Role
from sparkserve.container import LinkPlace
from sparkserve.recipe import render
from sparkserve.takeover_facts import Running
from sparkserve.takeover_families import Family, pairs

API_KEY = "api_key"
_SECRET_NAME = re.compile(r"(.*_)?(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
# What betrays a secret under any name: tokens of well-known makers, and a password in an address.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|glpat-|nvapi-|xox[bp]-)[A-Za-z0-9_-]{12,}|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
_NO_SECRET = re.compile(r"|\d+|true|false|[/-].*", re.IGNORECASE)
# Shorter ones are only taken where they are a whole value: they would be found inside of other words.
_SHORT = 8


@dataclass(frozen=True)
class Words:
    """One rank's arguments and environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def find_secrets(running: Running, label: str) -> dict[str, str]:
    """Find everything that must not be read in a recipe: value to name, `api_key` for the key of the served API."""
    found: dict[str, str] = {}
    for name, value in running.env.items():
        if _SECRET_NAME.fullmatch(name) and not _NO_SECRET.fullmatch(value):
            found.setdefault(value, API_KEY if name.upper() == f"{label.upper()}_API_KEY" else name)
    for flag, value in pairs(running.words):
        name = flag.lstrip("-").replace("-", "_")
        if _SECRET_NAME.fullmatch(name) and not _NO_SECRET.fullmatch(value):
            found[value] = API_KEY if name == API_KEY else found.get(value, name.upper())
    for text in (*running.argv, *running.env.values()):
        for match in _SECRET_VALUE.finditer(text):
            found.setdefault(match[0], f"SECRET_{len(found) + 1}")
    return found


def name_apart(both: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the secrets of both ranks; where two values have one name, the later gets a number."""
    joined: dict[str, str] = {}
    for value, name in (item for found in both for item in found.items()):
        if value not in joined:
            taken = sum(other.partition("__")[0] == name for other in joined.values())
            joined[value] = f"{name}__{taken + 1}" if taken else name
    return joined


@dataclass(frozen=True)
class Translation:
    """What is known of the pair: secrets (value to name), both ends of the cable, and values that became parameters."""

    family: Family
    secrets: Mapping[str, str]
    links: Mapping[Role, LinkPlace]
    parameters: Mapping[str, str]

    def of(self, running: Running) -> Words:
        """Translate one rank; addresses are named by their node, so that both ranks can be laid side by side."""
        argv = list(running.argv)
        flags = [] if running.is_script else list(self._flag_values(argv))
        texts = [self._text(word, running.role) for word in argv]
        for index, text in flags:
            texts[index] = text
        env = {name: self._variable(name, value, running.role) for name, value in running.env.items()}
        return Words(tuple(texts), env)

    def _flag_values(self, argv: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Give what a known flag's value becomes, where it says what the recipe's own tables say."""
        for index, word in enumerate(argv):
            flag, is_joined, value = word.partition("=")
            place = index if is_joined else index + 1
            template = self.family.flags.get(flag)
            if template is None or place >= len(argv):
                continue
            told = render(template, self.parameters)
            if told == (value if is_joined else argv[place]):
                yield place, f"{flag}={template}" if is_joined else template

    def _variable(self, name: str, value: str, role: Role) -> str:
        index = self.links[role].gid_index
        if name.endswith("GID_INDEX") and value == str(index):
            return "${link.gid_index}"
        return self._text(value, role)

    def _text(self, text: str, role: Role) -> str:
        link = self.links[role]
        text = text.replace("${", "${dollar}{")
        for value, name in sorted(self.secrets.items(), key=lambda item: -len(item[0])):
            named = f"${{secret.{name}}}"
            if text == value or len(value) >= _SHORT:
                text = text.replace(value, named)
        hcas = ",".join(link.hcas)
        if hcas and text.lstrip("=^") == hcas:
            return text.replace(hcas, "${link.hcas}")
        facts = [(self.links[side].address, f"${{{side}.link.address}}") for side in self.links]
        for value, named in (*facts, (link.interface, "${link.interface}")):
            text = re.sub(rf"(?<![\w.]){re.escape(value)}(?![\w.])", named, text) if value else text
        return text


def lay_together(head: Sequence[str], worker: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Give the words that both ranks begin with, in one form, and the rest of each."""
    shared: list[str] = []
    for left, right in zip(head, worker, strict=False):
        both = one_form(left, right)
        if both is None:
            break
        shared.append(both)
    return shared, list(head[len(shared) :]), list(worker[len(shared) :])


def one_form(head: str, worker: str) -> str | None:
    """Give the one text that means the right thing on each rank; None where there is none."""
    if head == worker:
        return head
    if (head, worker) == ("0", "1"):
        return "${rank}"
    own = head.replace("${head.link.address}", "${link.address}")
    return own if own == worker.replace("${worker.link.address}", "${link.address}") else None


def split_env(
    head: Mapping[str, str], worker: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Give the variables of both ranks, and those of each; their order means nothing, since no name comes twice."""
    joined = {name: one_form(value, worker[name]) for name, value in head.items() if name in worker}
    shared = {name: text for name, text in joined.items() if text is not None}
    own = [{name: value for name, value in env.items() if name not in shared} for env in (head, worker)]
    return shared, own[0], own[1]
