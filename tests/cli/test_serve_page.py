"""What `weighlock serve` tells those who run it: the page, its token, lines and a live table."""

import contextlib
import fcntl
import http.client
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from cli_checks import assert_refused, at_once, save

import weighlock
from waiting import until
from weighlock.sharing.identity import page_token, secret

ARRAYS = {"w": np.arange(1000, dtype=np.float32)}


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model[red].safetensors", ARRAYS)


@contextlib.contextmanager
def serving(tmp_path, *arguments, stderr=subprocess.PIPE):
    """`weighlock serve --json`, and what it said at the start."""
    command = [sys.executable, "-m", "weighlock", "serve", "--port", "0", "--json"]
    command += ["--secret", str(tmp_path / "secret"), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def stop(process):
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    return err


def status(page, target):
    """Of a reply to one who has the page's URL."""
    url, _, token = page.partition("/#token=")
    connection = http.client.HTTPConnection(url.partition("//")[2], timeout=20)
    try:
        connection.request("GET", target, headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def test_page_metrics_and_lines_of_transfers(model, tmp_path):
    """E3, E11."""
    with serving(tmp_path, model) as (process, started):
        page, url = started["page"], started["shares"][0]["url"]
        assert [status(page, path) for path in ("/", "/api/shares", "/metrics")] == [200] * 3
        weighlock.fetch(url, receiver="site-1")
        err = stop(process)
    assert f" {model}: site-1 landed, " in err
    assert "connection ended" not in err  # that is for -v
    token = page.partition("#token=")[2]
    assert token == page_token(secret(str(tmp_path / "secret")))  # so it outlives a restart
    assert len(token) == 32
    assert token not in url
    assert token not in err
    assert url.split("/")[4] not in err


def test_page_can_be_left_out(model, tmp_path):
    with serving(tmp_path, model, "--no-page") as (process, started):
        assert started["page"] is None
        base = started["shares"][0]["url"].partition("/s/")[0]
        assert [status(base, path) for path in ("/", "/metrics")] == [404, 404]
        stop(process)


def test_tokens_that_guard_nothing_are_refused_in_one_line(model, tmp_path, weighlock_command):
    cases = [("open", "x" * 32, 0o644, "chmod 600"), ("short", "secret", 0o600, "6 characters")]
    for name, text, mode, _ in cases:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    cases.append(("nowhere", "", 0, "nowhere"))

    def run(case):
        options = ["--secret", tmp_path / "secret", "--page-token", tmp_path / case[0]]
        return weighlock_command("serve", "--port", 0, *options, model)

    for (_, text, _, says), result in at_once(run, cases):
        assert_refused(result, says)
        assert not text or text not in result.stderr


@pytest.fixture
def terminal():
    """Two ends of a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)


@pytest.mark.parametrize("options", [[], ["-v"]], ids=["quiet", "verbose"])
def test_table_is_shown_on_a_terminal(model, tmp_path, terminal, options):
    ours, theirs = terminal
    file = tmp_path / "token"
    file.write_text("0123456789abcdef-chosen\n")
    file.chmod(0o600)
    options = [*options, "--page-token", file]
    seen = ""

    def sees(text):
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(ours, 1 << 16).decode()
        return text in seen

    with serving(tmp_path, model, *options, stderr=theirs) as (process, started):
        os.close(theirs)
        until(lambda: sees("nobody yet"))
        assert "model[red].safetensors" in seen  # and not red
        assert started["page"].endswith("/#token=0123456789abcdef-chosen")
        weighlock.fetch(started["shares"][0]["url"], receiver="site-1")
        until(lambda: sees("landed"))
        until(lambda: sees("━" * 20))
        assert (": site-1 landed" in seen) == ("-v" in options)
        process.send_signal(signal.SIGINT)
        until(lambda: sees("stopping"))
        assert process.wait(20) == 0
    assert "Traceback" not in seen
