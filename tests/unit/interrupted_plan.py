"""A program that the interrupt tests start: applies a plan until it is interrupted, and prints its report."""

from __future__ import annotations

import json
import sys
import threading

from sparkserve import signals
from sparkserve.errors import SparkserveError
from sparkserve.plan import Cancelled, Change, Interrupted, Plan, Work, apply
from tests.fakes import RecordingReporter

all_wait = threading.Barrier(3, action=lambda: print("under way", flush=True))


def first(_work: Work) -> str:
    return "first is there"


def polite(work: Work) -> str:
    all_wait.wait(60)
    while True:
        work.check()
        threading.Event().wait(0.01)


def finishes(work: Work) -> str:
    all_wait.wait(60)
    try:
        while True:
            work.check()
            threading.Event().wait(0.01)
    except Cancelled:
        print("ending", flush=True)
        sys.stdin.readline()
        return "was nearly done"


def breaks(work: Work) -> str:
    all_wait.wait(60)
    try:
        while True:
            work.check()
            threading.Event().wait(0.01)
    except Cancelled as error:
        raise SparkserveError("late", "broke while it ended") from error


def main() -> None:
    signals.watch()
    signals.begin()
    actions = {"polite": polite, "finishes": finishes, "breaks": breaks}
    changes = [Change("head", "s", "first", "-", "+", first)]
    changes += [Change("head", "s", name, "-", "+", action, ("head/s/first",)) for name, action in actions.items()]
    changes += [Change("head", "s", "later", "-", "+", first, ("head/s/polite", "head/s/finishes"))]
    try:
        apply(Plan(tuple(changes)), RecordingReporter())
    except Interrupted as error:
        report = error.report
        print(
            json.dumps(
                {
                    "applied": sorted(item.change.resource for item in report.applied),
                    "failed": sorted(change.resource for change, _ in report.failed),
                    "not_reached": sorted(change.resource for change in report.not_reached),
                }
            ),
            flush=True,
        )
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
