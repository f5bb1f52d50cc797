"""The commands that look at both nodes and the cable: doctor and link."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkserve.command_line import Common, Recipe, command, session
from sparkserve.errors import exit_code_of

if TYPE_CHECKING:
    from rich.table import Table

    from sparkserve.operations import Cable
    from sparkserve.output import Output


def _check_ids() -> list[str]:
    """List what completes `--explain`."""
    from sparkserve.check_catalog import CATALOG

    return list(CATALOG)


@command("sparkserve doctor; sparkserve doctor spark@192.168.1.22 --link; sparkserve doctor --explain kernel")
def doctor(  # noqa: PLR0913 - one for each option
    common: Common,
    worker: Annotated[str | None, typer.Argument(metavar="WORKER", help="The worker, where no .env names it.")] = None,
    *,
    link: Annotated[bool, typer.Option("--link", help="Prove the cable both ways, too.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="ID", help="Why a check matters.", autocompletion=_check_ids),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Do what is safe, after asking.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without being asked.")] = False,
    record: Annotated[Path | None, typer.Option("--record", help="Write the facts, without names.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the checks that are in order, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what --fix and --record would do.")] = False,
    recipe: Recipe = None,
) -> int:
    """Check both nodes: all that a start needs.

    It changes nothing and can be run beside a pair that serves. Exit code 1 says that a check fails, 6 that something
    could not be looked at. --fix makes directories, trusts a host key that you compared and writes a sudo rule for you
    to read; never the network, the kernel or the boot. --record writes what was seen with names, addresses and serials
    replaced, for a bug report or `sparkserve plan --facts`.
    """
    from sparkserve import check_catalog, doctor_tables
    from sparkserve import doctor as story
    from sparkserve.cluster import connect
    from sparkserve.doctor_repair import list_deeds, repair

    output = common.output
    if explain is not None:
        entry = check_catalog.find_entry(explain)
        safe = "`sparkserve doctor --fix` does it after asking." if entry.safe else "That is yours to do."
        return output.result("doctor", {"id": explain, **vars(entry)}, entry.why, f"\n    {entry.fix}\n", safe)
    run = session(common, "doctor", output, worker=worker, recipe=recipe)
    with connect(run.settings, lenient=True) as cluster:
        examine = partial(story.examine, run, proves_link=link, record=None if dry_run else record)
        if fix and not dry_run:
            found = repair(run, examine, lambda question: yes or output.ask(question), output.ask, cluster)
        else:
            found = examine(cluster)
    if dry_run:
        planned = [f"{node}: {deed}" for node, deed in list_deeds(found)] if fix else []
        planned += [f"head: write {record}"] if record else []
        for line in planned or ["nothing"]:
            output.say(f"would be done: {line}")
    view = doctor_tables.report_view(found, shows_all=everything)
    return output.result("doctor", doctor_tables.report_data(found), *view, exit_code=found.exit_code)


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
    nothing; while a pair works for somebody, --prove leaves the bandwidth out. Exit code 1 says that a check fails, 6
    that something could not be looked at.
    """
    from sparkserve import operations
    from sparkserve.link_proof import FLOOR_GBPS

    output = common.output
    wanted = FLOOR_GBPS if floor is None else floor
    found = operations.see_cable(session(common, "link", output, recipe=recipe), floor=wanted if prove else None)
    code = exit_code_of([*found.odd, *found.checks])
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
