"""The command of the cable: `sparkserve link` draws it, says what is odd, and proves it when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from sparkserve.command_line import Common, Recipe, command, session
from sparkserve.errors import EXIT_NOT_READY

if TYPE_CHECKING:
    from rich.table import Table

    from sparkserve.operations import Cable
    from sparkserve.output import Output


_NO_ADDRESSES = (
    "No port of the cable has an address in one network on both nodes. Give it one by netplan: "
    "10.100.8.1/24 on the head and 10.100.8.2/24 on the worker, MTU 9000 on both."
)


@command("sparkserve link; sparkserve link --prove; sparkserve link --prove --floor 50")
def link(
    common: Common,
    *,
    prove: Annotated[bool, typer.Option("--prove", help="Prove it both ways: frames, TCP, bandwidth; 2 s.")] = False,
    floor: Annotated[float | None, typer.Option("--floor", min=0, help="Gb/s it must carry; else 5.")] = None,
    recipe: Recipe = None,
) -> int:
    """Draw the cable between the nodes; --prove tests it.

    Ports, interfaces, addresses, MTU, speed and RDMA of both nodes, and which traffic takes which way. It changes
    nothing; while a pair works for somebody, --prove leaves the bandwidth out.
    """
    from sparkserve import operations, tables
    from sparkserve.link_proof import FLOOR_GBPS

    output = common.output
    wanted = FLOOR_GBPS if floor is None else floor
    found = operations.see_cable(session(common, "link", output, recipe=recipe), floor=wanted if prove else None)
    has_way = found.proposals or all(link.interface for link in found.links.values())
    code = tables.proofs_exit_code(found.checks) or (0 if has_way else EXIT_NOT_READY)
    return output.result("link", found, *_view(found, output), exit_code=code)


def _view(found: Cable, output: Output) -> Iterator[Table | str]:
    from sparkserve.link_picture import WIDTH, draw

    width = output.width or WIDTH
    yield draw(found.names, found.links, found.management, plain=not output.can_draw, width=width)
    if found.odd:
        yield "\n".join(["", *(f"  - {line}" for line in found.odd)])
    if not all(link.interface for link in found.links.values()):
        yield "\n".join(["", *_choices(found)])
    if found.checks:
        yield ""
        yield _checks_table(found)
        yield from dict.fromkeys(f"hint ({check.id}): {check.hint}" for check in found.checks if check.verdict != "ok")


def _choices(found: Cable) -> Iterator[str]:
    if not found.proposals:
        yield _NO_ADDRESSES
    for one in found.proposals:
        yield f"SPARKSERVE_HEAD_LINK={one.head_address}"
        yield f"SPARKSERVE_WORKER_LINK={one.worker_address}"
        yield f"  {one.head_interface} to {one.worker_interface}: {one.why}"


def _checks_table(found: Cable) -> Table:
    from sparkserve.tables import make_table, verdict_text

    rows = ((one.id, one.node, verdict_text(one.verdict), one.observed, one.needed) for one in found.checks)
    return make_table("proof", "from", "verdict", "observed", "needed", rows=rows)
