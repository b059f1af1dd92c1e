"""`weighlock demo`: federated rounds on one machine, with real processes; what they measured."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import numpy as np

import weighlock
from weighlock.cli.demo_model import is_trained, specs_of, tensors_of
from weighlock.cli.demo_site import peak_bytes, send
from weighlock.cli.shared import SIZE
from weighlock.cli.text import columns, escaped, quantity, size
from weighlock.errors import CombineError, DiskError, TransferError
from weighlock.sources.access import Address

__all__ = ["command"]

_SAMPLE = 4096
"""Values of each trained tensor that the mean is checked on."""


@click.command("demo")
@click.option(
    "--size", "total", type=SIZE, default="500MB", show_default=True, help="Bytes of the model."
)
@click.option("--sites", default=3, show_default=True, help="Processes that train.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of training.")
@click.option("--keep", type=click.Path(), help="Leave the files in this new directory.")
def command(total: int, sites: int, rounds: int, keep: str | None) -> None:
    """Federated rounds: a model goes out by reference, comes back trained, and is averaged.

    A server and its sites are processes of their own. Nothing is left behind.
    """
    if sites < 1 or rounds < 1:
        raise click.UsageError("there must be a site and a round")
    with contextlib.ExitStack() as stack:
        if keep is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weighlock-demo-"))
        else:
            if os.path.lexists(keep):
                raise DiskError(f"{keep}: exists; --keep makes a new directory")
            os.makedirs(keep)
            directory = keep
        _Federation(directory, total, sites).run(rounds)
        if keep is not None:
            click.echo(f"\nThe files are in {escaped(directory)}.")


@dataclass(frozen=True, slots=True)
class _Site:
    """A process that trains."""

    name: str
    process: "subprocess.Popen[bytes]"

    def send(self, body: bytes) -> None:
        """Give it a message.

        Raises:
            TransferError: it has ended before.
        """
        assert self.process.stdin is not None  # noqa: S101
        try:
            send(self.process.stdin, body)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise self._ended() from None

    def measured(self) -> dict[str, float]:
        """What it measured in this round.

        Raises:
            TransferError: it has ended before.
        """
        assert self.process.stdout is not None  # noqa: S101
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        facts: dict[str, float] = json.loads(line)
        return facts

    def _ended(self) -> TransferError:
        return TransferError(f"{self.name} ended with code {self.process.wait()}")


class _Federation:
    """The server's side of the demo."""

    def __init__(self, directory: str, total: int, sites: int) -> None:
        self._directory = directory
        self._specs = specs_of(total)
        self._names = [f"site-{number}" for number in range(1, sites + 1)]
        self._weights = dict(zip(self._names, range(1, sites + 1), strict=True))
        self._rows: list[tuple[str, ...]] = []

    def run(self, rounds: int) -> None:
        nbytes = sum(spec.nbytes for spec in self._specs)
        values = sum(spec.size for spec in self._specs)
        _say(
            f"A model of {len(self._specs)} tensors, {quantity(values)} parameters, "
            f"{size(nbytes)} in bf16; a server and {len(self._names)} sites, each a process."
        )
        model = os.path.join(self._directory, "model-0.safetensors")
        with _step("the server writes it, tensor by tensor, from a generator", nbytes):
            weighlock.save(model, tensors_of(self._specs), specs=self._specs)
        with weighlock.Server() as server, self._sites(server.url) as sites:
            for number in range(1, rounds + 1):
                model = self._round(server, sites, number, model, nbytes)
        _say("What each process moved, and the most memory it ever had")
        heads = ("process", "round", "pulled", "", "pushed", "", "peak memory", "of the model")
        peak = peak_bytes()
        self._rows.append(("server", "", "", "", "", "", size(peak), f"{peak / nbytes:.0%}"))
        table = columns([heads, *self._rows], right=frozenset({2, 3, 4, 5, 6, 7}))
        click.echo(textwrap.indent(table, "  "))

    def _round(
        self,
        server: weighlock.Server,
        sites: Sequence[_Site],
        number: int,
        path: str,
        nbytes: int,
    ) -> str:
        _say(f"Round {number}")
        if number > 1:
            frozen = sum(spec.nbytes for spec in self._specs if not is_trained(spec.name))
            click.echo(
                f"  Sites trained a few layers; {frozen / nbytes:.0%} of the model is frozen, and "
                "they do not pull again what they have (base=)."
            )
        after = os.path.join(self._directory, f"model-{number}.safetensors")
        landing = os.path.join(self._directory, f"inbox-{number}")
        specs = {spec.name: spec for spec in self._specs}
        with (
            weighlock.open(path) as model,
            server.inbox(self._names, into=landing, specs=specs, durable=False) as inbox,
            contextlib.ExitStack() as ending,
        ):
            with _step("pack a message for each site: the model by reference, the way back"):
                packed = server.pack({"round": number, "model": model}, receivers=self._names)
                share = packed.share
                assert share is not None  # noqa: S101
                # Sites first, who would complain of an inbox that closes; then the share, which
                # would complain of a model that does.
                ending.enter_context(share)
                ending.enter_context(_killed_on_error(sites))
                bodies = {
                    name: weighlock.pack(
                        # What it refers to stays as it is, with its owner and its receiver.
                        {
                            "task": weighlock.unpack(packed.body_for(name)),
                            "inbox": inbox.url_for(name),
                        }
                    ).seal()
                    for name in self._names
                }
            click.echo(f"      {len(bodies[self._names[0]]):,} bytes each, small tensors in them")
            start = time.perf_counter()
            for site in sites:
                site.send(bodies[site.name])
            facts = {site.name: site.measured() for site in sites}
            landed = dict(inbox)
            pulled = share.sent_bytes
            _told(
                "the sites pull, train and push, all at once",
                time.perf_counter() - start,
                pulled + sum(catalog.nbytes for catalog in landed.values()),
            )
            click.echo(f"      outcome: {', '.join(share.wait(30).landed)} landed")
            self._rows += [
                _row(name, number, pulled // len(facts), facts[name], nbytes) for name in facts
            ]
            with _step("average what came back, block by block", nbytes * (len(landed) + 1)):
                mean = weighlock.mean(landed, self._weights, out=after, durable=False)
            with mean:
                self._check(mean, landed)
            for catalog in landed.values():
                catalog.close()
        return after

    def _check(self, mean: weighlock.Catalog, landed: Mapping[str, weighlock.Catalog]) -> None:
        """Compare a sample of the mean with a reference in float64."""
        worst, total = 0.0, sum(self._weights.values())
        for name in filter(is_trained, mean):
            flat = mean[name].load().reshape(-1)
            places = np.linspace(0, flat.size - 1, min(_SAMPLE, flat.size)).astype(np.int64)
            got = flat[places].astype(np.float64)
            exact = sum(
                landed[site][name].load().reshape(-1)[places].astype(np.float64) * weight / total
                for site, weight in self._weights.items()
            )
            unit = 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-300)) - 7)  # of bf16
            worst = max(worst, float(np.max(np.abs(got - exact) / unit)))
        verdict = "as near as bf16 can be" if worst <= 0.51 else "WRONG"
        click.echo(
            f"      against float64, on a sample: {worst:.2f} units in the last place: {verdict}"
        )
        if worst > 0.51:
            raise CombineError(f"the mean is {worst:.2f} units in the last place off")

    @contextlib.contextmanager
    def _sites(self, owner: str) -> Iterator[list[_Site]]:
        address = Address.of(owner)
        sites: list[_Site] = []
        try:
            for number, name in enumerate(self._names, 1):
                place = os.path.join(self._directory, name)
                os.mkdir(place)
                arguments = [place, f"{address.host}:{address.port}", str(number)]
                process = subprocess.Popen(
                    [sys.executable, "-m", "weighlock.cli.demo_site", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the server, which ends its sites
                )
                sites.append(_Site(name, process))
            yield sites
        finally:
            for site in sites:
                site.process.communicate()  # its input ends, and so does it, unless it was killed


@contextlib.contextmanager
def _killed_on_error(sites: Sequence[_Site]) -> Iterator[None]:
    """Sites in the midst of a round do not see how it ends."""
    try:
        yield
    except BaseException:
        for site in sites:
            site.process.kill()
        raise


def _row(
    name: str, number: int, pulled: int, facts: Mapping[str, float], nbytes: int
) -> tuple[str, ...]:
    pushed = int(facts["pushed_bytes"])
    return (
        name,
        str(number),
        size(pulled),
        f"{facts['pulled_s']:.2f} s {size(int(pulled / facts['pulled_s']))}/s",
        size(pushed),
        f"{facts['pushed_s']:.2f} s {size(int(pushed / facts['pushed_s']))}/s",
        size(int(facts["peak_bytes"])),
        f"{facts['peak_bytes'] / nbytes:.0%}",
    )


@contextlib.contextmanager
def _step(what: str, nbytes: int = 0) -> Iterator[None]:
    start = time.perf_counter()
    yield
    _told(what, time.perf_counter() - start, nbytes)


def _told(what: str, seconds: float, nbytes: int) -> None:
    took = f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
    rate = f"  {size(int(nbytes / seconds))}/s" if nbytes else ""
    click.echo(f"  {took:>9}  {what}{rate}")


def _say(text: str) -> None:
    click.secho(text, bold=True)
