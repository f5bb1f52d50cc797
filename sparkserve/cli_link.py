"""The command of the cable: `sparkserve link` draws it, says what is odd, and proves it when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from sparkserve.command_line import Common, Recipe, command, session
from sparkserve.errors import EXIT_NOT_READY, exit_code_of

if TYPE_CHECKING:
    from rich.table import Table

    from sparkserve.operations import Cable
    from sparkserve.output import Output


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
    from sparkserve import operations
    from sparkserve.link_proof import FLOOR_GBPS

    output = common.output
    wanted = FLOOR_GBPS if floor is None else floor
    found = operations.see_cable(session(common, "link", output, recipe=recipe), floor=wanted if prove else None)
    has_way = found.proposals or all(link.interface for link in found.links.values())
    code = exit_code_of(found.checks) or (0 if has_way else EXIT_NOT_READY)
    return output.result("link", found, *_view(found, output), exit_code=code)


def _view(found: Cable, output: Output) -> Iterator[Table | str]:
    from sparkserve.doctor_tables import checks_view
    from sparkserve.link_picture import WIDTH, draw

    width = output.width or WIDTH
    yield draw(found.names, found.links, found.management, plain=not output.can_draw, width=width)
    yield ""
    yield from checks_view([*found.odd, *found.checks], shows_all=True)
    if not all(link.interface for link in found.links.values()):
        for one in found.proposals:
            ends = f"{one.head_interface} to {one.worker_interface}"
            yield f"{one.head_address} and {one.worker_address}: {ends}: {one.why}"
