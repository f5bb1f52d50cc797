"""Proofs by real requests: what the pair answers is compared with what must be true, made anew in each run."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkserve.endpoint import Endpoint
from sparkserve.errors import EXIT_NOT_READY
from sparkserve.prompts import random_name, random_words
from sparkserve.recipe import CheckName, Verify
from sparkserve.replies import Completion, EndpointError

Outcome = Literal["ok", "fail", "unseen", "not applicable"]
_SECONDS = 600.0
_LONG_SECONDS = 1800.0
# Generous, so that a model which thinks before it answers is not cut off.
_REPLY_TOKENS = 4096
_THINKING_TOKENS = 16_384
_TAGS = re.compile(r"</?think(ing)?>", re.IGNORECASE)
_NEED_TRAINING: tuple[CheckName, ...] = ("answer", "thinking", "needle")
_RIGHT = ", with the values of the prompt"


@dataclass(frozen=True)
class Proof:
    """One check: what was observed against what was needed, and how long it took in seconds."""

    name: str
    verdict: Outcome
    observed: str
    needed: str
    seconds: float


@dataclass(frozen=True)
class Exam:
    """Who is asked, what the recipe says about it, and where the random numbers come from.

    `is_busy` tells whether the engine works on requests at this moment: one that waits behind them proves nothing.
    """

    endpoint: Endpoint
    recipe: Verify
    context: int
    chance: random.Random = field(default_factory=random.SystemRandom)
    is_busy: Callable[[], bool] = lambda: False

    def request(self, prompt: str, more: Mapping[str, Any] | None = None, *, thinking: bool = False) -> dict[str, Any]:
        """Build a chat request with the recipe's own words for thinking."""
        fields = self.recipe.thinking_on if thinking else self.recipe.thinking_off
        limit = min(_THINKING_TOKENS if thinking else _REPLY_TOKENS, max(self.context // 4, 16))
        messages = [{"role": "user", "content": prompt}]
        # Greedy decoding sends thinking models round in circles, so only plain answers are asked for at 0.
        heat = {} if thinking else {"temperature": 0}
        return {"messages": messages, "max_tokens": limit, **heat, **fields, **(more or {})}


@dataclass(frozen=True)
class _Finding:
    holds: bool
    observed: str


def verify(exam: Exam, tell: Callable[[str], None]) -> list[Proof]:
    """Ask everything that the recipe lists; one failed request does not keep the others from being asked.

    Where nobody listens there is nothing to prove, and that is the error.
    """
    try:
        exam.endpoint.health("/v1/models")
    except EndpointError as error:
        if error.code == "endpoint_closed":  # what else it has, the checks tell
            error.hint, error.exit_code = "sparkserve start", EXIT_NOT_READY
            raise
    proofs = []
    for name in exam.recipe.checks:
        tell(name)
        proofs.append(_prove(exam, name))
    return proofs


def _prove(exam: Exam, name: CheckName) -> Proof:
    ask, needed = _CHECKS[name]
    if exam.recipe.untrained:
        needed = needed.removesuffix(_RIGHT)
    if exam.recipe.untrained and name in _NEED_TRAINING:
        return Proof(name, "not applicable", "random weights", needed, 0.0)
    begun = time.monotonic()
    try:
        finding = ask(exam)
    except EndpointError as error:
        finding = _Finding(holds=False, observed=error.told)
        if error.code == "endpoint_timeout" and exam.is_busy():
            observed = f"{error.message}: it is busy with requests, and its counters move"
            return Proof(name, "unseen", observed, needed, time.monotonic() - begun)
    return Proof(name, "ok" if finding.holds else "fail", finding.observed, needed, time.monotonic() - begun)


def _shown(text: str) -> str:
    words = " ".join(text.split())
    return repr(words if len(words) <= 120 else words[:117] + "...")


def _emptiness(reply: Completion) -> str:
    """Say why a reply has no text: it may be all thoughts, or cut off."""
    if reply.reasoning:
        return f"only reasoning, no text ({reply.completion_tokens} tokens, finish {reply.finish_reason})"
    return f"an empty reply (finish {reply.finish_reason})"


# -- the checks -------------------------------------------------------------------------------------------------------


def _answer(exam: Exam) -> _Finding:
    """Ask for a product that the model must compute, and the served name in the list of models."""
    names = exam.endpoint.models()
    if exam.endpoint.model not in names:
        return _Finding(holds=False, observed=f"/v1/models lists {', '.join(names) or 'nothing'}")
    left, right = exam.chance.randint(12, 99), exam.chance.randint(12, 99)
    prompt = f"What is {left} * {right}? Reply with the number only."
    reply = exam.endpoint.complete(exam.request(prompt), _SECONDS)
    return _judge_product(reply, left * right, f"{left} * {right}")


def _judge_product(reply: Completion, product: int, asked: str) -> _Finding:
    if not reply.text.strip():
        return _Finding(holds=False, observed=_emptiness(reply))
    right = _has_number(reply.text, product) and not _TAGS.search(reply.text)
    return _Finding(holds=right, observed=f"{asked} = {product}; the reply: {_shown(reply.text)}")


def _has_number(text: str, number: int) -> bool:
    return str(number) in re.findall(r"\d+", re.sub(r"(?<=\d)[,\u202f](?=\d{3}\b)", "", text))


def _thinking(exam: Exam) -> _Finding:
    """Ask for a reply that thinks, with the thoughts in a field of their own."""
    left, right = exam.chance.randint(12, 99), exam.chance.randint(12, 99)
    prompt = f"What is {left} * {right}? Think it through, then reply with the number only."
    reply = exam.endpoint.complete(exam.request(prompt, thinking=True), _SECONDS)
    if not reply.reasoning.strip():
        return _Finding(holds=False, observed=f"no reasoning; the reply: {_shown(reply.text)}")
    found = _judge_product(reply, left * right, f"{left} * {right}")
    return _Finding(found.holds, f"{len(reply.reasoning.split())} words of reasoning; {found.observed}")


def _tool(exam: Exam) -> _Finding:
    """Ask for a call of the one tool that is offered and required."""
    reading, station = exam.chance.randint(1000, 9999), random_name(exam.chance)
    properties = {"station": {"type": "string"}, "reading": {"type": "integer"}}
    parameters = _object(properties)
    # Without `strict`, vLLM keeps a forced call to the tool's name and lets its arguments be any JSON.
    tool = {"name": "store_reading", "description": "Store a reading", "strict": True, "parameters": parameters}
    prompt = f"Store this with the tool: station is {station}, reading is {reading}."
    more = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    reply = exam.endpoint.complete(exam.request(prompt, more), _SECONDS)
    if not reply.tool_calls:
        return _Finding(holds=False, observed=f"no tool call; the reply: {_shown(reply.text) or _emptiness(reply)}")
    call = reply.tool_calls[0]
    wanted = {"station": station, "reading": reading}
    found = _judge_object(exam, str(call.get("arguments", "")), properties, wanted)
    named = call.get("name") == "store_reading"
    return _Finding(found.holds and named, f"called {call.get('name')} with {found.observed}")


def _schema(exam: Exam) -> _Finding:
    """Ask for a JSON object that the given schema allows, with the values of the prompt."""
    crew, ship = exam.chance.randint(100, 999), random_name(exam.chance)
    properties = {"ship": {"type": "string"}, "crew": {"type": "integer"}}
    schema = {"name": "ship", "strict": True, "schema": _object(properties)}
    prompt = f"Give this as JSON: ship is {ship}, crew is {crew}."
    more = {"response_format": {"type": "json_schema", "json_schema": schema}}
    reply = exam.endpoint.complete(exam.request(prompt, more), _SECONDS)
    if not reply.text.strip():
        return _Finding(holds=False, observed=_emptiness(reply))
    return _judge_object(exam, reply.text, properties, {"ship": ship, "crew": crew})


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _judge_object(
    exam: Exam, text: str, properties: Mapping[str, Mapping[str, str]], wanted: Mapping[str, object]
) -> _Finding:
    """Compare a JSON text with what the prompt said; an untrained model need only keep to the schema."""
    try:
        found = json.loads(text)
    except ValueError:
        return _Finding(holds=False, observed=f"no JSON: {_shown(text)}")
    kinds = {"string": str, "integer": int}
    fits = (
        isinstance(found, dict)
        and found.keys() == properties.keys()
        and all(type(found[name]) is kinds[rule["type"]] for name, rule in properties.items())
    )
    return _Finding(fits and (exam.recipe.untrained or found == wanted), _shown(json.dumps(found)))


def _needle(exam: Exam) -> _Finding:
    """Ask twice for a code inside a long new text: the second time shows what the prefix cache is worth."""
    code, place = exam.chance.randint(100_000, 999_999), random_name(exam.chance)
    prompt = _haystack(exam, f"The secret code of {place} is {code}.")
    prompt += f"\n\nWhat is the secret code of {place}? Reply with the code only."
    first, second = (exam.endpoint.stream(exam.request(prompt), _LONG_SECONDS) for _ in range(2))
    found = [_has_number(reply.text, code) for reply in (first, second)]
    cached = [reply.cached_tokens for reply in (first, second)]
    parts = [
        f"{'both' if all(found) else 'one' if any(found) else 'none'} of two replies gave {code}",
        f"{first.prompt_tokens:,} prompt tokens",
        f"first token after {_seconds(first)}, the second time {_seconds(second)}",
        f"cached {_count(cached[0])}, then {_count(cached[1])}",
    ]
    parts += [
        f"a reply: {_shown(reply.text)}" for reply, right in zip((first, second), found, strict=True) if not right
    ]
    return _Finding(all(found), "; ".join(parts))


def _haystack(exam: Exam, needle: str) -> str:
    """Make a text of the recipe's length, measured by the engine's own tokenizer where it has one, needle inside."""
    wanted = min(exam.recipe.needle_tokens, exam.context // 2)
    sample = random_words(400, exam.chance)
    tokens = exam.endpoint.tokenize(sample)
    words = int(wanted * 400 / tokens) if tokens else int(wanted * 0.7)
    before = int(words * exam.chance.uniform(0.3, 0.7))
    return f"{random_words(before, exam.chance)} {needle} {random_words(words - before, exam.chance)}"


def _seconds(reply: Completion) -> str:
    return "no token" if reply.first_token_seconds is None else f"{reply.first_token_seconds:.2f} s"


def _count(tokens: int | None) -> str:
    return "not told" if tokens is None else f"{tokens:,}"


_CHECKS: Mapping[CheckName, tuple[Callable[[Exam], _Finding], str]] = {
    "answer": (_answer, "the served name is listed, and the reply holds the right product and no thinking tag"),
    "thinking": (_thinking, "thoughts in a field of their own, and the right product in the text"),
    "tool": (_tool, f"a call of the required tool that its schema allows{_RIGHT}"),
    "schema": (_schema, f"JSON that the schema allows{_RIGHT}"),
    "needle": (_needle, "the code of the long text, both times"),
}
