"""The command in odd surroundings: closed streams, other encodings, targets that are there."""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import weighlock
from cli.cli_checks import assert_refused, assert_wrong_usage, layers, save, succeeded
from process.plain_server import PlainServer, ranged
from waiting import until


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "a.safetensors", layers())


def shell(line, **options):
    """What a line of shell comes to; $W is the command."""
    environment = {**os.environ, "W": f"{sys.executable} -m weighlock", **options}
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=environment, check=False
    )


def test_nobody_reads_what_is_said(model, tmp_path):
    for number, closed in enumerate(("2>&-", "2>/dev/full", ">&- 2>&-")):
        target = tmp_path / f"copy-{number}"
        done = shell(f"$W convert {model} {target} {closed}")
        assert done.returncode == 0, done.stderr
        with weighlock.open(target) as catalog:
            assert len(catalog) == len(layers())


def test_an_encoding_that_lacks_arrows(model, tmp_path):
    other = save(tmp_path / "b.safetensors", {"other": np.zeros((2, 3))})
    for words in (f"diff {model} {other}", "convert --help", f"mean {model} -o {tmp_path}/m"):
        told = shell(f"$W {words}", PYTHONIOENCODING="latin-1")
        assert told.returncode == 0, told.stderr
        assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    "way", [["-m", "weighlock"], [os.path.join(os.path.dirname(sys.executable), "weighlock")]]
)
def test_an_end_while_it_starts_is_quiet(way):
    codes = set()
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-X", "importtime", *way, "ls", "nothing"],
            stderr=subprocess.PIPE,
            text=True,
        ) as started:
            for line in started.stderr:  # while the module of the command is being loaded
                if "click" in line:
                    break
            started.send_signal(signal.SIGINT)
            rest = started.stderr.read()
        assert "Traceback" not in rest, rest
        codes.add(started.returncode)
    # On a busy machine one may have found that there is nothing before it is told to end.
    assert 130 in codes <= {130, 1}


def test_finite_reads_the_data(tmp_path, weighlock_command):
    path = save(tmp_path / "nan.safetensors", {"w": np.array([1.0, np.nan])})
    told = weighlock_command("verify", "--finite", path)
    assert told.returncode == 1
    assert "1 NaN" in told.stdout
    assert "1 tensor not finite" in told.stdout


def test_numbers_that_a_dtype_cannot_hold_are_told(tmp_path, weighlock_command):
    arrays = {"w": np.array([1e6, -1e6, 0.5, np.inf, np.nan]), "v": np.ones(3)}
    path = save(tmp_path / "large.safetensors", arrays)
    told = weighlock_command("convert", path, tmp_path / "small", "--dtype", "f16")
    succeeded(told)
    assert "note: w: 2 numbers are too large for F16" in told.stderr
    told = weighlock_command("convert", path, tmp_path / "b", "--dtype", "bf16", "--json")
    assert json.loads(succeeded(told))["overflowed"] == {}


def test_targets_that_nobody_means(model, tmp_path, weighlock_command):
    (tmp_path / "there").mkdir()
    for force in ((), ("--force",)):
        told = weighlock_command("convert", model, tmp_path / "there", *force)
        assert_refused(told, "is a directory; name a file in it")
    assert_wrong_usage(weighlock_command("convert", model, "-"))
    assert_wrong_usage(weighlock_command("mean", model, "-o", "-"))
    assert_wrong_usage(weighlock_command("pull", "http://127.0.0.1:1/x", "-"))
    assert_wrong_usage(
        weighlock_command("convert", model, tmp_path / "x", "--metadata", "weighlock.groups=x")
    )


def test_numbers_that_nobody_means(model, weighlock_command):
    for number in ("0", "-1", "65"):
        assert_wrong_usage(weighlock_command("pull", "http://[::1]:1/x", "--connections", number))
    assert_wrong_usage(weighlock_command("mean", model, "-o", "x", "--threads", "100000"))
    assert_wrong_usage(weighlock_command("ls", model, "--ca", "missing"))


