"""The environment of the peers: made once, apart from the one the tests use."""

import os
import subprocess
import sys
import venv

__all__ = ["enter"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(_HERE)
_COMPILED = ("../hatch_build.py", "../src/weighlock/combining/compiled.c")
"""Installing compiles: if these change, it is done again."""

_PLACE = os.path.join(_ROOT, ".bench-venv")


def enter():
    """Continue in the peers' environment, after making it if need be."""
    python = os.path.join(_PLACE, "bin", "python")
    if os.path.realpath(sys.prefix) == os.path.realpath(_PLACE):
        return
    wanted = _read("requirements.txt") + _read("requirements-bare.txt")
    wanted += "".join(map(_read, _COMPILED))
    marker = os.path.join(_PLACE, "installed")
    if _installed(marker) != wanted:
        print(f"making {os.path.relpath(_PLACE)} for the peers; this takes a few minutes once")
        venv.create(_PLACE, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", _path("requirements.txt")], check=True)
        # Packages of which one module is wanted and whose dependencies would take gigabytes.
        subprocess.run(
            [*pip, "--no-deps", "--requirement", _path("requirements-bare.txt")], check=True
        )
        subprocess.run([*pip, "--editable", _ROOT], check=True)
        with open(marker, "w") as file:
            file.write(wanted)
    # The peers were compiled when pip installed them, an editable package is not; with
    # PYTHONDONTWRITEBYTECODE every measured process would compile it anew.
    subprocess.run([python, "-m", "compileall", "-q", os.path.join(_ROOT, "src")], check=True)
    os.execv(python, [python, "-m", "benchmarks", *sys.argv[1:]])


def _installed(marker):
    try:
        with open(marker) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _path(name):
    return os.path.join(_HERE, name)


def _read(name):
    with open(_path(name)) as file:
        return file.read()
