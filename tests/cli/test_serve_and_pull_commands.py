"""`weighlock serve` and `weighlock pull`, and the other verbs on a URL, as real processes."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cli_checks import (
    ESCAPES,
    assert_refused,
    assert_wrong_usage,
    at_once,
    layers,
    on_a_terminal,
    save,
    shards_with_meta,
    succeeded,
)

import weighlock
from process.counting_proxy import counting_proxy
from process.plain_server import PlainServer, Reply, ranged
from waiting import until

ARRAYS = layers() | {"large": np.arange(700_000, dtype=np.float32)}


@pytest.fixture
def serve(tmp_path):
    """Starts `weighlock serve`; gives the process and what it printed first."""
    started = []

    def start(*arguments, lines=None, secret="secret", under=()):
        process = subprocess.Popen(
            [
                *(*under, sys.executable, "-m", "weighlock", "serve", "--port", "0"),
                *("--secret", str(tmp_path / secret), *map(str, arguments)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        count = 2 if lines is None else lines
        return process, [process.stdout.readline() for _ in range(count)]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def url_in(lines):
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/s/[0-9a-f]{32}/model\.safetensors", lines[1])
    return url


def id_in(lines):
    return url_in(lines).split("/")[4]


def stop(process, number=signal.SIGINT):
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.safetensors", ARRAYS, metadata={"made": "here"})


@pytest.fixture
def share(model):
    """A share of the model, from this process: quicker to start than a command."""
    with weighlock.Server() as server, weighlock.open(model) as catalog:
        yield server.share(catalog)


@pytest.fixture
def plain(model):
    with PlainServer({"/models/a.safetensors": model.read_bytes()}) as server:
        yield server


# serve


def test_serve_leaves_out_what_it_says_it_does(serve, tmp_path):
    folder = shards_with_meta(tmp_path / "sharded")
    _, (line,) = serve(folder, "--json", lines=1)
    with weighlock.open(json.loads(line)["shares"][0]["url"]) as catalog:
        assert list(catalog) == ["a"]


def test_serve_prints_paths_sizes_and_urls_and_ctrl_c_ends_it(serve, model, tmp_path):
    second = save(tmp_path / "second.safetensors", layers())
    process, lines = serve(model, second, lines=6)
    assert lines[4] == "page\n"
    assert "/#token=" in lines[5]
    assert lines[0].startswith(f"{model} (2.8 MB)")
    assert lines[2].startswith(str(second))
    for path, printed in ((model, lines[:2]), (second, lines[2:4])):
        got = weighlock.fetch(url_in(printed))
        with weighlock.open(path) as expected:
            assert list(got) == list(expected)
            assert got.metadata == expected.metadata
            assert all(
                got[n].load().tobytes() == ref.load().tobytes() for n, ref in expected.items()
            )
    code, out, err = stop(process)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


def test_serve_ends_in_order_when_it_is_terminated(serve, model):
    process, _ = serve(model)
    code, _, err = stop(process, signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM"])
def test_serve_goes_on_ignoring_what_it_was_told_to_ignore(serve, model, name):
    """`nohup` does so, and a shell without job control for what it puts into the background."""
    under = ("sh", "-c", f'trap \'\' {name}; exec "$0" "$@"')
    process, lines = serve(model, under=under)
    number = signal.Signals[f"SIG{name}"]
    process.send_signal(number)
    with open(f"/proc/{process.pid}/status") as status:
        (mask,) = re.findall(r"SigIgn:\s*([0-9a-f]+)", status.read())
    assert int(mask, 16) >> (number - 1) & 1
    weighlock.fetch(url_in(lines)).close()
    other = signal.SIGTERM if name == "INT" else signal.SIGINT
    assert stop(process, other)[0] == 0


def test_serve_json(serve, model):
    process, lines = serve(model, "--json", lines=1)
    started = json.loads(lines[0])
    (facts,) = started["shares"]
    assert "/#token=" in started["page"]
    assert facts["path"] == str(model)
    nbytes = sum(array.nbytes for array in ARRAYS.values())
    assert nbytes < facts["bytes"] < nbytes + 5000  # with the header
    assert weighlock.fetch(facts["url"]).nbytes == nbytes
    assert stop(process)[0] == 0


def test_serve_offers_once_what_is_named_twice(serve, model):
    other = model.parent / "." / ".." / model.parent.name / model.name
    process, lines = serve(model, other, "--json", lines=1)
    first, second = json.loads(lines[0])["shares"]
    assert first["url"] == second["url"]
    assert stop(process)[0] == 0


def test_url_is_the_same_after_a_restart_and_another_for_another_secret(serve, model):
    ids = []
    for secret in ("one", "one", "two"):
        process, lines = serve(model, secret=secret)
        ids.append(id_in(lines))
        stop(process)
    assert ids[0] == ids[1] != ids[2]


def test_url_is_another_after_the_file_changed(serve, model):
    process, lines = serve(model)
    stop(process)
    save(model, ARRAYS | {"large": ARRAYS["large"] + 1})
    process, again = serve(model)
    assert id_in(again) != id_in(lines)
    old = url_in(again).replace(id_in(again), id_in(lines))
    with pytest.raises(weighlock.WeighlockError):
        weighlock.fetch(old)
    stop(process)


def test_url_of_a_plain_pickle_is_another_after_it_changed(serve, tmp_path):
    path, ids = tmp_path / "model.pkl", []
    for fill in (1, 1, 2):
        if len(ids) != 1:
            path.write_bytes(pickle.dumps({"w": np.full((4, 4), fill, np.float32)}))
            os.utime(path, (fill, fill))
        process, lines = serve(path)
        ids.append(id_in(lines))
        stop(process)
    assert ids[0] == ids[1] != ids[2]


def test_url_of_a_copy_elsewhere_is_another(serve, model, tmp_path):
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / model.name
    copy.write_bytes(model.read_bytes())
    process, lines = serve(model, copy, lines=4)
    assert id_in(lines[:2]) != id_in(lines[2:])
    stop(process)


def test_secret_is_made_for_its_owner_only(serve, model, tmp_path):
    process, _ = serve(model, secret="new/secret")
    assert (tmp_path / "new" / "secret").stat().st_mode & 0o777 == 0o600
    stop(process)


def test_serve_serves_checkpoints_and_sharded_models_as_safetensors(serve, tmp_path):
    import torch

    torch.save({"a": torch.arange(10.0), "b": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "a.pt")
    save(tmp_path / "sharded", layers(), max_shard_bytes=100)
    process, lines = serve(tmp_path / "a.pt", tmp_path / "sharded", lines=4)
    got = weighlock.fetch(url_in(lines[:2]))
    assert got["b"].load().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert set(weighlock.fetch(url_in(lines[2:]))) == set(layers())
    stop(process)


def test_serve_expires(serve, model):
    process, _ = serve(model, "--expires", "0.2")
    assert process.wait(timeout=20) == 0


def test_what_is_being_sent_is_finished_when_serve_is_told_to_end(serve, model, tmp_path):
    process, lines = serve(model)
    script = (
        "import sys, weighlock\n"
        "weighlock.fetch(sys.argv[1], into=sys.argv[2], limit_rate=2_000_000, connections=1)"
    )
    receiver = subprocess.Popen([sys.executable, "-c", script, url_in(lines), tmp_path / "out"])
    # More than the first MiB, which comes with the first reply: its one request is under way.
    wait_for_blocks(tmp_path, ".out.part-*", 2049)
    code, _, err = stop(process)
    assert code == 0
    assert "Traceback" not in err
    assert receiver.wait(60) == 0
    with weighlock.open(tmp_path / "out") as got:
        assert got["large"].load().tobytes() == ARRAYS["large"].tobytes()


def wait_for_blocks(place, pattern, blocks=1):
    """Until a file holds something."""
    until(lambda: any(path.stat().st_blocks >= blocks for path in place.glob(pattern)))


def test_serve_says_in_one_line_what_is_wrong(model, tmp_path, weighlock_command):
    cases = [
        ([tmp_path / "nowhere"], "nowhere"),
        ([model, "--host", "0.0.0.0"], "--insecure"),
        ([model, "--host", "0.0.0.0", "--insecure"], "--public-url"),
        ([model, "--tls-cert", model], "certificate"),
        ([model, "--host", "192.0.2.1", "--insecure"], "listen"),
    ]

    def run(case):
        return weighlock_command("serve", "--port", 0, "--secret", tmp_path / "key", *case[0])

    for (_, says), result in at_once(run, cases):
        assert_refused(result, says)


def test_port_that_is_taken_is_named(share, model, tmp_path, weighlock_command):
    port = share.url.split(":")[2].split("/")[0]
    result = weighlock_command("serve", "--port", port, "--secret", tmp_path / "key", model)
    assert_refused(result, port, "in use")


def test_secret_that_others_can_read_is_refused(model, tmp_path, weighlock_command):
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o644)
    result = weighlock_command("serve", "--port", 0, "--secret", key, model)
    assert_refused(result, str(key), "chmod 600")


def test_serve_without_paths_or_at_no_port_is_wrong_usage(model, weighlock_command):
    assert_wrong_usage(weighlock_command("serve"))
    assert_wrong_usage(weighlock_command("serve", model, "--port", "99999"), "0<=x<=65535")


# pull


def beside(path):
    return sorted(os.listdir(path.parent))


def test_pull_to_a_file(share, model, tmp_path, weighlock_command):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "copy.safetensors"
    result = weighlock_command("pull", share.url, target)
    assert succeeded(result) == f"{target}: 8 tensors, 2.8 MB\n"
    assert beside(target) == ["copy.safetensors"]
    with weighlock.open(target) as got:
        assert got["large"].load().tobytes() == ARRAYS["large"].tobytes()
        assert got.metadata["made"] == "here"
    assert share.url.split("/")[4] not in result.stderr  # the id is not for logs
    assert "unverified" not in result.stderr


def test_pull_into_a_directory_and_without_dest(share, tmp_path, weighlock_command):
    for arguments in (["there"], []):
        place = tmp_path / f"{len(arguments)}"
        (place / "there").mkdir(parents=True)
        succeeded(weighlock_command("pull", share.url, *arguments, cwd=place))
        target = place.joinpath(*arguments, "model.safetensors")
        assert target.stat().st_size == share.size


def test_pull_into_a_directory_that_is_not_there(share, tmp_path, weighlock_command):
    result = weighlock_command("pull", share.url, f"{tmp_path}/nowhere/")
    assert_refused(result, "nowhere/: there is no such directory; make it first, or name a file")


def test_default_name_is_the_one_the_url_ends_with(plain, tmp_path, weighlock_command):
    place = tmp_path / "there"
    place.mkdir()
    succeeded(weighlock_command("pull", plain.url("/models/a.safetensors?sig=1"), cwd=place))
    assert os.listdir(place) == ["a.safetensors"]


def test_default_name_never_leaves_the_directory(model, tmp_path, weighlock_command):
    place = tmp_path / "deep" / "there"
    place.mkdir(parents=True)
    names = ["%2e%2e%2fescape", "..%2fescape", "%2Fetc%2Fescape", ".."]
    with PlainServer({}, lambda request, _: ranged(request, model.read_bytes())) as server:
        results = at_once(
            lambda name: weighlock_command("pull", f"{server.origin}/a/{name}", cwd=place), names
        )
    for _, result in results:
        assert "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["deep", "model.safetensors"]
    assert os.listdir(tmp_path / "deep") == ["there"]


def test_existing_dest_is_refused_and_replaced_by_force(share, tmp_path, weighlock_command):
    target = save(tmp_path / "old.safetensors", {"a": np.zeros(3)})
    before = target.read_bytes()
    assert_refused(weighlock_command("pull", share.url, target), str(target), "--force")
    assert target.read_bytes() == before
    succeeded(weighlock_command("pull", share.url, target, "--force"))
    assert target.stat().st_size == share.size


def test_force_replaces_what_is_no_model(share, tmp_path, weighlock_command):
    # What a mistaken download left: an error page under the name of a model.
    target = tmp_path / "old.safetensors"
    target.write_bytes(b"<html>log in</html>")
    succeeded(weighlock_command("pull", share.url, target, "--force"))
    assert target.stat().st_size == share.size


def test_dest_that_is_a_dangling_link_is_refused(share, tmp_path, weighlock_command):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_refused(weighlock_command("pull", share.url, tmp_path / "link"), "exists")


def test_force_pulls_only_what_differs(model, tmp_path, weighlock_command):
    with weighlock.Server() as server:
        changed = {name: array.copy() for name, array in ARRAYS.items()}
        changed["large"][-1] = 7
        share = server.share(changed)
        target = tmp_path / "copy.safetensors"
        target.write_bytes(model.read_bytes())
        with counting_proxy(server.port) as (port, count):
            url = share.url.replace(str(server.port), str(port))
            succeeded(weighlock_command("pull", url, target, "--force"))
        with weighlock.open(target) as got:
            assert got["large"].load()[-1] == 7
    assert count() < 0.9 * share.size


def test_pull_tells_what_had_to_travel(share, model, tmp_path, weighlock_command):
    target = tmp_path / "copy.safetensors"
    target.write_bytes(model.read_bytes())
    result = weighlock_command("pull", share.url, target, "--force")
    assert succeeded(result) == f"{target}: 8 tensors, 2.8 MB, of which 0 B had to be pulled\n"
    base = save(tmp_path / "base.safetensors", ARRAYS | {"large": ARRAYS["large"] * 2})
    facts = json.loads(
        succeeded(
            weighlock_command("pull", share.url, tmp_path / "b", "--base", base, "--json"),
        )
    )
    assert 0 < facts["pulled_bytes"] <= share.size
    _, shown = on_a_terminal("pull", share.url, target, "--force")
    assert re.search(r": 2\.8 MB, of which 0 B were pulled, in \d+\.\d\d s\r\n", shown)


def test_base_saves_what_is_the_same(model, tmp_path, weighlock_command):
    with weighlock.Server() as server:
        share = server.share(ARRAYS)
        with counting_proxy(server.port) as (port, count):
            url = share.url.replace(str(server.port), str(port))
            target = tmp_path / "copy.safetensors"
            succeeded(weighlock_command("pull", url, target, "--base", model))
        assert target.stat().st_size == share.size
    assert count() < 0.6 * share.size


def test_names_choose(share, tmp_path, weighlock_command):
    target = tmp_path / "part.safetensors"
    options = ["--names", "layers.1.*", "--names", "embed*"]
    succeeded(weighlock_command("pull", share.url, target, *options))
    with weighlock.open(target) as got:
        assert set(got) == {"embed.weight", "layers.1.attn.weight", "layers.1.norm.bias"}
        assert got["layers.1.norm.bias"].load().tolist() == [1, 1, 1, 1]
    result = weighlock_command("pull", share.url, tmp_path / "none", "--names", "nothing")
    assert_refused_after_a_bar(result, "nothing")
    assert not (tmp_path / "none").exists()


def test_each_name_must_match_before_anything_is_pulled(model, tmp_path, weighlock_command):
    with weighlock.Server() as server, weighlock.open(model) as catalog:
        share = server.share(catalog, receivers=("site",))
        options = ("--names", "layers.1.*", "--names", "typo")
        result = weighlock_command("pull", share.url_for("site"), tmp_path / "out", *options)
        assert_refused(result, "no tensor matches 'typo'")
        assert share.receivers["site"].state is weighlock.State.WAITING  # it may come again
    assert not (tmp_path / "out").exists()


def assert_refused_after_a_bar(result, *says):
    """Exit code 1 and one line that begins as every error does."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("weighlock: ")]
    for text in says:
        assert text in line


