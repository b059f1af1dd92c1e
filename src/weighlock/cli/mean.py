"""`weighlock mean`: the weighted mean of models, holding a few blocks of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.progress import quiet_option, transfer_bar
from weighlock.cli.shared import (
    check_target,
    json_option,
    label,
    note_other_name,
    print_json,
    print_notes,
)
from weighlock.cli.text import counted, escaped, size
from weighlock.combining.contributors import labelled
from weighlock.sources.access import Credential

if TYPE_CHECKING:
    from weighlock.combining.outcome import Report

__all__ = ["command"]


class _Weights(click.ParamType):  # type: ignore[type-arg]
    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        try:
            return [float(number) for number in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: weights are numbers with commas between them", param, ctx)


@click.command("mean")
@click.argument("sources", nargs=-1, required=True, type=click.Path(), metavar="MODEL...")
@click.option("-o", "--out", required=True, type=click.Path(), help="The file to write.")
@click.option(
    "--weights", type=_Weights(), metavar="N,N,…", help="A number for each model, such as 3,1,1."
)
@click.option(
    "--accumulate",
    type=click.Choice(["f32", "f64"]),
    help="Precision of the sums; f64 if not given. They are rounded once, at the end.",
)
@click.option(
    "--integers",
    type=click.Choice(["equal", "first", "max", "round"]),
    default="equal",
    show_default=True,
    help="What to do where models differ in an integer: refuse (equal), or take the first, the "
    "largest (max) or the rounded mean (round).",
)
@click.option(
    "--skip-missing",
    is_flag=True,
    help="Average each tensor over the models that have it, and leave out what cannot be read, "
    "instead of refusing.",
)
@click.option("--exclude-lost", is_flag=True, help="Leave out models that cannot be read.")
@click.option("--allow-nonfinite", is_flag=True, help="Let NaN and Inf through.")
@click.option(
    "--threads",
    default=0,
    type=click.IntRange(0, 64),
    help="Worker threads; 0 is one for each core, four at the most.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--no-sync", is_flag=True, help="Do not wait until it is on the disk: a power loss may take it."
)
@quiet_option
@credential_options
@json_option
def command(
    sources: Sequence[str],
    out: str,
    weights: list[float] | None,
    accumulate: str | None,
    integers: str,
    skip_missing: bool,
    exclude_lost: bool,
    allow_nonfinite: bool,
    threads: int,
    force: bool,
    no_sync: bool,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Write the weighted mean of MODELs, files of any format or URLs, as safetensors."""
    if weights is not None and len(weights) != len(sources):
        raise click.BadParameter(
            f"{counted(len(weights), 'weight')} for {counted(len(sources), 'model')}",
            param_hint="--weights",
        )
    check_target(out, force=force)
    reports: list[Report] = []
    # As the library calls them, so that what it reports can be told by path.
    models = {
        labelled(f"contributor {n} of {len(sources)}", source): source
        for n, source in enumerate(sources, 1)
    }
    with transfer_bar(f"mean of {len(sources)} → {out}", quiet=quiet) as transfer:
        catalog = weighlock.mean(
            models,
            weights,
            out,
            accumulate,
            integers=integers,  # type: ignore[arg-type]
            missing="skip" if skip_missing else "error",
            finite=not allow_nonfinite,
            on_lost="exclude" if exclude_lost else "error",
            threads=threads,
            durable=not no_sync,
            progress=transfer.tell,
            report=reports.append,
            access=access_to(credential, *sources),
        )
    note_other_name(out)
    with catalog:
        (report,) = reports
        paths = {who: label(source) for who, source in models.items()}
        if as_json:
            shares: dict[str, float] = {}
            for who, share in report.weights.items():  # of a model given twice, both together
                shares[paths[who]] = shares.get(paths[who], 0) + share
            print_json(
                {
                    "target": out,
                    "sources": [label(source) for source in sources],
                    "tensors": report.tensors,
                    "bytes": report.nbytes,
                    "read_bytes": report.read_bytes,
                    "weights": shares,
                    "skipped": {
                        name: [paths[who] for who in lacking]
                        for name, lacking in report.skipped.items()
                    },
                    "excluded": {paths[who]: why for who, why in report.excluded.items()},
                    "unreadable": dict(report.unread),
                    "notes": list(catalog.notes),
                }
            )
            return
        print_notes(catalog.notes, catalog.unreadable)
        click.echo(
            f"{escaped(out)}: {counted(report.tensors, 'tensor')}, {size(report.nbytes)}, "
            f"the mean of {len(report.weights)}"
        )
