"""The commands about weights that are there."""

from __future__ import annotations

from typing import Annotated

import typer

from sparkserve.command_line import Common, DryRun, Recipe, command, session

weights = typer.Typer(help="Prove and list the weights of both nodes.", rich_markup_mode=None, no_args_is_help=True)


@command("sparkserve weights verify; sparkserve weights verify --full; sparkserve weights verify --repair", weights)
def verify(
    common: Common,
    *,
    full: Annotated[bool, typer.Option("--full", help="Read also what was proved before.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Fetch what is wrong, from the other node if it can.")
    ] = False,
    dry_run: DryRun = False,
    recipe: Recipe = None,
) -> int:
    """Prove size and hash of every file on both nodes.

    It needs no network. What was proved and has not changed since is not read again; while a node serves, it reads
    with one core at low priority. Exit code 1 when a file is not right.
    """
    from sparkserve import storage, tables, weights_tables

    output = common.output
    run = session(common, "weights", output, recipe=recipe)
    if dry_run:
        planned = storage.plan_repair(run)
        return output.result("weights", tables.outcome_data(planned), tables.outcome_view(planned, preview=True))
    found = storage.verify_weights(run, full=full, repair=repair)
    return output.result("weights", found, *weights_tables.verification_view(found), exit_code=0 if found.holds else 1)


@command("sparkserve weights list; sparkserve weights list --json", weights)
def list_(common: Common, *, recipe: Recipe = None) -> None:
    """List the sets of weights on both nodes: size, whole, proved, adopted."""
    from sparkserve import storage, weights_tables

    output = common.output
    sets, others = storage.list_weights(session(common, "weights", output, recipe=recipe))
    rows = [{"node": one.node, "place": one.resource, "what": one.before, "size": one.size} for one in others]
    output.result("weights", {"sets": sets, "others": rows}, *weights_tables.sets_view(sets, others))
