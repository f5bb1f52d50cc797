"""What the engine answers, read: whole and streamed completions, counters (pure)."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import SecretStr

from sparkserve.errors import SparkserveError
from sparkserve.hosts import mask

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")
Value = TypeVar("Value")


@dataclass
class EndpointError(SparkserveError):
    """The API gave no good answer; `status` is the HTTP status, 0 where there was none.

    Codes: `endpoint_closed` (nobody listens), `endpoint_timeout`, `endpoint_refused` (HTTP), `endpoint_garbled`.
    """

    status: int = 0

    @property
    def told(self) -> str:
        """The error with the first of the engine's own words, in one line."""
        details = " ".join(self.details.split())[:300]
        return f"{self.message}: {details}" if details else self.message


@dataclass(frozen=True)
class Completion:
    """One reply, its usage, and how long it took in seconds."""

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str
    usage: Mapping[str, Any]
    seconds: float
    first_token_seconds: float | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the reply, as the engine counted them."""
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as the engine counted them."""
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that needed no prefill; None where the engine does not say."""
        details = self.usage.get("prompt_tokens_details") or {}
        found = details.get("cached_tokens")
        return None if found is None else int(found)


def garbled(message: str, details: str = "") -> EndpointError:
    """Say that the API answered something that is no answer."""
    return EndpointError("endpoint_garbled", message, "`sparkserve logs`", "head", details)


def picked(body: Any, pick: Callable[[Any], Value]) -> Value:  # noqa: ANN401 - JSON
    """Take something out of a JSON answer; an answer of another shape is an error that shows it."""
    try:
        return pick(body)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise garbled("the API answered JSON of another shape", json.dumps(body)[:300]) from error


def read_whole(body: Mapping[str, Any], seconds: float) -> Completion:
    """Read a reply that came in one piece."""
    choice = body["choices"][0]
    message = choice["message"]
    return Completion(
        text=message.get("content") or "",
        reasoning=_reasoning(message),
        tool_calls=tuple(call["function"] for call in message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason") or "",
        usage=body.get("usage") or {},
        seconds=seconds,
    )


def _reasoning(message: Mapping[str, Any]) -> str:
    """Engines call the thoughts `reasoning_content` or `reasoning`, some send both."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


class StreamedReply:
    """A streamed reply while it comes in."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self._first: float | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._reason = ""
        self._usage: Mapping[str, Any] = {}
        self._done = False

    def take(self, line: str, secrets: tuple[SecretStr | None, ...]) -> None:
        """Take one line of the event stream."""
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise garbled("the stream holds an event that is no JSON", data[:300]) from error
        if "error" in chunk:
            details = mask(json.dumps(chunk["error"]), secrets)
            raise EndpointError(
                "endpoint_refused", "the stream ended with an error", "`sparkserve logs`", "head", details
            )
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            picked(choice, self._take_choice)

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text, thought, calls = delta.get("content") or "", _reasoning(delta), delta.get("tool_calls") or ()
        if self._first is None and (text or thought or calls):
            self._first = time.monotonic() - self.begun
        self._texts.append(text)
        self._thoughts.append(thought)
        for call in calls:
            known = self._calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
            function = call.get("function") or {}
            known["name"] += function.get("name") or ""
            known["arguments"] += function.get("arguments") or ""
        self._reason = choice.get("finish_reason") or self._reason

    def end(self) -> Completion:
        """Give the whole; a stream that just stops is no reply."""
        if not self._done and not self._reason:
            raise garbled("the stream stopped without an end")
        return Completion(
            text="".join(self._texts),
            reasoning="".join(self._thoughts),
            tool_calls=tuple(self._calls[index] for index in sorted(self._calls)),
            finish_reason=self._reason,
            usage=self._usage,
            seconds=time.monotonic() - self.begun,
            first_token_seconds=self._first,
        )


def parse_metrics(text: str) -> dict[str, float]:
    """Read Prometheus text: name to the sum over all labels; what is no finite number is left out."""
    sums: dict[str, float] = {}
    for name, value in _samples(text):
        if math.isfinite(value):
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            yield match[1], float(match[2])
        except ValueError:
            continue
