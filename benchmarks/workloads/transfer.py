"""A model from one process to another over loopback: to memory, into given arrays, to a file."""

import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field

from benchmarks.contender import Bar, Contender, Job, Workload
from benchmarks.curl import curl_contenders
from benchmarks.owners import Owner, certificate, make_arrays
from benchmarks.threads import at_once

__all__ = [
    "ALL",
    "LARGE",
    "Lazily",
    "Sizes",
    "check",
    "connected",
    "fetch",
    "nvflare",
    "prepare",
    "prepare_nvflare",
    "raw_to_disk",
    "raw_to_memory",
]

_MOST, _RANGE, _BLOCK, _CONNECTIONS = 128 << 20, 8 << 20, 1 << 20, 4


@dataclass(frozen=True)
class Sizes:
    """How many tensors of how many bytes."""

    count: int
    nbytes: int

    def of(self, job: Job) -> "Sizes":
        """These, or small ones for a quick look."""
        quick = job.model.hidden < 1000
        return Sizes(min(self.count, 20), min(self.nbytes, 1 << 18)) if quick else self

    @property
    def total(self) -> int:
        return self.count * self.nbytes


LARGE = Sizes(64, 32 << 20)
MEDIUM = Sizes(512, 4 << 20)
SMALL = Sizes(100_000, 20_480)


@dataclass
class _Prepared:
    job: Job
    sizes: Sizes
    owner: Owner
    out: object = field(default_factory=dict)
    cell: object = None
    base: str = ""
    """A file of the round before, where there was one."""
    pulled: list = field(default_factory=list)
    """Bytes that travelled, as they came."""

    @property
    def pids(self):
        """Processes whose CPU and memory count too."""
        return self.owner.pids

    @property
    def path(self):
        return os.path.join(self.job.directory, "out.safetensors")