def test_limit_rate(share, tmp_path, weighlock_command):
    start = time.monotonic()
    succeeded(weighlock_command("pull", share.url, tmp_path / "a", "--limit-rate", "2MB"))
    assert time.monotonic() - start > 0.9  # 2.8 MB, of which half a second's may come at once
    wrong = ["fast", "0", "-5"]
    run = lambda rate: weighlock_command(  # noqa: E731
        "pull", share.url, tmp_path / "b", "--limit-rate", rate
    )
    for rate, result in at_once(run, wrong):
        assert result.returncode in (1, 2), rate
        assert "Traceback" not in result.stderr


def test_facts_about_a_share_do_not_tell_its_id(share, weighlock_command):
    secret = share.url.partition("/s/")[2].partition("/")[0]
    for words in (["diff", share.url, share.url], ["verify", share.url], ["info", share.url]):
        result = weighlock_command(*words, "--json")
        json.loads(succeeded(result))
        assert secret not in result.stdout + result.stderr, words


def test_headers_are_sent_and_not_shown(model, tmp_path, weighlock_command):
    def behave(request, content):
        wanted = {"authorization": "Bearer hunter2", "x-from-file": "a: b"}
        if any(request.headers.get(name) != text for name, text in wanted.items()):
            return Reply(401)
        return ranged(request, content)

    file = tmp_path / "headers"
    file.write_text("\nX-From-File: a: b\n\n")
    with PlainServer({"/a": model.read_bytes()}, behave) as server:
        result = weighlock_command("pull", server.url("/a"), tmp_path / "refused")
        assert_refused_after_a_bar(result, "401")
        result = weighlock_command(
            *("pull", server.url("/a"), tmp_path / "b", "--header-file", file),
            *("--header", "Authorization: Bearer hunter2"),
        )
    succeeded(result)
    assert "hunter2" not in result.stderr + result.stdout
    assert (tmp_path / "b").read_bytes() == model.read_bytes()


