from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkserve.engine_facts import ContainerFacts, Facts, Memory, Process
from sparkserve.status import Evidence, Expected, Sample, Verdict, judge, uptime
from tests.unit.cases import case_files, read_case

WANTED = {"head": "sha256:0" * 4, "worker": "sha256:1" * 4}


def read_facts(containers: list[dict[str, Any]], time: float) -> Facts:
    found = [
        ContainerFacts(**{**container, "processes": tuple(Process(*row) for row in container["processes"])})
        for container in containers
    ]
    return Facts(time, Memory(125, 60, 0), tuple(found))


def judge_case(case: dict[str, Any]) -> Verdict:
    facts: Any = {role: read_facts(rows, case.get("time", 1100.0)) for role, rows in case["nodes"].items()}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in case["evidence"].items()
    }
    samples = tuple(Sample(**row) for row in case["evidence"].get("samples", ()))
    given["samples"] = samples
    evidence = Evidence(**given)
    wanted: Any = case.get("wanted", WANTED)
    expected = Expected(wanted, case.get("recipe", ""), 120, 3600, answered=case.get("answered", False))
    return judge(facts, case.get("unseen", {}), evidence, expected)


@pytest.mark.parametrize("path", case_files("status"), ids=lambda path: path.stem)
def test_verdict(path: Path) -> None:
    case = read_case(path)
    verdict = judge_case(case)
    assert (verdict.state, verdict.exit_code) == (case["state"], case["exit_code"]), verdict.reasons
    told = "; ".join(verdict.reasons)
    assert [words for words in case["reasons"] if words not in told] == [], told


def test_tokens_per_second_between_the_looks() -> None:
    first, last = Sample(1.0, 1, 0, {"t": 1}, 100.0), Sample(3.0, 1, 0, {"t": 2}, 180.0)
    assert Evidence(samples=(first, last)).tokens_per_second == 40.0
    assert Evidence(samples=(first,)).tokens_per_second is None
    assert Evidence(samples=(first, Sample(3.0, 1, 0, {"t": 2}))).tokens_per_second is None


def test_uptime_is_by_the_clock_of_the_head() -> None:
    row = {"id": "a", "name": "n", "state": "running", "rank": 0, "started_at": 1000.0, "processes": []}
    facts = {"head": read_facts([row], 1090.5)}
    assert uptime(facts) == 90.5  # type: ignore[arg-type] # the key is a role
    assert uptime({}) is None
