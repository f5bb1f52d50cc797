from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sparkserve.endpoint import Endpoint
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, SparkserveError, exit_code_of
from sparkserve.prompts import random_name
from sparkserve.recipe import Verify
from sparkserve.recipe_source import load_recipe
from sparkserve.status_look import is_busy
from sparkserve.verify import Exam, Proof, verify
from tests.lab_tests.stand_in_pair import Pair, serving, wait_until

NEEDLE_TOKENS = 3000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving(tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture
def exam(pair: Pair) -> Iterator[Exam]:
    pair.script()
    endpoint = Endpoint(f"http://127.0.0.1:{pair.port}", "flash")
    recipe = load_recipe("tensorfold-1017").verification.model_copy(update={"needle_tokens": NEEDLE_TOKENS})
    yield Exam(endpoint, recipe, 65_536)
    endpoint.close()
    pair.script()


def by_name(exam: Exam) -> dict[str, Proof]:
    asked: list[str] = []
    proofs = verify(exam, asked.append)
    assert asked == [proof.name for proof in proofs] == list(exam.recipe.checks)
    return {proof.name: proof for proof in proofs}


def verdicts(exam: Exam) -> dict[str, str]:
    return {name: proof.verdict for name, proof in by_name(exam).items()}


def test_a_good_pair_proves_all_five(exam: Exam) -> None:
    proofs = by_name(exam)
    assert {name: proof.verdict for name, proof in proofs.items()} == dict.fromkeys(exam.recipe.checks, "ok"), proofs
    assert "words of reasoning" in proofs["thinking"].observed
    assert "called store_reading" in proofs["tool"].observed
    needle = proofs["needle"].observed
    assert "both of two replies" in needle
    prompt = int(needle.split(" prompt tokens")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert 0.8 * NEEDLE_TOKENS < prompt < 1.2 * NEEDLE_TOKENS
    first, second = (int(part.replace(",", "")) for part in needle.split("cached ")[1].split(", then "))
    assert first < 100
    assert second > 0.8 * prompt


def test_nobody_there_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    exam = Exam(Endpoint(f"http://127.0.0.1:{port}", "flash"), load_recipe("tensorfold-1017").verification, 65_536)
    with pytest.raises(SparkserveError) as caught:
        verify(exam, lambda _text: None)
    error = caught.value
    assert (error.code, error.exit_code, error.hint) == ("endpoint_closed", EXIT_NOT_READY, "sparkserve start")


def test_each_run_asks_something_else(exam: Exam) -> None:
    few = replace(exam, recipe=exam.recipe.model_copy(update={"checks": ("answer", "tool")}))
    observed = {proof.observed for _ in range(3) for proof in verify(few, print)}
    assert len(observed) == 6


@pytest.mark.parametrize(
    ("script", "failing"),
    [
        ({"degraded": True}, {"answer", "thinking", "needle"}),
        ({"completions": "garbage"}, {"answer", "thinking", "tool", "schema", "needle"}),
        ({"completions": "fail"}, {"answer", "thinking", "tool", "schema", "needle"}),
        ({"wrong_model_name": "other"}, {"answer", "thinking", "tool", "schema", "needle"}),
    ],
)
def test_a_bad_pair_fails(pair: Pair, exam: Exam, script: dict[str, Any], failing: set[str]) -> None:
    pair.script(**script)
    assert {name for name, verdict in verdicts(exam).items() if verdict == "fail"} == failing


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ({"prefill_tokens_per_second": 4000}, "unseen"),
        ({"prefill_tokens_per_second": 4000, "stalled": True}, "fail"),
        ({"completions": "hang"}, "fail"),
    ],
)
def test_a_pair_that_is_busy_in_every_slot_is_not_told_as_broken(
    pair: Pair, exam: Exam, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any], verdict: str
) -> None:
    monkeypatch.setattr("sparkserve.verify._SECONDS", 1.5)
    counters = load_recipe("tensorfold-1017").counters
    busy = replace(
        exam,
        recipe=exam.recipe.model_copy(update={"checks": ("answer",)}),
        is_busy=lambda: is_busy(exam.endpoint, counters, 3.0),
    )
    words = " ".join(f"word{number}" for number in range(20_000))
    pair.script(**script)
    others = [threading.Thread(target=pair.chat, args=[f"{n} {words}"], kwargs={"max_tokens": 1}) for n in range(4)]
    if "completions" not in script:
        for other in others:
            other.start()
        wait_until(lambda: sum(pair.metrics()[f"tensorfold:requests_{kind}"] for kind in ("running", "waiting")) >= 4)
    (proof,) = verify(busy, print)
    pair.script(prefill_tokens_per_second=10_000_000)
    for other in others:
        if other.ident:
            other.join(60)
    assert proof.verdict == verdict, proof
    assert ("its counters move" in proof.observed) == (verdict == "unseen")
    assert exit_code_of([proof]) == {"unseen": EXIT_COULD_NOT_LOOK, "fail": 1}[verdict]