def test_every_verb_that_reads_weights_shows_its_credentials(model, tmp_path, weighlock_command):
    def behave(request, content):
        is_known = request.headers.get("authorization") == "Bearer hunter2"
        return ranged(request, content) if is_known else Reply(401)

    with PlainServer({"/a": model.read_bytes()}, behave) as server:
        url = server.url("/a")
        verbs = [
            ("ls", url),
            ("info", url),
            ("verify", "--data", url),
            ("diff", model, url),
            ("convert", url, tmp_path / "converted.safetensors"),
            ("mean", model, url, "-o", tmp_path / "mean.safetensors"),
        ]
        header = ("--header", "Authorization: Bearer hunter2")
        for verb, refused in at_once(lambda verb: weighlock_command(*verb), verbs):
            assert refused.returncode == 1, verb
            assert "401" in refused.stderr, verb
        for verb, result in at_once(lambda verb: weighlock_command(*verb, *header), verbs):
            assert result.returncode == 0, (verb, result.stderr)
            assert "hunter2" not in result.stderr + result.stdout, verb
    assert (tmp_path / "mean.safetensors").exists()


def test_credentials_are_not_shown_to_two_servers(model, weighlock_command):
    with PlainServer({"/a": model.read_bytes()}) as one, PlainServer({}) as other:
        result = weighlock_command(
            "diff", one.url("/a"), other.url("/a"), "--header", "Authorization: Bearer hunter2"
        )
        assert_wrong_usage(result, "for one server")
        assert one.requests == other.requests == []


