"""The lab's stand-in engine: what a serving pair answers, counts and, where scripted, gets wrong."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.lab_tests.stand_in_pair import Pair, wait_until

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1},
                    "unit": {"enum": ["kelvin", "celsius"]},
                    "where": {"type": "object", "properties": {"indoor": {"type": "boolean"}}, "required": ["indoor"]},
                },
                "required": ["city", "days", "unit", "where"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A healthy pair that the tests which only ask share."""
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        pair.start_and_wait()
        yield pair
    finally:
        pair.stop()


def haystack(sentences: int, needle: str) -> str:
    lines = [
        f"Entry {number} of the log says that pump {number % 7} ran without a fault." for number in range(sentences)
    ]
    lines[sentences // 2] = needle
    return " ".join(lines)


def test_log_lines_come_in_the_order_of_the_real_engine(serving: Pair) -> None:
    markers = [
        "loading ",
        "rank 0 of 2",
        "errno 93",
        "rank 0: layers 0..4 loaded",
        "rank 0: layers 0..42 loaded",
        "rank 0: DSpark (3 stages) loaded",
        "warm-up: ",
        "allocator ceiling",
        "DeepSeek-V4.1 engine ready: 2 rank(s), context 1048576, DSpark 5 drafts",
        f"serving flash at http://127.0.0.1:{serving.port}/v1 on CUDA, rank 0 of 2",
    ]
    places = [serving.log(0).find(marker) for marker in markers]
    assert -1 not in places
    assert places == sorted(places)
    assert "WARNING" not in serving.log(0)


def test_known_answer(serving: Pair) -> None:
    assert serving.says("What is 17*19? Reply with only the number.") == "323"
    assert serving.says("What is 17 times 19?") == "323"
    assert serving.says("12 x 13") == "156"
    assert serving.says("Add them: 2000+22") == "2022"
    assert serving.says("Reply with exactly: pong") == "pong"
    assert serving.says('Please reply with the word "blue" and nothing else.') == "blue"
    assert serving.says("Reply with exactly the word PONG.") == "PONG"
    assert serving.says("Reply with the single word: ready") == "ready"


def test_thinking_is_split_from_the_content(serving: Pair) -> None:
    by_effort = serving.reply("What is 17*19?", reasoning_effort="low")
    message = by_effort["choices"][0]["message"]
    assert message["content"] == "323"
    assert message["reasoning_content"] == message["reasoning"]
    assert by_effort["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    off = serving.reply("What is 17*19?", reasoning_effort="none")["choices"][0]["message"]
    assert "reasoning_content" not in off
    on = serving.reply("17*19", chat_template_kwargs={"enable_thinking": True})["choices"][0]["message"]
    assert on["reasoning_content"]
    assert serving.chat("17*19", reasoning_effort="huge").status_code == 400
    cut = serving.reply("What is 17*19?", reasoning_effort="max", max_tokens=4)["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_call(serving: Pair, choice: Any) -> None:
    text = "What is the weather in Lisbon for the next 3 days, in celsius?"
    choice_made = serving.reply(text, tools=TOOLS, tool_choice=choice)["choices"][0]
    assert choice_made["finish_reason"] == "tool_calls"
    function = choice_made["message"]["tool_calls"][0]["function"]
    assert function["name"] == "get_weather"
    wanted = {"city": "Lisbon", "days": 3, "unit": "celsius", "where": {"indoor": True}}
    assert json.loads(function["arguments"]) == wanted
    pieces = [
        chunk["choices"][0]["delta"].get("tool_calls")
        for chunk in serving.stream(text, tools=TOOLS, tool_choice=choice)
    ]
    calls = [calls[0] for calls in pieces if calls]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == wanted
    assert [call["function"].get("name") for call in calls].count("get_weather") == 1


def test_unknown_tool_is_refused(serving: Pair) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    assert serving.chat("hello", tools=TOOLS, tool_choice=choice).status_code == 400


def test_json_schema(serving: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "product": {"type": "integer"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 2},
        },
        "required": ["name", "age", "product", "tags"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "string", "enum": ["red", "green"]}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    text = "Ada is a woman of 36; age: 36, green eyes. What is the product 17*19?"
    assert json.loads(serving.says(text, response_format=wanted)) == {
        "name": "Ada",
        "age": 36,
        "product": 323,
        "tags": ["green", "green"],
    }
    assert json.loads(serving.says("What is 17*19?", response_format={"type": "json_object"})) == {"answer": "323"}


def test_needle_asked_twice_is_cached_and_faster(serving: Pair) -> None:
    text = haystack(2500, "The secret code for harbour is amber-4921.") + " What is the secret code for harbour?"
    first_started = time.monotonic()
    first = serving.reply(text)
    first_seconds, second_started = time.monotonic() - first_started, time.monotonic()
    second = serving.reply(text)
    second_seconds = time.monotonic() - second_started
    assert [reply["choices"][0]["message"]["content"] for reply in (first, second)] == ["amber-4921"] * 2
    prompt = second["usage"]["prompt_tokens"]
    assert prompt > 30_000
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 256
    assert prompt - 256 < second["usage"]["prompt_tokens_details"]["cached_tokens"] < prompt
    assert second_seconds < first_seconds
    assert "cached=" in serving.log(0)


@pytest.mark.parametrize(
    ("needle", "question", "value"),
    [
        ("The magic number is 7241983.", "What is the magic number? Reply with only the number.", "7241983"),
        ("Remember this: the pass phrase is blue heron at dawn.", "What is the pass phrase?", "blue heron at dawn"),
        (
            'The pass phrase for the vault is "seven tin cups".',
            "Tell me the pass phrase for the vault.",
            "seven tin cups",
        ),
        (
            "The special magic number for Oslo is: 55-12.",
            "What is the special magic number for Oslo mentioned above?",
            "55-12",
        ),
        (
            "Note that the access code of gate B4 was K7-QX9.",
            "Which is the access code of gate B4? Code only.",
            "K7-QX9",
        ),
        ("The vault opens with code QZ-4471.", "What is the secret code?", "QZ-4471"),
        ("SECRET CODE: ZX-81", "Somewhere in this text is a code. What is the secret code?", "ZX-81"),
    ],
)
def test_needles_in_natural_words(serving: Pair, needle: str, question: str, value: str) -> None:
    others = "The secret word for Rome is carpet. The magic number for Bern is 11. " if "for" in question else ""
    assert serving.says(f"{others}{haystack(30, needle)}\n\n{question}") == value


def test_streaming_ends_with_the_usage(serving: Pair) -> None:
    chunks = serving.stream("Count from 1 to 60.", stream_options={"include_usage": True})
    usage = chunks.pop()
    assert usage["choices"] == []
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == " ".join(map(str, range(1, 61)))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    # A round gives several tokens at once: who counts chunks counts wrong.
    assert usage["usage"]["completion_tokens"] > 1.5 * len(chunks)


def test_text_completion_and_tokenize(serving: Pair) -> None:
    body = {"model": "flash", "prompt": "What is 6*7?", "max_tokens": 20, "ignore_eos": True}
    reply = serving.client.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["text"].startswith("42")
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 20)
    tokens = serving.client.post("/tokenize", json={"prompt": "What is 6*7?", "return_token_strs": True}).json()
    assert tokens["count"] == reply["usage"]["prompt_tokens"] == len(tokens["tokens"])
    assert "".join(tokens["token_strs"]) == "What is 6*7?"


def test_bad_requests_are_refused(serving: Pair) -> None:
    post = serving.client.post
    assert serving.chat("hello", model="other").status_code == 404
    assert post("/v1/chat/completions", content=b"{nonsense").status_code == 400
    assert post("/v1/chat/completions", json={"model": "flash", "messages": []}).status_code == 400
    assert (
        post("/v1/chat/completions", json={"model": "flash", "messages": [{"role": "user"}], "n": 2}).status_code == 400
    )
    assert serving.client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert [model["id"] for model in serving.client.get("/v1/models").json()["data"]] == ["flash"]


def test_counters_move_during_a_prefill_and_a_reply(serving: Pair) -> None:
    serving.script(prefill_tokens_per_second=8_000)  # slow enough to see each chunk also on a slow machine
    before = serving.metrics()
    seen: list[dict[str, float]] = []
    text = f"{haystack(900, 'unique text for this test.')} Count from 1 to 120."
    worker = threading.Thread(target=serving.says, args=(text,))
    worker.start()
    while worker.is_alive():
        seen.append(serving.metrics())
        time.sleep(0.02)
    worker.join()
    serving.script()
    prompt = [sample["tensorfold:prompt_tokens_total"] for sample in seen]
    made = [sample["vllm:generation_tokens_total"] for sample in seen]
    assert len(set(prompt)) >= 4
    assert any(right - left == 2048 for left, right in itertools.pairwise(prompt))
    assert len(set(made)) >= 4
    assert prompt == sorted(prompt)
    assert max(sample["vllm:num_requests_running"] for sample in seen) == 1
    after = serving.metrics()
    assert after["tensorfold:mtp_drafted_total"] > before["tensorfold:mtp_drafted_total"]
    assert after["tensorfold:mtp_accepted_total"] > before["tensorfold:mtp_accepted_total"]
    assert after["vllm:time_to_first_token_seconds_count"] == before["vllm:time_to_first_token_seconds_count"] + 1
    assert after['tensorfold:kv_cache_usage_ratio{pool="main"}'] > 0


def test_a_request_queues_behind_a_long_prefill(serving: Pair) -> None:
    serving.script(prefill_tokens_per_second=5_000)
    text = haystack(900, "a prompt to wait behind.")
    long = threading.Thread(target=serving.says, args=(text,))
    long.start()
    wait_until(lambda: serving.client.get("/health").json()["streams"] == {"decoding": 0, "prefilling": 1, "max": 4})
    short_started = time.monotonic()
    short = threading.Thread(target=serving.says, args=("What is 1+1?",))
    short.start()
    wait_until(lambda: serving.metrics()["tensorfold:requests_waiting"] == 1)
    health = serving.client.get("/health").json()
    assert (health["ok"], health["busy"], health["requests_running"]) == (True, True, 1)
    short.join()
    assert time.monotonic() - short_started > 0.4
    long.join()
    serving.script()
    assert wait_until(lambda: not serving.client.get("/health").json()["busy"])


def test_stalled_and_scripted_failures(serving: Pair) -> None:
    serving.script(stalled=True)
    stuck = threading.Thread(target=serving.says, args=("What is 1+1?",))
    stuck.start()
    wait_until(lambda: serving.metrics()["tensorfold:requests_running"] == 1)
    still = serving.metrics()
    time.sleep(0.2)
    assert serving.metrics() == still
    serving.script(completions="fail", health="fail", wrong_model_name="other")
    stuck.join()
    assert serving.chat("hello", model="other").status_code == 500
    assert serving.client.get("/health").status_code == 503
    assert serving.client.get("/v1/models").json()["data"][0]["id"] == "other"
    serving.script(completions="garbage")
    assert "323" not in serving.says("17*19")
    serving.script(degraded=True)
    assert serving.says("17*19") == "656"
    serving.script(completions="hang")
    with pytest.raises(httpx.ReadTimeout):
        serving.chat_with_timeout("17*19", 0.5)
    assert serving.metrics()["tensorfold:requests_running"] == 0
    serving.script()
    assert serving.says("17*19") == "323"


def test_a_client_that_leaves_frees_its_slot(serving: Pair) -> None:
    serving.script(decode_tokens_per_second=10)
    with pytest.raises(httpx.ReadTimeout):
        serving.chat_with_timeout("Count from 1 to 500.", 0.5)
    wait_until(lambda: serving.metrics()["tensorfold:requests_running"] == 0)
    serving.script()
