from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from sparkserve.endpoint import Endpoint, open_endpoint
from sparkserve.replies import EndpointError, parse_metrics
from sparkserve.settings import Settings
from tests.lab_tests.stand_in_pair import Pair, serving
from tests.unit.cases import free_port
from tests.unit.deployments import make_deployment

ASK = {"messages": [{"role": "user", "content": "What is 17 * 19? Reply with the number only."}], "temperature": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving(tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture
def endpoint(pair: Pair) -> Iterator[Endpoint]:
    api = Endpoint(f"http://127.0.0.1:{pair.port}", "flash")
    yield api
    api.close()


def mocked(answer: Callable[[httpx.Request], httpx.Response], key: str = "") -> Endpoint:
    return Endpoint("http://engine", "flash", SecretStr(key) if key else None, httpx.MockTransport(answer))


def refusal(ask: Callable[[], Any]) -> EndpointError:
    with pytest.raises(EndpointError) as caught:
        ask()
    return caught.value


def test_everything_that_a_serving_pair_answers(endpoint: Endpoint) -> None:
    assert endpoint.health() == 200
    assert endpoint.models() == ["flash"]
    reply = endpoint.complete(ASK, 10)
    assert (reply.text, reply.finish_reason, reply.reasoning) == ("323", "stop", "")
    assert reply.completion_tokens > 0
    assert reply.prompt_tokens > 5
    assert endpoint.one_token(10).completion_tokens == 1
    assert (endpoint.tokenize("one two three") or 0) >= 3


def test_a_stream_tells_when_its_first_token_came(pair: Pair, endpoint: Endpoint) -> None:
    pair.script(decode_tokens_per_second=40)
    try:
        more = {"messages": [{"role": "user", "content": "Count from 1 to 12"}]}
        reply = endpoint.stream(more, 20)
    finally:
        pair.script()
    assert reply.text == " ".join(str(number) for number in range(1, 13))
    assert reply.first_token_seconds is not None
    assert 0 < reply.first_token_seconds < reply.seconds - 0.2
    assert reply.cached_tokens == 0
    assert reply.finish_reason == "stop"


def test_a_streamed_tool_call_is_put_together(endpoint: Endpoint) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    ask = {"messages": [{"role": "user", "content": "weather: city is Bergen"}], "tools": [tool]}
    reply = endpoint.stream({**ask, "tool_choice": "required"}, 10)
    assert [(call["name"], json.loads(call["arguments"])) for call in reply.tool_calls] == [
        ("weather", {"city": "Bergen"})
    ]
    assert endpoint.complete({**ask, "tool_choice": "required"}, 10).tool_calls[0]["name"] == "weather"


def test_counters_move_with_a_request(endpoint: Endpoint) -> None:
    before = endpoint.metrics()
    reply = endpoint.complete(ASK, 10)
    after = endpoint.metrics()
    name = "tensorfold:generation_tokens_total"
    assert after[name] - before[name] == reply.completion_tokens


def test_a_wrong_name_is_refused_with_the_engines_words(pair: Pair) -> None:
    with contextlib.closing(Endpoint(f"http://127.0.0.1:{pair.port}", "other")) as other:
        error = refusal(lambda: other.one_token(5))
    assert (error.code, error.status) == ("endpoint_refused", 404)
    assert "`other` does not exist" in error.details


def test_a_hanging_completion_ends_at_its_deadline(pair: Pair, endpoint: Endpoint) -> None:
    pair.script(completions="hang")
    try:
        begun = time.monotonic()
        error = refusal(lambda: endpoint.one_token(0.5))
    finally:
        pair.script()
    assert error.code == "endpoint_timeout"
    assert 0.4 < time.monotonic() - begun < 60


def test_a_stream_that_drips_ends_at_its_deadline(pair: Pair, endpoint: Endpoint) -> None:
    pair.script(decode_tokens_per_second=10)
    try:
        more = {"messages": [{"role": "user", "content": "Count from 1 to 90"}]}
        error = refusal(lambda: endpoint.stream(more, 1.0))
    finally:
        pair.script()
    assert error.code == "endpoint_timeout"


def test_nobody_listens() -> None:
    port = free_port()
    with contextlib.closing(Endpoint(f"http://127.0.0.1:{port}", "flash")) as endpoint:
        error = refusal(endpoint.health)
    assert error.code == "endpoint_closed"
    assert str(port) in error.message


def test_calls_from_several_threads(endpoint: Endpoint) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(endpoint.complete(ASK, 20).text)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == ["323"] * 6


def test_the_key_is_sent_and_never_shown() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer sk-very-secret"
        return httpx.Response(401, text="no such key: sk-very-secret")

    endpoint = mocked(answer, "sk-very-secret")
    error = refusal(lambda: endpoint.one_token(1))
    assert error.hint == "look at SPARKSERVE_API_KEY_FILE"
    assert "sk-very-secret" not in f"{error!r} {endpoint!r}"
    assert "***" in error.details


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": null}]}', b'{"choices": [{}]}'],
)
def test_an_answer_of_another_shape_is_garbled(body: bytes) -> None:
    endpoint = mocked(lambda _request: httpx.Response(200, content=body))
    assert refusal(lambda: endpoint.complete(ASK, 1)).code == "endpoint_garbled"


def test_a_completion_without_a_token_is_no_proof() -> None:
    body = {"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 0}}
    endpoint = mocked(lambda _request: httpx.Response(200, json=body))
    assert refusal(lambda: endpoint.one_token(1)).code == "endpoint_garbled"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["nonsense"], "endpoint_garbled"),
        (['{"choices": [{"delta": {"content": "a"}}]}'], "endpoint_garbled"),
        (['{"error": {"message": "this lane lost a rank"}}'], "endpoint_refused"),
        (['{"choices": [7]}', "[DONE]"], "endpoint_garbled"),
    ],
)
def test_a_broken_stream_is_no_reply(events: list[str], code: str) -> None:
    text = "".join(f"data: {event}\n\n" for event in events)
    endpoint = mocked(lambda _request: httpx.Response(200, text=text))
    assert refusal(lambda: endpoint.stream(ASK, 1)).code == code


