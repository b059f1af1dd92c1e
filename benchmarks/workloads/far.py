"""A model over a line that is not loopback: 50 ms there and back, 100 MB/s.

What counts here is not the processor but who lets the line run dry: while connections are made,
while TCP feels its way, between a reply and the next request.
"""

from benchmarks.contender import Contender, Workload
from benchmarks.curl import curl, curl_contenders
from benchmarks.line import Far, described
from benchmarks.workloads.transfer import (
    Sizes,
    check,
    fetch,
    nvflare,
    prepare,
    prepare_nvflare,
    raw_to_disk,
    raw_to_memory,
)

__all__ = ["ALL"]

_WHOLE = Sizes(32, 32 << 20)
_HALF = Sizes(16, 32 << 20)
_RATES = (20, 50)
"""MB/s that are asked for."""


def _to_disk(prepared, **options):
    return fetch(prepared, into=prepared.path, **options)


def _prepare(kind, sizes):
    return prepare(kind, sizes, far=Far)


def _limited(rate):
    return Contender(
        f"weighlock, {rate} MB/s asked for",
        lambda prepared: _to_disk(prepared, limit_rate=1e6 * rate),
        _prepare("weighlock", _HALF),
        check,
    )


ALL = (
    Workload(
        "far",
        "Fetch 1 GB over a line of 50 ms and 100 MB/s",
        (
            Contender(
                "raw sockets + BLAKE3, 4 connections, to memory",
                raw_to_memory,
                _prepare("raw", _WHOLE),
                check,
            ),
            Contender(
                "raw sockets + BLAKE3, 4 connections, to disk",
                raw_to_disk,
                _prepare("raw", _WHOLE),
                check,
            ),
            *curl_contenders(_prepare("nginx", _WHOLE), check),
            Contender(
                "NVFlare 2.9 download_tensors_to_disk",
                lambda prepared: nvflare(prepared, to_disk=True),
                prepare_nvflare(_WHOLE, Far),
                check,
                ("nvflare",),
            ),
            Contender("weighlock, to memory", fetch, _prepare("weighlock", _WHOLE), check),
            Contender("weighlock, to disk", _to_disk, _prepare("weighlock", _WHOLE), check),
        ),
        moved_bytes=_WHOLE.total,
        rate_bars={"weighlock, to memory": (80, None), "weighlock, to disk": (80, None)},
        limits={
            f"weighlock, {place}": f"raw sockets + BLAKE3, 4 connections, {place}"
            for place in ("to memory", "to disk")
        },
        note=described,
    ),
    Workload(
        "far-limited",
        "Fetch 512 MB to disk over the same line, no faster than asked for",
        (
            *map(_limited, _RATES),
            Contender(
                f"nginx + curl, {_RATES[-1]} MB/s asked for",
                lambda prepared: curl(prepared, "--limit-rate", f"{_RATES[-1]}000000"),
                _prepare("nginx", _HALF),
                check,
                programs=("nginx", "curl"),
            ),
        ),
        moved_bytes=_HALF.total,
        rate_bars={
            f"weighlock, {rate} MB/s asked for": (0.9 * rate, 1.1 * rate) for rate in _RATES
        },
        note=described,
    ),
)
