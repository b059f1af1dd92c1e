"""The public face: what is listed, and what importing it costs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weighlock

ROOT = Path(__file__).parents[2]

LOADED = """
import json, sys

{}
heavy = ("torch", "click", "rich", "ml_dtypes", "safetensors", "asyncio", "http", "hypothesis")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def loaded(run_python, script, *arguments):
    return json.loads(run_python(LOADED.format(script), *arguments).stdout)


def test_every_public_name_is_there():
    for name in weighlock.__all__:
        assert getattr(weighlock, name) is not None
    assert {
        *("Catalog", "DType", "Limits", "TensorRef", "TensorSpec", "WeighlockError"),
        *("Writer", "open", "save"),
    } <= set(weighlock.__all__)
    assert weighlock.__version__


def test_import_loads_nothing_heavy(run_python):
    assert loaded(run_python, "import weighlock") == []


@pytest.fixture
def path(tmp_path):
    arrays = {"a": np.ones(4, np.float32), "b": weighlock.DType.BF16.numpy.type(2).reshape(1)}
    weighlock.save(tmp_path / "a.safetensors", arrays, durable=False)
    return tmp_path / "a.safetensors"


def test_what_numpy_knows_needs_nothing_else(run_python, path):
    script = """
import weighlock
catalog = weighlock.open(sys.argv[1])
catalog["a"].load(), catalog["a"][1:3], catalog.nbytes, catalog["b"].shape
weighlock.save(sys.argv[1] + ".copy", catalog, durable=False)
weighlock.save(sys.argv[1] + ".new", {"a": catalog["a"].load()}, durable=False)
"""
    assert loaded(run_python, script, path) == []


def test_bfloat16_needs_ml_dtypes_and_no_torch(run_python, path):
    script = "import weighlock; weighlock.open(sys.argv[1])['b'].load()"
    assert loaded(run_python, script, path) == ["ml_dtypes"]


def test_the_command_needs_no_torch(run_python, path):
    script = """
import contextlib, io
from weighlock.cli import main
sys.argv = ["weighlock", "ls", sys.argv[1]]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
"""
    assert "torch" not in loaded(run_python, script, path)
    assert "rich" not in loaded(run_python, script, path)


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("weighlock").joinpath("py.typed").is_file()


def test_errors_can_be_named_without_importing_them(run_python):
    script = """
import weighlock
assert "SourceChanged" not in dir(weighlock) and "sys" not in dir(weighlock)
try:
    weighlock.open("there is no such file")
except weighlock.errors.NotFound as error:
    assert isinstance(error, FileNotFoundError) and error.errno == 2
    assert str(error).endswith("there is no such file: cannot be opened: No such file or directory")
"""
    assert loaded(run_python, script) == []


def test_a_ref_is_an_array_for_numpy(path):
    with weighlock.open(path) as catalog:
        assert np.asarray(catalog["a"]).tolist() == [1, 1, 1, 1]
        assert np.asarray(catalog["a"], np.float64).dtype == np.float64
        assert np.add(catalog["a"], 1).tolist() == [2, 2, 2, 2]


def test_names_and_patterns_are_texts(path):
    with weighlock.open(path) as catalog:
        with pytest.raises(TypeError, match=r"\['a'\]"):
            catalog.only("a")
        with pytest.raises(TypeError, match="a pattern is a text, not int"):
            catalog.select(5)


USER = """
import numpy as np

import weighlock
from weighlock import Inbox, LoadReport, Receiver, Share, SlicedArray, Source, TensorSpec

spec = TensorSpec("decoder.weight", "torch.bfloat16", [4096, 1024])
width: int = spec.shape[0]


def look(share: Share, inbox: Inbox, source: Source) -> tuple[Receiver, Receiver]:
    with weighlock.open(source) as catalog:
        rows: SlicedArray = catalog["w"][1:2]
        report: LoadReport = catalog.load_into({"w": np.zeros(rows.shape)})
        print(report.missing, catalog["w"].ndim + catalog["w"].size)
    weighlock.Catalog.of({"w": np.zeros(2)}).torch()
    return share.receivers["a"], inbox.senders["a"]
"""


def test_a_users_program_is_typed_as_it_behaves(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
