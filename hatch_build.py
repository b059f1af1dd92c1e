"""Compiles the arithmetic of means when the package is built or installed, if there is a compiler.

Without one the package is made all the same, and numpy does it. HATCH_BUILD_NO_HOOKS=true leaves
this out and gives a wheel for every machine.
"""

import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "weighlock/combining"
LIBRARY = "_compiled.so"

FLAGS = [
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",  # or machines that multiply and add in one step come to other last bits
    "-fno-trapping-math",  # nobody looks at floating-point flags; F16 takes a quarter of the time
]

# Compilers that cannot make one copy for each generation of processors make one for all.
VARIANTS = [[], ["-DONE_COPY"]]

PATIENCE_S = 120


class CompiledMeans(BuildHookInterface):
    """Puts the library into a wheel; for an editable install, beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; called before a wheel or an editable install is made."""
        source = Path(self.root, "src", PLACE, "compiled.c")
        is_editable = version == "editable"
        place = source.parent if is_editable else Path(tempfile.mkdtemp(prefix="weighlock-build-"))
        self._made = None if is_editable else place / LIBRARY
        failure = _first_failure(source, place / LIBRARY)
        if failure is not None:
            self.app.display_warning(f"means were not compiled, numpy will make them: {failure}")
            return
        if self._made is not None:
            build_data["force_include"][os.fspath(self._made)] = f"{PLACE}/{LIBRARY}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_machine()}"  # it knows no version of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel; called when that is made."""
        if self._made is not None:
            self._made.unlink(missing_ok=True)
            self._made.parent.rmdir()


def _machine() -> str:
    """For which machines the library is; of a Python for two, a compiler makes it for this one."""
    found = sysconfig.get_platform().replace("universal2", platform.machine())
    return found.replace("-", "_").replace(".", "_")


def _first_failure(source: Path, library: Path) -> str | None:
    """Compile with the first compiler that can; None if one could."""
    failures = []
    for command in _commands():
        try:
            _compile(command, source, library)
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(str(getattr(error, "stderr", None) or error).strip())
        else:
            return None
    return failures[0]


def _commands() -> Iterator[list[str]]:
    """Compilers to try, the one that was asked for or that Python was made with first."""
    asked = os.environ.get("CC")
    known = [asked] if asked else [sysconfig.get_config_var("CC") or "cc", "cc"]
    for compiler in dict.fromkeys(known):
        for variant in VARIANTS:
            yield [*shlex.split(compiler), *FLAGS, *variant]


def _compile(command: list[str], source: Path, library: Path) -> None:
    made = library.with_name(f"{library.name}.{os.getpid()}")
    built_from = f"-DBUILT_FROM={zlib.crc32(source.read_bytes())}u"
    whole = [*command, built_from, os.fspath(source), "-o", os.fspath(made)]
    try:
        subprocess.run(
            whole, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S
        )
        made.replace(library)  # at once: another process may have it loaded
    finally:
        made.unlink(missing_ok=True)
