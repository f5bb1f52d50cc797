"""Everything HTTP between us and the engine: health, models, completions, counters; every call has its deadline."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from sparkserve.hosts import mask
from sparkserve.parameters import api_address, decide_parameters, read_api_key
from sparkserve.recipe import Recipe
from sparkserve.replies import Completion, EndpointError, StreamedReply, garbled, parse_metrics, picked, read_whole
from sparkserve.settings import Settings

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Endpoint:
    """The API of the pair under the name it serves; calls may come from several threads."""

    base_url: str
    model: str
    api_key: SecretStr | None = None
    transport: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        headers = {"Authorization": f"Bearer {self.api_key.get_secret_value()}"} if self.api_key else {}
        # trust_env off: a proxy of the environment must never stand between us and our own API. That speaks plain HTTP:
        # an empty TLS context saves reading all the certificates of the system.
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Each call opens its own connection: the engine may be another one by then, and on a used one a server that
        # sends head and body apart waits 40 ms for our acknowledgement in between.
        once = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(
            base_url=self.base_url,
            headers=headers,
            trust_env=False,
            transport=self.transport,
            verify=plain,
            limits=once,
        )

    def prepare(self) -> None:
        """Load what the first call needs, which takes a moment; nothing is sent."""
        _ = self._client

    def close(self) -> None:
        """Give the connections back."""
        if "_client" in self.__dict__:
            self._client.close()

    def health(self, path: str = "/health", timeout: float = 2.0) -> int:
        """Ask whether HTTP is open and give the status; 200 says no more than that."""
        return self._send("GET", path, timeout).status_code

    def models(self, timeout: float = 5.0) -> list[str]:
        """List the names under which the engine serves."""
        return picked(self._json("GET", "/v1/models", timeout), lambda body: [item["id"] for item in body["data"]])

    def metrics(self, path: str = "/metrics", timeout: float = 2.0) -> dict[str, float]:
        """Read the counters; samples of one name are added up over their labels."""
        return parse_metrics(_checked(self._send("GET", path, timeout), self._secrets).text)

    def tokenize(self, text: str, timeout: float = 30.0) -> int | None:
        """Count the tokens of a text; None where the engine has no such route."""
        try:
            body = self._json("POST", "/tokenize", timeout, {"model": self.model, "prompt": text})
        except EndpointError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        return picked(body, lambda found: int(found["count"]))

    def complete(self, request: Mapping[str, Any], timeout: float) -> Completion:
        """Ask for a whole chat completion."""
        begun = time.monotonic()
        body = self._json("POST", "/v1/chat/completions", timeout, {"model": self.model, **request})
        return picked(body, lambda found: read_whole(found, time.monotonic() - begun))

    def one_token(self, timeout: float) -> Completion:
        """Ask for a single token: the cheapest proof that the model answers."""
        request = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
        reply = self.complete(request, timeout)
        if reply.completion_tokens < 1 and not (reply.text or reply.reasoning):
            message = "the API answered a completion without a token"
            raise EndpointError("endpoint_garbled", message, "`sparkserve logs`", "head")
        return reply

    def stream(self, request: Mapping[str, Any], timeout: float) -> Completion:
        """Ask for a streamed chat completion and note when its first token came."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **request}
        reading = StreamedReply(time.monotonic())
        with _explained(self.base_url, timeout), self._stream(body, timeout) as response:
            if response.status_code != 200:
                response.read()
                _checked(response, self._secrets)
            for line in response.iter_lines():
                if time.monotonic() - reading.begun > timeout:
                    raise _timed_out(timeout)
                reading.take(line, self._secrets)
        return reading.end()

    def _stream(self, body: Mapping[str, Any], timeout: float) -> Any:  # noqa: ANN401 - httpx's context manager
        return self._client.stream("POST", "/v1/chat/completions", json=body, timeout=_limits(timeout))

    @property
    def _secrets(self) -> tuple[SecretStr | None, ...]:
        return (self.api_key,)

    def _send(self, method: str, path: str, timeout: float, body: object = None) -> httpx.Response:
        with _explained(self.base_url, timeout):
            return self._client.request(method, path, json=body, timeout=_limits(timeout))

    def _json(self, method: str, path: str, timeout: float, body: object = None) -> Any:  # noqa: ANN401 - JSON
        response = _checked(self._send(method, path, timeout, body), self._secrets)
        try:
            return response.json()
        except ValueError as error:
            raise garbled(f"{path} answered no JSON", response.text[:300]) from error


def open_endpoint(settings: Settings, recipe: Recipe) -> Endpoint:
    """Give the API as the settings and the recipe advertise it; nothing is sent yet."""
    name = decide_parameters(settings, recipe).model_name
    return Endpoint(api_address(settings, recipe), name, read_api_key(settings))


@contextlib.contextmanager
def _explained(base_url: str, timeout: float) -> Iterator[None]:
    """Turn httpx's errors into ours."""
    import httpx

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        message = f"nobody listens at {base_url}"
        raise EndpointError("endpoint_closed", message, "`sparkserve status`", "head", str(error)) from error
    except httpx.TimeoutException as error:
        raise _timed_out(timeout) from error
    except httpx.HTTPError as error:
        message = f"the API at {base_url} cut the answer off"
        raise EndpointError("endpoint_garbled", message, "`sparkserve logs`", "head", str(error)) from error


def _limits(timeout: float) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(timeout, connect=min(timeout, 2.0))


def _timed_out(timeout: float) -> EndpointError:
    return EndpointError(
        "endpoint_timeout", f"the API gave no answer within {timeout:g} s", "`sparkserve status`", "head"
    )


def _checked(response: httpx.Response, secrets: tuple[SecretStr | None, ...]) -> httpx.Response:
    if response.status_code == 200:
        return response
    hints = {401: "look at SPARKSERVE_API_KEY_FILE", 403: "look at SPARKSERVE_API_KEY_FILE"}
    raise EndpointError(
        "endpoint_refused",
        f"{response.request.url.path} answered HTTP {response.status_code}",
        hints.get(response.status_code, "`sparkserve logs`"),
        "head",
        mask(response.text[:1000], secrets),
        status=response.status_code,
    )