def test_headers_that_are_none_are_an_error_in_one_line(share, tmp_path, weighlock_command):
    wrong_usage = ["nothing", ": text", ""]
    unreadable = ["A: b\r\nC: d", "A b: c", "Ä: b", "A: ☃"]

    def run(header):
        return weighlock_command("pull", share.url, tmp_path / "a", "--header", header)

    for header, result in at_once(run, wrong_usage + unreadable):
        assert "Traceback" not in result.stderr, header
        assert result.returncode in ((2,) if header in wrong_usage else (1, 2)), header
    assert not (tmp_path / "a").exists()


def test_pull_json(share, plain, tmp_path, weighlock_command):
    facts = json.loads(
        succeeded(weighlock_command("pull", share.url, tmp_path / "a", "--json")),
    )
    nbytes = sum(array.nbytes for array in ARRAYS.values())
    assert facts == {
        "target": str(tmp_path / "a"),
        "tensors": 8,
        "bytes": nbytes,
        "pulled_bytes": share.size,
        "notes": [],
    }
    url = plain.url("/models/a.safetensors")
    facts = json.loads(succeeded(weighlock_command("pull", url, tmp_path / "b", "--json")))
    assert [note.partition(":")[0] for note in facts["notes"]] == ["unverified"]


def test_what_could_not_be_verified_is_said(share, plain, tmp_path, weighlock_command):
    result = weighlock_command("pull", plain.url("/models/a.safetensors"), tmp_path / "a")
    succeeded(result)
    assert "note: unverified" in result.stderr
    result = weighlock_command("pull", share.url, tmp_path / "b", "--no-verify")
    succeeded(result)
    assert "note: unverified" in result.stderr


