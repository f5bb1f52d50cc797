"""What a run did, in one row for each step and node."""

from __future__ import annotations

from dataclasses import dataclass

from sparkserve import checks
from sparkserve.cluster import ROLES
from sparkserve.plan import ApplyReport


@dataclass(frozen=True)
class StepRow:
    """What became of one step on one node: the proof, and its time in seconds."""

    step: str
    node: str
    proof: str
    seconds: float


def summarize(step: str, report: ApplyReport) -> list[StepRow]:
    """Sum up what was applied of one step, by node, and how much of it was left alone."""
    rows = []
    for node in ROLES:
        done = [item for item in report.applied if item.change.step == step and item.change.node == node]
        left = sum(change.step == step and change.node == node for change, _ in report.left_alone)
        if not (done or left):
            continue
        size = sum(item.change.size for item in done)
        proof = done[-1].proof if done else "none"
        if len(done) > 1 and size:
            proof = f"{len(done)} files, {checks.show_size(size)}: size and hash right"
            if step == "prune":
                proof = f"{len(done)} gone, {checks.show_size(size)}"
        proof += f"; {left} left alone" if left else ""
        seconds = max(item.ended for item in done) - min(item.begun for item in done) if done else 0.0
        rows.append(StepRow(step, node, proof, seconds))
    return rows or [StepRow(step, "both", "as wanted already", 0.0)]
