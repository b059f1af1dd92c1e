"""`weighlock sweep`: what did processes that were killed leave behind?"""

import os
from dataclasses import asdict

import click

import weighlock
from weighlock.cli.shared import json_option, print_json, tell
from weighlock.cli.text import columns, counted, escaped, size
from weighlock.disk.owner import part_owner
from weighlock.disk.sweep import Leftover
from weighlock.errors import DiskError

__all__ = ["command"]


@click.command("sweep")
@click.argument("root", type=click.Path())
@click.option(
    "--parts",
    is_flag=True,
    help="Unfinished files (.part-) of dead processes too, which a pull could still resume.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def command(root: str, parts: bool, dry_run: bool, as_json: bool) -> None:
    """Remove the temporary directories (spools) that dead processes left in ROOT.

    What a process uses, or might use, is kept and listed with the reason.
    """
    try:
        unfinished = sum(part_owner(name) is not None for name in os.listdir(root))
    except OSError as error:
        raise DiskError(f"{root}: cannot be swept: {error.strerror}", errno=error.errno) from error
    report = weighlock.sweep(root, parts=parts, dry_run=dry_run)
    if as_json:
        facts = {"root": root, "dry_run": dry_run, "removed_bytes": report.removed_bytes}
        removed, kept = (
            [asdict(leftover) for leftover in found] for found in (report.removed, report.kept)
        )
        print_json({**facts, "removed": removed, "kept": kept})
        return
    if unfinished and not parts:
        tell(f"note: {counted(unfinished, 'unfinished file')} (.part-): --parts looks at them too")
    done = "would go" if dry_run else "removed"
    rows = [
        *(_row(done, found) for found in report.removed),
        *(_row("kept", f) for f in report.kept),
    ]
    if rows:
        click.echo(columns(rows, frozenset({2})))
    click.echo(
        f"{escaped(root)}: {len(report.removed):,} {done}, {size(report.removed_bytes)}; "
        f"{len(report.kept):,} kept"
    )


def _row(done: str, leftover: Leftover) -> list[str]:
    name = escaped(os.path.basename(leftover.path))
    return [done, name, size(leftover.nbytes), leftover.state, leftover.reason]
