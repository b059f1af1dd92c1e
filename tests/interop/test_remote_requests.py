"""How often a server is asked to open what lies behind its URL: once for each far place."""

import io
import os
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import weighlock
from process.plain_server import PlainServer
from weighlock.formats.reading_ahead import far, read_ahead
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.local import BytesSource
from weighlock.tensors.spec import Span

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")

LARGE = {f"w{n}": torch.full((400_000,), float(n)) for n in range(4)}
SMALL = {f"w{n}": torch.full((50,), float(n)) for n in range(9_000)}


def saved(tensors, **options):
    buffer = io.BytesIO()
    torch.save(tensors, buffer, **options)
    return buffer.getvalue()


def arrays(tensors):
    buffer = io.BytesIO()
    np.savez(buffer, **{name: tensor.numpy() for name, tensor in tensors.items()})
    return buffer.getvalue()


# The first MiB, the directory at the end, and the head of each storage that begins later.
OPENED = {
    "zip": (saved(LARGE), LARGE, 2 + 3),
    "legacy": (saved(LARGE, _use_new_zipfile_serialization=False), LARGE, 1 + 3),
    "npz": (arrays(LARGE), LARGE, 2 + 3),
    "zip of many": (saved(SMALL), SMALL, 25),
}


@pytest.mark.parametrize(("content", "tensors", "most"), OPENED.values(), ids=OPENED)
def test_opening_asks_little(content, tensors, most):
    with PlainServer({"/x": content}) as server, weighlock.open(server.url("x")) as catalog:
        assert list(catalog) == list(tensors)
        assert len(server.requests) <= most
        asked = len(server.requests)
        assert torch.equal(catalog["w3"].torch(), tensors["w3"])
        assert len(server.requests) <= asked + 1


def test_all_tensors_are_read_at_once_and_right():
    with PlainServer({"/x": OPENED["zip"][0]}) as server:
        with weighlock.open(server.url("x")) as catalog:
            loaded = catalog.load()
        asked = len(server.requests)
    assert all(np.array_equal(loaded[name], t.numpy()) for name, t in LARGE.items())
    assert asked <= 2 + 3 + len(LARGE)


def test_a_chunk_takes_two_requests_and_its_data(tmp_path):
    dcp.save(LARGE, checkpoint_id=str(tmp_path), no_dist=True)
    files = {f"/ckpt/{name}": (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with (
        PlainServer(files) as server,
        weighlock.open(server.url("ckpt/.metadata")) as catalog,
    ):
        assert catalog["w0"].shape == (400_000,)  # the file is opened, and its first MiB here
        asked = len(server.requests)
        assert torch.equal(catalog["w2"].torch(), LARGE["w2"])
        assert len(server.requests) <= asked + 3


def test_runs_are_what_was_asked_for():
    content = bytes(range(256)) * 4096
    spans = [Span(n, 7) for n in (0, 3, 90, 40_000, 40_007, 300_000, 700_000, len(content) - 7)]
    assert far(BytesSource(content)) is None
    with PlainServer({"/a": content}) as server, closing(HttpSource(Remote(server.url("/a")))) as s:
        remote = far(s)
        assert remote is s
        assert read_ahead(remote, spans) == [content[s.offset : s.end] for s in spans]
        assert read_ahead(remote, []) == []