def test_an_untrained_model_proves_form_only(exam: Exam, pair: Pair) -> None:
    untrained = replace(exam, recipe=exam.recipe.model_copy(update={"untrained": True}))
    expected = {
        "answer": "not applicable",
        "thinking": "not applicable",
        "tool": "ok",
        "schema": "ok",
        "needle": "not applicable",
    }
    assert verdicts(untrained) == expected


# -- what a real engine may answer, word by word ----------------------------------------------------------------------


def answering(message: dict[str, Any], checks: tuple[Any, ...], **more: Any) -> Proof:
    """Ask one check of an engine that gives the same message to every request."""
    reason = more.pop("finish_reason", "stop")

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "flash"}]})
        choice = {"message": message, "finish_reason": reason}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 9}})

    endpoint = Endpoint("http://engine", "flash", transport=httpx.MockTransport(answer))
    recipe = Verify(checks=checks, **more)
    return verify(Exam(endpoint, recipe, 65_536, random.Random(7)), print)[0]


def product() -> int:
    chance = random.Random(7)
    return chance.randint(12, 99) * chance.randint(12, 99)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("{0}", "ok"),
        ("The product is **{0}**.", "ok"),
        ("{0:,}", "ok"),
        ("1{0}", "fail"),
        ("<think>easy</think>{0}", "fail"),
        ("", "fail"),
    ],
)
def test_known_answer(text: str, verdict: str) -> None:
    proof = answering({"content": text.format(product())}, ("answer",))
    assert (proof.verdict, proof.name) == (verdict, "answer"), proof.observed


def test_only_thoughts_are_told_as_such() -> None:
    proof = answering({"content": "", "reasoning": "so many words"}, ("answer",), finish_reason="length")
    assert proof.verdict == "fail"
    assert "only reasoning, no text (9 tokens, finish length)" in proof.observed


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_under_either_name(field: str) -> None:
    good = answering({"content": str(product()), field: "first tens, then ones"}, ("thinking",))
    assert good.verdict == "ok", good.observed
    bare = answering({"content": f"I think. {product()}"}, ("thinking",))
    assert bare.verdict == "fail"
    mixed = answering({"content": f"</think>{product()}", field: "hm"}, ("thinking",))
    assert mixed.verdict == "fail"


@pytest.mark.parametrize(
    ("found", "trained", "untrained"),
    [
        ('{"ship": "X", "crew": 1}', "fail", "ok"),
        ('{"ship": "X", "crew": 1.5}', "fail", "fail"),
        ('{"ship": "X", "crew": true}', "fail", "fail"),
        ('{"ship": "X", "crew": 1, "more": 1}', "fail", "fail"),
        ('{"ship": "X"}', "fail", "fail"),
        ("[1]", "fail", "fail"),
        ('{"ship": "X", "crew": 1', "fail", "fail"),
    ],
)
def test_schema(found: str, trained: str, untrained: str) -> None:
    assert answering({"content": found}, ("schema",)).verdict == trained
    assert answering({"content": found}, ("schema",), untrained=True).verdict == untrained


def test_a_call_of_another_tool_is_no_proof() -> None:
    chance = random.Random(7)
    reading = chance.randint(1000, 9999)
    arguments = json.dumps({"station": random_name(chance), "reading": reading})
    for name, verdict in (("store_reading", "ok"), ("other", "fail")):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        assert answering({"content": None, "tool_calls": [call]}, ("tool",)).verdict == verdict
    proof = answering({"content": "I would store it."}, ("tool",))
    assert proof.verdict == "fail"
    assert "no tool call; the reply: 'I would store it.'" in proof.observed