def test_reasoning_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        body = {"choices": [{"message": {"content": None, name: "hm"}, "finish_reason": "length"}]}
        reply = mocked(lambda _request, body=body: httpx.Response(200, json=body)).complete(ASK, 1)  # type: ignore[misc]
        assert (reply.reasoning, reply.text, reply.cached_tokens) == ("hm", "", None)


def test_an_engine_without_tokenize() -> None:
    assert mocked(lambda _request: httpx.Response(404)).tokenize("a") is None
    assert refusal(lambda: mocked(lambda _request: httpx.Response(500)).tokenize("a")).status == 500


def test_metrics_add_up_labels_and_leave_out_what_is_no_number() -> None:
    text = """# HELP a_total help
# TYPE a_total counter
a_total{model="x y",path="/}{\\"q"} 2
a_total{model="z"} 3.5 1700000000
b NaN
c{le="+Inf"} 4
d +Inf
vllm:e 1e3

not a sample
"""
    assert parse_metrics(text) == {"a_total": 5.5, "c": 4.0, "vllm:e": 1000.0}


def test_the_address_is_one_that_the_head_can_reach(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1234\n")
    key.chmod(0o600)
    settings = Settings(api_host="0.0.0.0", api_port=9000, api_key_file=key, model_name="mine")
    endpoint = open_endpoint(settings, make_deployment().recipe)
    assert (endpoint.base_url, endpoint.model) == ("http://127.0.0.1:9000", "mine")
    assert endpoint.api_key == SecretStr("sk-1234")
    six = Settings(api_host="::", api_port=9000, api_key_file=key)
    assert open_endpoint(six, make_deployment().recipe).base_url == "http://[::1]:9000"
