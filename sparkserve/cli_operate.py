"""The commands of a pair that is there: status, watch, stop, logs, history, diagnose, service, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparkserve.command_line import Common, DryRun, Recipe, command, session
from sparkserve.errors import usage_error

service = typer.Typer(
    help="Keep the pair serving across reboots: one systemd unit on the head.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
weights = typer.Typer(help="Prove and list the weights of both nodes.", rich_markup_mode=None, no_args_is_help=True)


@command("sparkserve status; sparkserve status --watch; sparkserve status --json")
def status(
    common: Common,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until Ctrl-C.")] = False,
    recipe: Recipe = None,
) -> int:
    """Tell what the pair does, without disturbing it."""
    from sparkserve import operate_tables, operations

    output = common.output
    run = session(common, "status", output, recipe=recipe)
    if watch:
        _refuse_json(common, "status --watch", "`sparkserve status --json`, again and again")
        output.live(operations.looks(run, 2.0), operate_tables.status_view, operate_tables.status_line)
        return 0
    found = operations.look(run)
    data, view = operate_tables.status_data(found), operate_tables.status_view(found)
    return output.result("status", data, *view, exit_code=found.status.verdict.exit_code)


@command("sparkserve watch; sparkserve watch --dry-run")
def watch(common: Common, *, dry_run: DryRun = False) -> None:
    """Watch over the pair and restart it when it breaks.

    It looks every second without disturbing. When both nodes show that the pair is broken, it restarts both ranks,
    once, and proves an answer; after SPARKSERVE_RESTARTS_PER_HOUR of them it leaves the pair down and says why.
    With --dry-run it tells what it sees and when it would restart, and does neither that nor keep a record.
    """
    from sparkserve import operate_tables, operations

    _refuse_json(common, "watch", "SPARKSERVE_WATCH_COMMAND gets each event as JSON")
    events = operations.watch(session(common, "watch", common.output), dry_run=dry_run)
    common.output.lines("watch", events, operate_tables.event_line)


def _refuse_json(common: Common, name: str, instead: str) -> None:
    """Refuse `--json`, which is one object, where a command goes on without end."""
    if common.json:
        raise usage_error("json_endless", f"{name} has no end and so no --json", instead)


@command("sparkserve stop; sparkserve stop --force")
def stop(
    common: Common,
    *,
    force: Annotated[bool, typer.Option("--force", help="Kill ranks at once.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Stop both ranks; prove that nothing is left."""
    from sparkserve import operations, tables

    output = common.output
    outcome = operations.stop(session(common, "stop", output), force=force, dry_run=dry_run)
    empty = "nothing of ours was running"
    view = empty if outcome.plan.is_empty else tables.outcome_view(outcome, preview=dry_run)
    output.result("stop", tables.outcome_data(outcome), view)


@command("sparkserve logs --rank 1; sparkserve logs --follow --grep ERROR; sparkserve logs --run last")
def logs(  # noqa: PLR0913 - one for each option
    common: Common,
    *,
    rank: Annotated[int | None, typer.Option("--rank", min=0, max=1, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on; Ctrl-C only detaches.")] = False,
    since: Annotated[str, typer.Option("--since", help="Only lines of the last 30s, 10m, 2h.")] = "",
    grep: Annotated[str, typer.Option("--grep", help="Only lines that match this regular expression.")] = "",
    run: Annotated[str, typer.Option("--run", help="An earlier run, as `history` names it, or `last`.")] = "",
) -> None:
    """Show both ranks' logs, interleaved by time."""
    from sparkserve import operations
    from sparkserve.engine_logs import LogQuery
    from sparkserve.parameters import secrets_to_mask

    output = common.output
    own = session(common, "logs", output)
    if run and (follow or since):
        raise usage_error("usage", "--run shows a log that has ended: neither --follow nor --since", "leave one out")
    secrets = secrets_to_mask(own.settings)
    query = LogQuery(rank, parse_seconds(since), grep=grep, follow=follow, secrets=secrets)
    lines = operations.read_logs(own, query, run)
    output.lines("logs", lines, lambda line: f"rank {line.rank}  {line.text}")


@command("sparkserve history")
def history(common: Common) -> None:
    """List the starts, how long they took, how they ended."""
    from sparkserve import operate_tables, operations

    output = common.output
    run = session(common, "history", output)
    found = operations.history(run)
    data = {"runs": operate_tables.history_rows(found), "events": operations.journal(run).read()}
    output.result("history", data, operate_tables.history_table(found))


@command("sparkserve diagnose --to /tmp")
def diagnose(
    common: Common,
    *,
    to: Annotated[Path, typer.Option("--to", help="Directory for the archive.")] = Path(),
    dry_run: DryRun = False,
    recipe: Recipe = None,
) -> None:
    """Write one archive for a bug report, without secrets."""
    from sparkserve import operate_tables, tables
    from sparkserve.diagnose import write_archive

    output = common.output
    run = session(common, "diagnose", output, recipe=recipe)
    found = write_archive(run, to, tables.config_rows(run.loaded, run.recipe), dry_run=dry_run)
    output.result("diagnose", found, operate_tables.archive_table(found))


@command("sparkserve service show", service)
def show(common: Common) -> None:
    """Show the unit as it would be written, and whether it is there."""
    from sparkserve import boot

    output = common.output
    found = boot.look(session(common, "service", output))
    output.result("service", found, f"# {found.path}: {found.state}\n{found.text}".rstrip())


@command("sparkserve service install", service)
def install(common: Common, *, dry_run: DryRun = False) -> None:
    """Write the unit, enable it, and start it; asks for root."""
    from sparkserve import boot

    output = common.output
    run = session(common, "service", output)
    found = boot.look(run)
    output.say(f"# {found.path}\n{found.text}".rstrip())
    done = "nothing was written" if dry_run else boot.install(run, found)
    output.result("service", {**vars(found), "done": done}, done)


@command("sparkserve service remove", service)
def remove(common: Common, *, dry_run: DryRun = False) -> None:
    """Stop, disable and remove the unit; the pair goes on."""
    from sparkserve import boot

    output = common.output
    done = boot.remove(session(common, "service", output), dry_run=dry_run)
    output.result("service", {"done": done}, done)


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


def parse_seconds(text: str) -> float | None:
    """Read `30s`, `10m`, `2h` or plain seconds."""
    if not text:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "s")
    factors = {"s": 1, "m": 60, "h": 3600}
    if unit not in factors or not number.replace(".", "", 1).isdigit():
        raise usage_error("usage", f"--since {text} is no time", "write it like 30s, 10m or 2h")
    return float(number) * factors[unit]
