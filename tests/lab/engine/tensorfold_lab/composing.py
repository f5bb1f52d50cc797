"""From a checked request to the reply's tokens."""

import json
from dataclasses import dataclass
from itertools import islice

from . import answers
from .chat_request import Ask, RequestError
from .control import Script
from .engine import Job, Piece
from .schema_values import SchemaError, SchemaFiller
from .tokens import split_tokens


@dataclass(frozen=True)
class Composer:
    """The model behind the engine: knows whether its tables are there and what it is scripted to get wrong."""

    tables: bool
    drafts: int
    context: int

    def compose(self, ask: Ask, script: Script) -> Job:
        """The job for a request, with the whole reply planned."""
        prompt = split_tokens(ask.prompt)
        if len(prompt) + ask.limit > self.context:
            raise RequestError(f"prompt of {len(prompt)} and reply of {ask.limit} exceed the window of {self.context}")
        text = self._text(ask, script)
        pieces = [Piece("tool" if ask.tool else "content", token) for token in split_tokens(text)]
        if ask.thinking:
            thought = answers.reasoning(ask.question, text)
            pieces = [*(Piece("reasoning", token) for token in split_tokens(thought)), *pieces]
        if ask.ignore_eos:
            missing = max(ask.limit - len(pieces), 0)
            padding = islice(split_tokens(" " + answers.filler(text, missing)), missing)
            pieces += [Piece("content", token) for token in padding]
        cut = len(pieces) > ask.limit or ask.ignore_eos
        reason = "length" if cut else "tool_calls" if ask.tool else "stop"
        return Job(prompt, pieces[: ask.limit], reason, self.drafts if ask.drafts else 0)

    def _text(self, ask: Ask, script: Script) -> str:
        try:
            text = self._structured(ask) if ask.tool or ask.schema else answers.answer(ask.prompt, ask.question)
        except SchemaError as problem:
            raise RequestError(f"schema: {problem}") from problem
        if script.completions == "garbage":
            return answers.garbage(text)
        if not ask.tool and not ask.schema:
            text = text if self.tables and not script.degraded else answers.wrong(text)
            for stop in ask.stop:
                text = text.partition(stop)[0]
        return text or " "

    def _structured(self, ask: Ask) -> str:
        schema = ask.tool.get("parameters", {"type": "object"}) if ask.tool else ask.schema
        if schema == {"type": "object"} and not ask.tool:
            return json.dumps({"answer": answers.answer(ask.prompt, ask.question)})
        known = answers.arithmetic(ask.question[-answers.TAIL :])
        return json.dumps(SchemaFiller(ask.question, known).fill(schema or {}))
