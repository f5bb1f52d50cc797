"""Proof that a chat template renders, and thinks when told to: rendered in a sandbox, as engines render it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkserve.errors import SparkserveError

if TYPE_CHECKING:
    import jinja2

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_WORDS = {True: "on", False: "off"}
Fields = Mapping[str, Any]
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 * 19?"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_weather",
        "description": "Look up the weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up_weather", "arguments": {"place": "Rome"}},
}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "How is the weather in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 24 degrees"},
]


def prove(content: bytes, *, default: bool | None, thinking_on: Fields, thinking_off: Fields) -> str:
    """Render the template in every way that we rely on; give what was observed, or raise with what is wrong."""
    template = _compile(content)
    plain = _render(template, "a plain question", _QUESTION, {})
    with_tools = _render(template, "a conversation with tools", _CONVERSATION, {"tools": [_TOOL]})
    if "17 * 19" not in plain or "look_up_weather" not in with_tools or "24 degrees" not in with_tools:
        raise _wrong("it drops a message or the tools")
    proved = ["plain and tools render"]
    if thinking_on and thinking_off:
        proved.append(_prove_thinking(template, plain, {True: thinking_on, False: thinking_off}, default=default))
    efforts = [effort for effort in EFFORTS if _takes(template, effort)]
    if efforts:
        proved.append(f"efforts {', '.join(efforts)}")
    return "; ".join(proved)


def _prove_thinking(
    template: jinja2.Template, plain: str, fields: Mapping[bool, Fields], *, default: bool | None
) -> str:
    """Prove that thinking on and off differ, and that the default is the wanted one."""
    rendered = {
        wanted: _render(template, f"thinking {_WORDS[wanted]}", _QUESTION, _variables(fields[wanted]))
        for wanted in (True, False)
    }
    if rendered[True] == rendered[False]:
        raise _wrong("thinking on and thinking off render the same")
    if default is None:
        return "thinking on and off differ"
    if plain != rendered[default]:
        raise _wrong(f"a request that says nothing of thinking is not rendered as thinking {_WORDS[default]}")
    return f"thinking is {_WORDS[default]} unless asked for"


def _takes(template: jinja2.Template, effort: str) -> bool:
    """Whether the template accepts the name of an effort."""
    try:
        _render(template, f"effort {effort}", _QUESTION, {"reasoning_effort": effort})
    except SparkserveError:
        return False
    return True


def _variables(fields: Fields) -> dict[str, Any]:
    """Give the variables of the template that an engine makes of request fields."""
    variables = dict(fields.get("chat_template_kwargs", {}))
    if "reasoning_effort" in fields:
        variables["reasoning_effort"] = fields["reasoning_effort"]
    return variables


def _compile(content: bytes) -> jinja2.Template:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(content.decode())
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise _wrong(f"it is no Jinja template: {error}") from error


def _render(template: jinja2.Template, what: str, messages: Sequence[Mapping[str, Any]], variables: Fields) -> str:
    import jinja2

    given = {"messages": messages, "add_generation_prompt": True, "tools": None, **variables}
    try:
        return template.render(given)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _wrong(f"it does not render {what}: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    """Write JSON as chat templates expect it: readable, with nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _wrong(observed: str) -> SparkserveError:
    message = f"the patched chat template cannot be used: {observed}"
    return SparkserveError("template_broken", message, "look at `chat_template` and `prologue` of the recipe")