def test_a_server_that_does_not_answer_is_told_of_while_it_is_asked_again():
    with subprocess.Popen(
        [sys.executable, "-m", "weighlock", "ls", "http://127.0.0.1:1/model.safetensors"],
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        line = asking.stderr.readline()
        assert asking.poll() is None
        asking.terminate()
    assert "Connection refused" in line
    assert "trying again for up to 30 s" in line


def test_a_server_that_comes_back_is_not_told_of(tmp_path, weighlock_command):
    """All four connections break once, at the same moment; then it goes on."""
    content = save(tmp_path / "large.safetensors", {"w": np.zeros(10 << 20)}).read_bytes()
    broken = []

    def behave(request, content):
        reply = ranged(request, content)
        if request.span and request.span[0] >= 1 << 20 and len(broken) < 4:
            broken.append(request.span)
            reply.headers["Content-Length"] = str(len(reply.body))
            reply.body = reply.body[:1000]
        return reply

    with PlainServer({"/a.safetensors": content}, behave) as server:
        told = weighlock_command("pull", server.url("a.safetensors"), tmp_path / "b")
        succeeded(told)
        assert len(broken) == 4
        assert "trying again" not in told.stderr
    assert (tmp_path / "b").read_bytes() == content


@pytest.mark.parametrize("etag", ['"strong"', None])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_a_pull_is_told_what_is_kept(tmp_path, etag, end):
    """Only where the next attempt will go on from there: from a plain server, with an ETag."""
    content = save(tmp_path / "large.safetensors", {"w": np.zeros(4 << 20)}).read_bytes()
    over = threading.Event()
    asked = threading.Semaphore(0)

    def behave(request, content):
        if request.span and request.span[0] >= 16 << 20:
            asked.release()
            over.wait(30)
        return ranged(request, content, etag)

    with PlainServer({"/a.safetensors": content}, behave) as server:
        url = server.url("a.safetensors")
        with subprocess.Popen(
            [sys.executable, "-m", "weighlock", "pull", url, tmp_path / "b"],
            stderr=subprocess.PIPE,
            text=True,
        ) as pulling:
            asked.acquire()
            until(lambda: any(p.stat().st_size for p in tmp_path.glob(".b.part*")))
            pulling.send_signal(end)
            said = pulling.stderr.read()
            over.set()
        assert pulling.returncode == 128 + end
    kept = re.search(r"([\d,]+) of ([\d,]+) bytes are kept, and the next attempt goes on", said)
    assert bool(kept) == bool(etag), said
    if kept:
        assert int(kept[2].replace(",", "")) == len(content)
    assert "Traceback" not in said


def test_a_full_stream_for_errors_does_not_change_how_it_ends(model, tmp_path):
    large = save(tmp_path / "large.safetensors", {"w": np.array([1e6])})
    for words, code in (
        ("ls --nope", 2),
        (f"ls {tmp_path}/nothing", 1),
        (f"convert {large} {tmp_path}/f16 --dtype f16", 0),
        (f"diff --exit-code {model} {tmp_path}/nothing", 2),
    ):
        assert shell(f"$W {words} 2>/dev/full").returncode == code, words


def test_json_is_json_in_every_encoding(tmp_path):
    path = save(tmp_path / "names.safetensors", {"é \U0001f600": np.zeros(1)})
    for encoding in ("latin-1", "ascii", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        told = subprocess.run(
            [sys.executable, "-m", "weighlock", "ls", "--json", path],
            capture_output=True,
            env=environment,
            check=True,
        )
        assert json.loads(told.stdout.decode(encoding))[0]["name"] == "é \U0001f600"


def test_weights_are_not_turned_into_scales(model, tmp_path, weighlock_command):
    told = weighlock_command("convert", model, tmp_path / "x", "--dtype", "f8_e8m0")
    assert_wrong_usage(told)
    assert "bf16" in told.stderr
    assert "f8_e8m0," not in told.stderr
