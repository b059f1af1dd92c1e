"""Pictures of the report: `python -m benchmarks.pictures` draws those whose tables are there.

Reads `RESULTS.md` and nothing else, so that no picture shows what was not measured. Plain SVG that
follows the reader's preference for light or dark.
"""

import html
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["draw_all"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_RESULTS = os.path.join(_HERE, "RESULTS.md")
_DOCS = os.path.join(os.path.dirname(_HERE), "docs")

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b1d22 }
  .title { font-size: 16px; font-weight: 600 }
  .quiet { fill: #5b606b }
  .line { stroke: #d9d7d0; fill: none }
  .ours { fill: #1f5f8b; stroke: #1f5f8b }
  .other { fill: #a9a69c; stroke: #a9a69c }
  .curve { fill: none; stroke-width: 2.5 }
  .back { fill: #fbfaf8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8e6e1 }
    .quiet { fill: #a2a7b2 }
    .line { stroke: #3a3d44 }
    .ours { fill: #6db3e0; stroke: #6db3e0 }
    .other { fill: #7c7f87; stroke: #7c7f87 }
    .back { fill: #17181b }
  }
"""


_NUMBERS = ("memory + MB", "other process + MB", "ns per byte")


@dataclass(frozen=True)
class Row:
    """A contender's line of a table."""

    seconds: float
    memory_mb: float | None
    beside_mb: float | None = None
    """Memory of the other process, where there is one."""
    ns_per_byte: float | None = None


def read_report(text):
    """title → contender → row."""
    report = {}
    for section in text.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        table = rest.split("| promise |")[0]
        rows, columns = {}, []
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] == "contender":
                columns = cells
            if len(cells) >= 6 and re.fullmatch(r"[\d.]+", cells[1]):
                found = dict(zip(columns, cells, strict=False))
                numbers = [found.get(name) for name in _NUMBERS]
                rows[cells[0]] = Row(float(cells[1]), *(float(n) if n else None for n in numbers))
        report[title] = rows
    return report


def _svg(width, height, title, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>\n'
        f'<text class="title" x="24" y="34">{html.escape(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def bars(title, values: Mapping[str, float], unit: Callable[[float], str]):
    """Horizontal bars; what is ours is coloured."""
    top, step, left, most = 58, 34, 300, max(values.values())
    body = []
    for number, (name, value) in enumerate(values.items()):
        y = top + number * step
        kind = "ours" if name.startswith("weighlock") else "other"
        length = 320 * value / most
        body += [
            f'<text x="{left - 12}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="20" rx="2"/>',
            f'<text class="quiet" x="{left + length + 10:.1f}" y="{y + 15}">{unit(value)}</text>',
        ]
    return _svg(760, top + step * len(values) + 16, title, body)


def curves(title, lines: Mapping[str, list[tuple[float, float]]], whole):
    """Memory against size, both in MB, beside the line at which they are the same."""
    left, bottom, width, height = 80, 330, 560, 250
    most_x = max(x for line in lines.values() for x, _ in line)
    most_y = most_x

    def place(x, y):
        return f"{left + width * x / most_x:.1f},{bottom - height * y / most_y:.1f}"

    body = [
        f'<path class="line" d="M{place(0, most_y)} L{place(0, 0)} L{place(most_x, 0)}"/>',
        f'<path class="curve other" d="M{place(0, 0)} L{place(most_x, most_y)}"/>',
        f'<text class="quiet" x="{left + width * 0.6:.0f}" y="{bottom - height * 0.6 - 22:.0f}" '
        f'text-anchor="end">{html.escape(whole)}</text>',
    ]
    for part in (0.25, 0.5, 1.0):
        x, y = place(most_x * part, 0).split(",")
        body.append(
            f'<text class="quiet" x="{x}" y="{float(y) + 20:.0f}" text-anchor="middle">'
            f"{most_x * part / 1000:g} GB</text>"
        )
        x, y = place(0, most_y * part).split(",")
        body.append(
            f'<text class="quiet" x="{float(x) - 8:.0f}" y="{float(y) + 4:.0f}" '
            f'text-anchor="end">{most_y * part / 1000:g} GB</text>'
        )
    labels = []
    for name, line in lines.items():
        path = " L".join(place(x, y) for x, y in sorted(line))
        body.append(f'<path class="curve ours" d="M{path}"/>')
        labels.append(f"{name}: {max(y for _, y in line):.0f} MB")
    body.append(
        f'<text x="{left + width}" y="{bottom - 22}" text-anchor="end">weighlock: '
        f"{html.escape(', '.join(labels))} at the most</text>"
    )
    return _svg(760, 380, title, body)


def panels(title, found):
    """Side by side, each with its own scale: what was varied → (what, unit, series → points).

    Points are (label, value); labels stand at equal distances, as each is a multiple of the last.
    """
    wide, high, columns = 236, 150, len(found[0])
    body = []
    for row, line in enumerate(found):
        for column, (what, unit, series) in enumerate(line):
            left, bottom = 60 + column * (wide + 40), 96 + high + row * (high + 76)
            most = 1.15 * max(value for points in series.values() for _, value in points)
            body += [
                f'<text class="quiet" x="{left}" y="{bottom - high - 12}">'
                f"{html.escape(what)}</text>",
                f'<path class="line" d="M{left},{bottom - high} V{bottom} H{left + wide}"/>',
                f'<text class="quiet" x="{left - 6}" y="{bottom - high + 10}" text-anchor="end">'
                f"{most:.3g}</text>",
                f'<text class="quiet" x="{left - 6}" y="{bottom - high + 26}" text-anchor="end">'
                f"{unit}</text>",
            ]
            labels = [label for label, _ in next(iter(series.values()))]
            step = (wide - 90) / (len(labels) - 1)
            ends = []
            for name, points in series.items():
                places = [
                    (left + number * step, bottom - high * value / most)
                    for number, (_, value) in enumerate(points)
                ]
                path = " L".join(f"{x:.1f},{y:.1f}" for x, y in places)
                kind = "other" if name == "limit" else "ours"
                body.append(f'<path class="curve {kind}" d="M{path}"/>')
                ends.append((places[-1][1], name))
            below = bottom
            for y, name in sorted(ends, reverse=True):  # from below, no two on one another
                below = min(y, below - 15)
                body.append(
                    f'<text x="{left + wide - 84}" y="{below + 4:.1f}">{html.escape(name)}</text>'
                )
            for number in (0, len(labels) - 1):
                body.append(
                    f'<text class="quiet" x="{left + number * step:.1f}" y="{bottom + 18}" '
                    f'text-anchor="middle">{html.escape(labels[number])}</text>'
                )
    height = 96 + len(found) * (high + 76) - 20
    return _svg(80 + columns * (wide + 40), height, title, body)


def _growth(report):
    """Tables of growth as panels: time above, memory below; nothing where a table is not there."""
    lines = ([], [])
    for title, rows in report.items():
        if not title.startswith("Growth with ") or any(
            row.ns_per_byte is None for row in rows.values()
        ):
            continue
        time, memory = {}, {}
        for name, row in rows.items():
            what, _, label = name.rpartition(", ")
            what = what.partition(":")[0]  # of a limit there is no room to tell more
            if what != "open":  # goes through headers only
                time.setdefault(what, []).append((label, row.ns_per_byte))
            # Many receivers are one process here: what must not grow is the memory of their owner.
            if what == "limit":
                continue
            is_shared = label.endswith("receivers")
            mine = "all of them" if is_shared else what
            memory.setdefault(mine, []).append((label, row.memory_mb or 0.0))
            if is_shared:
                memory.setdefault("their owner", []).append((label, row.beside_mb or 0.0))
        what = title.removeprefix("Growth with the ").partition(":")[0].removeprefix("number of ")
        lines[0].append((f"time, by {what}", "ns/B", time))
        lines[1].append((f"memory, by {what}", "MB", memory))
    return lines if len(lines[0]) == 4 else None


def draw_all(results=_RESULTS, directory=_DOCS):
    """Draw what there are tables for; returns the names."""
    with open(results) as file:
        report = read_report(file.read())
    drawn = {}
    wire = {
        f"{name}, {where}": 64 * (32 << 20) / row.seconds / 1e9
        for where, title in (
            ("to memory", "Fetch 2 GB in tensors of 32 MB to memory over loopback"),
            ("to disk", "Fetch 2 GB in tensors of 32 MB to a file on tmpfs over loopback"),
        )
        for name, row in report.get(title, {}).items()
        if "given" not in name
    }
    short = {
        "raw sockets + BLAKE3, 4 connections + pwrite": "raw sockets + BLAKE3",
        "raw sockets + BLAKE3, 4 connections": "raw sockets + BLAKE3",
        "raw sockets, 4 connections + pwrite": "raw sockets",
        "raw sockets, 4 connections": "raw sockets",
        "NVFlare 2.9 download_tensors_to_disk": "NVFlare 2.9",
        "NVFlare 2.9 download_tensors": "NVFlare 2.9",
        "weighlock, hashed by its owner within the time": "weighlock, hashed just then",
        "NVFlare WeightedAggregationHelper, bf16 sums in memory": "NVFlare 2.9, sums in bf16",
    }
    if wire:
        named = {}
        for name, value in wire.items():
            long = next((text for text in short if name.startswith(text)), None)
            named[name.replace(long, short[long]) if long else name] = value
        title = "2 GB from one process to another over loopback"
        drawn["wire.svg"] = bars(title, named, lambda rate: f"{rate:.2f} GB/s")
    growth = {}
    for name, row in report.get("Growth with the size of a model", {}).items():
        what, _, size = name.rpartition(", ")
        growth.setdefault(what, []).append((float(size.split()[0]), row.memory_mb or 0.0))
    if growth:
        title = "Memory added, against the size of the model"
        drawn["memory.svg"] = curves(title, growth, "the size of the model")
    grown = _growth(report)
    if grown:
        drawn["growth.svg"] = panels("How cost grows", grown)
    mean = report.get("Weighted mean of eight files of 600 MB", {})
    if mean:
        title = "Weighted mean of eight models of 600 MB: seconds, and memory added"
        values = {short.get(name, name): row.seconds for name, row in mean.items()}
        memory = {short.get(name, name): row.memory_mb for name, row in mean.items()}
        seconds = iter(values)
        drawn["mean.svg"] = bars(
            title, values, lambda value: f"{value:.2f} s, {memory[next(seconds)] or 0:,.0f} MB"
        )
    for name, text in drawn.items():
        with open(os.path.join(directory, name), "w") as file:
            file.write(text)
    return list(drawn)


if __name__ == "__main__":
    print("drawn:", ", ".join(draw_all()) or "nothing: there are no tables for it")
