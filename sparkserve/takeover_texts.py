"""Their arguments and environment in a recipe's words: secrets by name, the cable's facts by placeholder (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sparkserve.cluster import Role
from sparkserve.container import LinkPlace
from sparkserve.placeholders import render
from sparkserve.takeover_facts import Running
from sparkserve.takeover_families import Family

API_KEY = "api_key"
# A part of a variable's or flag's name that says what it holds; a name that ends in _FILE tells where that lies.
_SECRET_NAME = re.compile(
    r"(?!.*_(?:FILE|PATH|DIR)S?$)(?:.*_)?(?:[A-Z0-9]*(?:TOKEN|KEY|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?"
    r"|PAT|PWD|AUTH|AUTHORIZATION)(?:_.*)?",
    re.IGNORECASE,
)
# What betrays a secret under any name: tokens of well-known makers, and a password in an address.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[bp]-)[A-Za-z0-9_-]{12,}|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
_NO_SECRET = re.compile(r"|-?[\d.]+|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
# Where files of a container are beside its mounts; a random text may begin with a slash, too.
_PATH = re.compile(
    r"/(app|bin|cache|data|dev|etc|home|lib|media|mnt|models?|opt|proc|root|run|s?bin|srv|sys|tmp|usr|var)/.*"
)
# A name with its value inside of a text: a shell's assignment, JSON, a flag.
_NAMED = re.compile(
    r"""(--[\w-]+(?=[=\s])|\w+(?=["']?\s*[=:]))["']?\s*[=:\s]\s*(?:Bearer\s+)?(?:"([^"]*)"|'([^']*)'|([^\s"';&|,}]+))"""
)
# Shorter ones are only taken where they are a whole word: they would be found inside of others.
_SHORT = 8


def find_secrets(running: Running, label: str) -> dict[str, str]:
    """Find everything that must not be read in a recipe: value to name, `api_key` for the key of the served API."""
    found: dict[str, str] = {}
    for name, value in _named(running):
        if _SECRET_NAME.fullmatch(name) and not _is_harmless(value, running):
            if name in (API_KEY, f"{label.upper()}_API_KEY"):
                found[value] = API_KEY
            found.setdefault(value, re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII).upper())
    for text in (*running.argv, *running.env.values()):
        for match in _SECRET_VALUE.finditer(text):
            found.setdefault(match[0], f"SECRET_{len(found) + 1}")
    return found


def _named(running: Running) -> Iterator[tuple[str, str]]:
    """Give all that has a name: variables, each word behind a flag, and what their texts name inside."""
    yield from running.env.items()
    flag = ""
    for word in () if running.is_script else running.words:
        if word.startswith("--"):
            flag = "" if "=" in word else word.lstrip("-").replace("-", "_")
        elif flag:
            yield flag, word
    for text in (*running.argv, *running.env.values()):
        for name, *values in _NAMED.findall(text):
            yield name[2:].replace("-", "_") if name.startswith("--") else name.upper(), "".join(values)


def _is_harmless(value: str, running: Running) -> bool:
    """Whether a value is a word of settings, a path, or what a shell puts another value for."""
    is_reference = running.is_script and value.startswith("$")
    is_path = _PATH.fullmatch(value) or any(PurePosixPath(value).is_relative_to(one.target) for one in running.mounts)
    return bool(_NO_SECRET.fullmatch(value) or is_reference or is_path)


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

    def of(self, running: Running) -> tuple[list[str], dict[str, str]]:
        """Translate a rank's arguments and environment; addresses are named by their node, to lay both side by side."""
        argv = list(running.argv)
        flags = [] if running.is_script else list(self._flag_values(argv))
        texts = [self._text(word, running.role) for word in argv]
        for index, text in flags:
            texts[index] = text
        return texts, {name: self._variable(name, value, running.role) for name, value in running.env.items()}

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
        shown = {value: f"${{secret.{name}}}" for value, name in self.secrets.items()}
        values = sorted(shown, key=len, reverse=True)
        parts = [rf"(?<!\w){re.escape(one)}(?!\w)" if len(one) < _SHORT else re.escape(one) for one in values]
        text = re.sub("|".join([*parts, r"\$\{"]), lambda match: shown.get(match[0], "${dollar}{"), text)
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