def prepare(kind, sizes, *, out=False, far=None):
    """The other side, at work; `far` makes the line to it, if there is one."""

    def begin(job: Job):
        import blake3  # noqa: F401
        import ml_dtypes
        import numpy as np

        import weighlock.fetching.fetch  # noqa: F401

        chosen = sizes.of(job)
        line = far() if far else None
        # A certificate is made once for all runs; what else an owner makes goes with its run.
        place = job.kept if kind.endswith("tls") else job.directory
        owner = Owner(kind, chosen.count, chosen.nbytes, place, line)
        prepared = _Prepared(job, chosen, owner)
        if out:
            # Written to, as those of a model are: untouched memory would be made in the fetch.
            prepared.out = {
                name: np.ones(chosen.nbytes // 2, ml_dtypes.bfloat16)
                for name in (f"layer.{i}.weight" for i in range(chosen.count))
            }
        return prepared

    return begin


def _prepare_module(sizes):
    """Likewise, with a module that has the parameters."""

    def begin(job: Job):
        import torch

        import weighlock.tensors.torch  # noqa: F401

        prepared = prepare("weighlock", sizes)(job)
        layers = [torch.nn.Module() for _ in range(prepared.sizes.count)]
        for layer in layers:
            ones = torch.ones(prepared.sizes.nbytes // 2, dtype=torch.bfloat16)
            layer.weight = torch.nn.Parameter(ones)
        prepared.out = torch.nn.Module()
        prepared.out.layer = torch.nn.ModuleList(layers)
        return prepared

    return begin


def check(job, prepared, result):
    import numpy as np

    expected = make_arrays(prepared.sizes.count, prepared.sizes.nbytes)
    assert set(result) == set(expected)
    for name, array in expected.items():
        found = result[name]
        if hasattr(found, "materialize"):
            found = found.materialize()
        if hasattr(found, "detach"):
            import torch

            found = found.view(torch.uint16).numpy()
        assert np.array_equal(np.asarray(found).view("u2").reshape(-1), array), name


def _raw_receive(prepared, take, tls=False):
    """Four connections ask for ranges, one after another; `take` is given each."""
    total, address = prepared.sizes.total, prepared.owner.address
    spans = iter(_spans(total))
    taking = threading.Lock()

    def work(_):
        sock = socket.create_connection((address["host"], address["port"]))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            cert, _ = certificate(prepared.job.kept)
            context = ssl.create_default_context(cafile=cert)
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        while True:
            with taking:
                start, length = next(spans, (0, 0))
            if not length:
                sock.close()
                return
            sock.sendall(start.to_bytes(8, "little") + length.to_bytes(8, "little"))
            take(sock, start, length)

    at_once(work, range(_CONNECTIONS))


def _spans(total):
    """What is asked for, one after another: as ours asks a share that no cache keeps."""
    start = 0
    while start < total:
        left = total - start
        length = max(_RANGE, min(_MOST, left // _CONNECTIONS // _RANGE * _RANGE))
        yield start, min(length, left)
        start += length


def _fill(sock, view):
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError
        done += got


def raw_to_memory(prepared, tls=False, hashed=True):
    import numpy as np
    from blake3 import blake3

    from weighlock.tensors.arrays import empty

    size = prepared.sizes.nbytes
    # In memory as ours is had: of another alignment, half of it would not be in huge pages.
    arrays = {name: array.view(np.uint16) for name, array in prepared.out.items()} or {
        f"layer.{number}.weight": empty((size // 2,), np.dtype(np.uint16))
        for number in range(prepared.sizes.count)
    }
    views = [memoryview(array.view("u1")) for array in arrays.values()]

    def take(sock, start, length):
        while length:
            number, first = divmod(start, size)
            view = views[number][first : first + min(length, _BLOCK)]
            _fill(sock, view)
            if hashed:
                blake3(view).digest()
            start, length = start + len(view), length - len(view)

    _raw_receive(prepared, take, tls)
    return arrays


def raw_to_disk(prepared, hashed=True):
    import numpy as np
    from blake3 import blake3

    fd = os.open(prepared.path, os.O_RDWR | os.O_CREAT)
    local = threading.local()

    def take(sock, start, length):
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(np.empty(_BLOCK, np.uint8))
        while length:
            view = local.buffer[: min(length, _BLOCK)]
            _fill(sock, view)
            if hashed:
                blake3(view).digest()
            os.pwrite(fd, view, start)
            start, length = start + len(view), length - len(view)

    _raw_receive(prepared, take)
    size = prepared.sizes.nbytes // 2
    return Lazily(fd, size, prepared.sizes.count)


class Lazily(dict):
    """The tensors of a file without a header, read when they are looked at."""

    def __init__(self, fd, size, count):
        super().__init__({f"layer.{number}.weight": number for number in range(count)})
        self.fd, self._size = fd, size

    def __getitem__(self, name):
        import numpy as np

        number = super().__getitem__(name)
        raw = os.pread(self.fd, 2 * self._size, 2 * self._size * number)
        return np.frombuffer(raw, np.uint16)


def _access(prepared):
    import weighlock

    cert, _ = certificate(prepared.job.kept)
    return weighlock.Access(origins={"127.0.0.1": weighlock.Credential(ca=cert)})


def fetch(prepared, **options):
    import weighlock

    return weighlock.fetch(
        prepared.owner.address["url"], connections=_CONNECTIONS, durable=False, **options
    )


def _share_and_fetch(prepared, into=None):
    """What a model costs that nobody offered before: its owner hashes it first."""
    prepared.owner.go_on()
    return fetch(prepared, into=into)


def prepare_nvflare(sizes, far=None):
    def begin(job: Job):
        prepared = prepare("nvflare", sizes, far=far)(job)
        prepared.cell = connected(prepared.owner.address["url"], "site-1")
        return prepared

    return begin


def connected(url, name):
    """A cell of NVFlare's that has its connection, and torch: neither is what is measured."""
    import nvflare.app_opt.pt.tensor_downloader  # noqa: F401 - with it comes torch
    from nvflare.fuel.f3.cellnet.cell import Cell

    cell = Cell(fqcn=name, root_url=url, secure=False, credentials={})
    cell.start()
    while "server" not in cell.core_cell.agents:
        time.sleep(0.05)
    return cell


def nvflare(prepared, to_disk):
    from nvflare.app_opt.pt.tensor_downloader import download_tensors, download_tensors_to_disk

    given = {
        "from_fqcn": "server",
        "ref_id": prepared.owner.address["ref"],
        "per_request_timeout": 60.0,
        "cell": prepared.cell,
    }
    if to_disk:
        error, result = download_tensors_to_disk(**given, root_dir=prepared.job.directory)
    else:
        error, result = download_tensors(**given)
    if error:
        raise RuntimeError(error)
    return {name: result[name] for name in result} if not to_disk else _Refs(result)


class _Refs(dict):
    def __init__(self, lazy):
        super().__init__({name: lazy.make_lazy_ref(name) for name in lazy.keys()})  # noqa: SIM118


def _workload(name, what, sizes, to_memory_bar, to_disk_bar):
    raw = "raw sockets + BLAKE3, 4 connections"
    bare = "raw sockets, 4 connections"
    flare = "NVFlare 2.9 download_tensors"
    to_memory = Workload(
        f"fetch-{name}",
        f"Fetch {what} to memory over loopback",
        (
            Contender(raw, raw_to_memory, prepare("raw", sizes), check),
            Contender(
                bare,
                lambda prepared: raw_to_memory(prepared, hashed=False),
                prepare("raw", sizes),
                check,
            ),
            Contender(
                flare,
                lambda prepared: nvflare(prepared, to_disk=False),
                prepare_nvflare(sizes),
                check,
                ("nvflare",),
            ),
            Contender("weighlock", fetch, prepare("weighlock", sizes), check),
            Contender(
                "weighlock, hashed by its owner within the time",
                _share_and_fetch,
                prepare("weighlock-later", sizes),
                check,
            ),
            Contender(
                f"{raw}, into given arrays",
                raw_to_memory,
                prepare("raw", sizes, out=True),
                check,
            ),
            Contender(
                "weighlock, into given arrays",
                lambda prepared: fetch(prepared, out=prepared.out),
                prepare("weighlock", sizes, out=True),
                check,
            ),
            Contender(
                "weighlock, into a torch module",
                lambda prepared: fetch(prepared, out=prepared.out),
                _prepare_module(sizes),
                check,
                ("torch",),
            ),
        ),
        (
            Bar("weighlock", raw, 0.8),
            Bar("weighlock, into given arrays", f"{raw}, into given arrays", 0.8),
            Bar("weighlock, into a torch module", f"{raw}, into given arrays", 0.8),
            Bar("weighlock", flare, to_memory_bar),
        ),
        cpu_bars={"weighlock": 1.0 * sizes.total / 1e9},
        beside_bars={"weighlock": 64},
        limits={"weighlock": raw},
        fills_memory=True,
    )
    to_disk = Workload(
        f"fetch-{name}-disk",
        f"Fetch {what} to a file on tmpfs over loopback",
        (
            Contender(raw + " + pwrite", raw_to_disk, prepare("raw", sizes), check),
            Contender(
                bare + " + pwrite",
                lambda prepared: raw_to_disk(prepared, hashed=False),
                prepare("raw", sizes),
                check,
            ),
            Contender(
                flare + "_to_disk",
                lambda prepared: nvflare(prepared, to_disk=True),
                prepare_nvflare(sizes),
                check,
                ("nvflare",),
            ),
            *curl_contenders(prepare("nginx", sizes), check),
            Contender(
                "weighlock",
                lambda prepared: fetch(prepared, into=prepared.path),
                prepare("weighlock", sizes),
                check,
            ),
            Contender(
                "weighlock, hashed by its owner within the time",
                lambda prepared: _share_and_fetch(prepared, prepared.path),
                prepare("weighlock-later", sizes),
                check,
            ),
        ),
        (
            Bar("weighlock", raw + " + pwrite", 0.8),
            Bar("weighlock", flare + "_to_disk", to_disk_bar),
        ),
        memory_bars={"weighlock": 64},
        cpu_bars={"weighlock": 1.0 * sizes.total / 1e9},
        beside_bars={"weighlock": 64},
        limits={"weighlock": raw + " + pwrite"},
    )
    return to_memory, to_disk


_TLS = Workload(
    "fetch-tls",
    "Fetch 2 GB in tensors of 32 MB over TLS to memory",
    (
        Contender(
            "raw ssl + BLAKE3, 4 connections",
            lambda prepared: raw_to_memory(prepared, tls=True),
            prepare("raw-tls", LARGE),
            check,
        ),
        Contender(
            "weighlock",
            lambda prepared: fetch(prepared, access=_access(prepared)),
            prepare("weighlock-tls", LARGE),
            check,
        ),
    ),
    (Bar("weighlock", "raw ssl + BLAKE3, 4 connections", 0.85),),
    fills_memory=True,
)

_MANY = Workload(
    "fetch-many",
    "Fetch 2 GB to memory: 100,000 tensors of 20 KB beside 512 of 4 MB",
    (
        Contender(
            "raw sockets + BLAKE3, 4 connections, 4 MB",
            raw_to_memory,
            prepare("raw", MEDIUM),
            check,
        ),
        Contender("weighlock, 4 MB", fetch, prepare("weighlock", MEDIUM), check),
        Contender("weighlock, 20 KB", fetch, prepare("weighlock", SMALL), check),
    ),
    (Bar("weighlock, 20 KB", "weighlock, 4 MB", 0.5),),
    fills_memory=True,
)

ALL = (
    *_workload("large", "2 GB in tensors of 32 MB", LARGE, 5, 3),
    *_workload("medium", "2 GB in tensors of 4 MB", MEDIUM, 7, 4.5),
    _TLS,
    _MANY,
)
