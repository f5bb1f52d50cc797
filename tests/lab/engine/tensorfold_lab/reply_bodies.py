"""The JSON of replies: whole ones and stream chunks, of chat and of text completions."""

import time
from typing import Any

from .chat_request import Ask
from .engine import Job, Piece


class Bodies:
    """Builds the bodies of one reply."""

    def __init__(self, ask: Ask, job: Job, number: int) -> None:
        self.request = f"req-{number}"
        self._ask = ask
        self._job = job
        self._named_tool = False
        kind = "chat.completion" if ask.chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{number}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": ask.model,
        }

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        texts = {
            channel: "".join(p.text for p in pieces if p.channel == channel) for channel in ("reasoning", "content")
        }
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._job.reason, "logprobs": None}
        if self._ask.chat:
            message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or None}
            if texts["reasoning"]:
                message |= {"reasoning_content": texts["reasoning"], "reasoning": texts["reasoning"]}
            if self._ask.tool:
                arguments = "".join(piece.text for piece in pieces if piece.channel == "tool")
                message["tool_calls"] = [self._call(arguments, first=True)]
            else:
                message["content"] = texts["content"]
            choice["message"] = message
        else:
            choice["text"] = texts["content"]
        return {**self._common, "choices": [choice], "usage": self.usage()}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        """The chunks of one round: one for each channel in it, however many tokens that is."""
        runs: list[tuple[str, str]] = []
        for piece in pieces:
            if runs and runs[-1][0] == piece.channel:
                runs[-1] = (piece.channel, runs[-1][1] + piece.text)
            else:
                runs.append((piece.channel, piece.text))
        return [self._chunk(self._delta(channel, text)) for channel, text in runs]

    def closing(self) -> list[dict[str, Any]]:
        """The last chunks: why it ended, and the usage, in a chunk of its own if that was asked for."""
        end = self._chunk({}, reason=self._job.reason)
        if self._ask.include_usage:
            return [end, {**self._common, "choices": [], "usage": self.usage()}]
        return [{**end, "usage": self.usage()}]

    def usage(self) -> dict[str, Any]:
        """Token counts, as the engine counted them."""
        prompt, made = len(self._job.prompt), self._job.generated
        thought = sum(piece.channel == "reasoning" for piece in self._job.reply[:made])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": self._job.cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }

    def _delta(self, channel: str, text: str) -> dict[str, Any]:
        if channel == "reasoning":
            return {"reasoning_content": text, "reasoning": text}
        if channel == "tool":
            first, self._named_tool = not self._named_tool, True
            return {"tool_calls": [{"index": 0, **self._call(text, first=first)}]}
        return {"content": text}

    def _call(self, arguments: str, *, first: bool) -> dict[str, Any]:
        if not first or not self._ask.tool:
            return {"function": {"arguments": arguments}}
        function = {"name": self._ask.tool["name"], "arguments": arguments}
        return {"id": f"call_{self.request}", "type": "function", "function": function}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"delta": delta} if self._ask.chat else {"text": delta.get("content", "")}
        return {**self._common, "choices": [choice]}
