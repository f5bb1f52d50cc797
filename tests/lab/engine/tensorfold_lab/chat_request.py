"""A request body, checked and turned into what the model needs to know."""

import json
from dataclasses import dataclass
from typing import Any

from .arguments import Settings

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class RequestError(Exception):
    """A request that is refused."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Ask:
    """A checked request."""

    chat: bool
    model: str
    prompt: str
    question: str
    thinking: bool
    limit: int
    stream: bool
    include_usage: bool
    drafts: bool
    ignore_eos: bool
    stop: tuple[str, ...]
    tool: dict[str, Any] | None
    schema: dict[str, Any] | None


def read_ask(body: dict[str, Any], settings: Settings, *, chat: bool) -> Ask:
    """Check a chat or text completion request."""
    prompt, question = chat_prompt(body, vision=settings.vision) if chat else (text_prompt(body),) * 2
    options = _typed(body, "stream_options", dict, {}) or {}
    if _typed(body, "n", int, 1) != 1:
        raise RequestError("n must be 1")
    return Ask(
        chat=chat,
        model=_typed(body, "model", str, settings.name),
        prompt=prompt,
        question=question,
        thinking=chat and wants_thinking(body, settings.thinking),
        limit=_limit(body, settings.max_tokens),
        stream=_typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        drafts=_typed(body, "draft", bool, True),
        ignore_eos=_typed(body, "ignore_eos", bool, False),
        stop=_stop(body),
        tool=_forced_tool(body) if chat else None,
        schema=_schema(body),
    )


def chat_prompt(body: dict[str, Any], *, vision: bool) -> tuple[str, str]:
    """The rendered prompt and the last user message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list that is not empty")
    lines, question = [], ""
    if tools := body.get("tools"):
        lines.append(f"<|tools|>{json.dumps(tools, sort_keys=True)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("every message needs a role")
        text = _content(message, vision=vision)
        lines.append(f"<|{message['role']}|>{text}")
        if message["role"] == "user":
            question = text
    return "\n".join([*lines, "<|assistant|>"]), question


def text_prompt(body: dict[str, Any]) -> str:
    """The prompt of a text completion."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt must be a text that is not empty")
    return prompt


def wants_thinking(body: dict[str, Any], by_default: bool) -> bool:
    """Whether this request is to be thought about; the template's switch wins over the effort."""
    wanted = by_default
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS and not (type(effort) is int and 1 <= effort <= 100):
            raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}")
        wanted = effort != "none"
    switches = _typed(body, "chat_template_kwargs", dict, {}) or {}
    for switch in ("thinking", "enable_thinking"):
        if isinstance(switches.get(switch), bool):
            wanted = switches[switch]
    return wanted


def _content(message: dict[str, Any], *, vision: bool) -> str:
    content = message.get("content")
    if content is None:
        return json.dumps(message.get("tool_calls", ""))
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url" and vision:
            texts.append("<|image|>")
        else:
            raise RequestError(f"content part of type {kind!r} is not supported")
    return "".join(texts)


def _limit(body: dict[str, Any], longest: int) -> int:
    limits = [_typed(body, name, int, None) for name in ("max_completion_tokens", "max_tokens")]
    given = next((limit for limit in limits if limit is not None), longest)
    if given < 1:
        raise RequestError("max_tokens must be above 0")
    return min(given, longest)


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise RequestError("stop must be a text or a list of texts")
    return stops


def _forced_tool(body: dict[str, Any]) -> dict[str, Any] | None:
    """The function that the reply has to call, if any."""
    tools = [tool.get("function", {}) for tool in _typed(body, "tools", list, []) or [] if isinstance(tool, dict)]
    choice = body.get("tool_choice", "auto")
    if choice in {"auto", "none"} if isinstance(choice, str) else choice is None:
        return None
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice required needs tools")
        return dict(tools[0])
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else choice
    for tool in tools:
        if tool.get("name") == name:
            return dict(tool)
    raise RequestError(f"tool_choice names {name!r}, which is not among the tools")


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    wanted = _typed(body, "response_format", dict, None)
    kind = wanted.get("type") if wanted else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = wanted.get("json_schema", {}).get("schema") if wanted and kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise RequestError(f"response_format {kind!r} is not known or has no schema")
    return schema


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if value is not None and value is not default and type(value) is not kind:
        raise RequestError(f"{name} must be {kind.__name__}")
    return default if value is None else value