def test_note_gives_the_right_reason(share, tmp_path, weighlock_command):
    # This server has digests; it was the user who did not want them.
    result = weighlock_command("pull", share.url, tmp_path / "b", "--no-verify")
    assert "has no digests" not in result.stderr


def test_sharded_model_is_pulled_to_a_directory(tmp_path, weighlock_command):
    save(tmp_path / "model", layers(), max_shard_bytes=100)
    files = {f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with PlainServer(files) as server:
        url = server.url("/m/model.safetensors.index.json")
        result = weighlock_command("pull", url, tmp_path / "copy")
        succeeded(result)
        assert "note: unverified" in result.stderr
        place = tmp_path / "there"
        place.mkdir()
        succeeded(weighlock_command("pull", url, cwd=place))
    found = {f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert found == files
    (made,) = place.iterdir()
    assert {f"/m/{path.name}" for path in made.iterdir()} == set(files)


def test_sharded_model_is_not_pulled_over_another_without_force(tmp_path, weighlock_command):
    save(tmp_path / "model", layers(), max_shard_bytes=100)
    files = {f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}
    copy = tmp_path / "copy"
    with PlainServer(files) as server:
        url = server.url("/m/model.safetensors.index.json")
        succeeded(weighlock_command("pull", url, copy))
        shard = next(copy.glob("*.safetensors"))
        shard.write_bytes(b"mine")
        assert_refused_after_a_bar(weighlock_command("pull", url, copy), "--force")
        assert shard.read_bytes() == b"mine"
        succeeded(weighlock_command("pull", "--force", url, copy))
    assert {f"/m/{path.name}": path.read_bytes() for path in copy.iterdir()} == files


def test_pull_says_in_one_line_what_is_wrong(share, tmp_path, weighlock_command):
    origin = share.url.partition("/s/")[0]
    cases = [
        ("file:///etc/passwd", "http"),
        ("/etc/passwd", "http"),
        ("http://user:hunter2@127.0.0.1/a", "user name"),
        (f"{origin}/s/{'0' * 32}/model.safetensors", "404"),
        (f"{origin}/", "404"),
    ]
    run = lambda case: weighlock_command("pull", case[0], tmp_path / "a")  # noqa: E731
    for (_, says), result in at_once(run, cases):
        assert_refused_after_a_bar(result, says)
        assert "hunter2" not in result.stderr
    assert not (tmp_path / "a").exists()


def test_error_is_the_only_line(share, tmp_path, weighlock_command):
    # Exit code 1 means exactly one line on stderr.
    url = share.url.replace(share.url.split("/")[4], "0" * 32)
    assert_refused(weighlock_command("pull", url, tmp_path / "a"), "404")


def test_interrupted_pull_is_taken_up(tmp_path, weighlock_command):
    arrays = {"a": np.random.default_rng(0).integers(0, 256, 12_000_000, np.uint8)}
    with weighlock.Server() as server:
        share = server.share(arrays)
        target = tmp_path / "a.safetensors"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "weighlock", "pull", share.url, target),
                *("--limit-rate", "6MB", "--connections", "1"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_blocks(tmp_path, ".a.safetensors.part-*", 4000)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=20)[1]
        assert process.returncode == 130
        assert "Traceback" not in err
        assert not target.exists()
        assert len(list(tmp_path.glob(".a.safetensors.part-*"))) == 1
        with counting_proxy(server.port) as (port, count):
            url = share.url.replace(str(server.port), str(port))
            told = succeeded(weighlock_command("pull", url, target))
        assert count() < share.size - 1_000_000
        assert re.search(r"12 MB, of which \d+(\.\d+)? MB had to be pulled", told)
        assert beside(target) == ["a.safetensors"]
        with weighlock.open(target) as got:
            assert got["a"].load().tobytes() == arrays["a"].tobytes()


def test_names_of_tensors_cannot_paint_the_terminal(tmp_path, weighlock_command):
    with weighlock.Server() as server:
        share = server.share({ESCAPES: np.zeros(3)})
        succeeded(weighlock_command("pull", share.url, tmp_path / "a"))
        succeeded(weighlock_command("ls", share.url))


# The other verbs on a URL.


def test_ls_is_what_it_is_for_the_file(share, model, weighlock_command):
    assert succeeded(weighlock_command("ls", share.url)) == succeeded(
        weighlock_command("ls", model)
    )


def test_info_on_a_url(share, plain, weighlock_command):
    facts = json.loads(succeeded(weighlock_command("info", share.url, "--json")))
    assert facts["tensors"] == 8
    result = weighlock_command("info", plain.url("/models/a.safetensors"))
    assert "unverified" in succeeded(result) + result.stderr


def test_verify_on_a_url(share, weighlock_command):
    out = succeeded(weighlock_command("verify", "--data", share.url))
    assert "valid (all data" in out
    broken = share.url.replace("model.safetensors", "other.safetensors")
    assert_refused(weighlock_command("verify", broken), "404")


def test_diff_of_urls_and_files(share, model, tmp_path, weighlock_command):
    assert "large" not in succeeded(weighlock_command("diff", share.url, model))
    other = save(tmp_path / "other.safetensors", ARRAYS | {"large": ARRAYS["large"] + 1})
    assert "large" in succeeded(weighlock_command("diff", other, share.url))


def test_convert_from_a_url(share, tmp_path, weighlock_command):
    target = tmp_path / "half.safetensors"
    succeeded(weighlock_command("convert", share.url, target, "--dtype", "BF16"))
    with weighlock.open(target) as got:
        assert got["large"].dtype == "BF16"
        assert got["layers.2.norm.bias"].load().astype(np.float32).tolist() == [2, 2, 2, 2]


def test_ids_are_not_printed_by_verbs_that_fail(share, weighlock_command):
    share.revoke()
    cases = [("ls",), ("info",), ("verify",), ("diff", share.url)]
    for _, result in at_once(lambda case: weighlock_command(*case, share.url), cases):
        assert_refused(result, "revoked")
        assert share.url.split("/")[4] not in result.stderr


def test_ids_are_not_printed_by_verbs_that_succeed(share, tmp_path, weighlock_command):
    # Terminals and logs of jobs are read by others: `pull` shows URLs without what opens them.
    cases = [("info",), ("verify",), ("verify", "--data"), ("diff", share.url)]
    results = [result for _, result in at_once(lambda c: weighlock_command(*c, share.url), cases)]
    results.append(weighlock_command("convert", share.url, tmp_path / "a"))
    for result in results:
        succeeded(result)
    shows = [
        " ".join(r.args[3:5]) for r in results if share.url.split("/")[4] in r.stdout + r.stderr
    ]
    assert [text.split()[0] for text in shows] == []
