"""The arrows of the design: who may import whom, and who may do what. Reads the source only."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "weighlock"
MODULES = sorted(SOURCE.rglob("*.py"))

# A package may import only those with a lower number; `sharing` and `fetching` are strangers.
LAYERS = {
    "cli": 7,
    "torch": 7,
    "sharing": 6,
    "fetching": 6,
    "combining": 6,
    "transfer": 5,
    "messages": 5,
    "formats": 4,
    "sources": 3,
    "disk": 3,
    "tensors": 2,
    "limits": 1,
    "abort": 1,
    "lifetimes": 1,
    "joining": 1,
    "per_process": 1,
    "errors": 0,
}

# Values and planning know neither disk nor clock: those are given to them.
PURE = ("tensors/", "messages/", "transfer/layout.py", "sharing/share.py", "fetching/plan.py")
IMPURE_MODULES = {"socket", "os", "time", "threading", "shutil", "tempfile", "subprocess"}


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


def package_of(path):
    return name_of(path).split("/")[0].removesuffix(".py")


def imports_of(tree):
    """Every module named in an import, wherever it stands, except for type checking only."""
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            hidden.update(id(child) for part in node.body for child in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            if node.module == "weighlock" or node.module.count(".") == 1:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def when_imported(tree):
    """The statements that run when a module is imported: none in functions or for checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            is_for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from () if is_for_checkers else when_imported(node)


def called_attributes(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func)


@pytest.fixture(params=MODULES, ids=name_of)
def module(request):
    return request.param, ast.parse(request.param.read_text())


def test_imports_point_one_way(module):
    path, tree = module
    here = package_of(path)
    if here not in LAYERS:  # the shop window and `python -m`
        return
    for name in imports_of(tree):
        parts = name.split(".")
        if parts[0] != "weighlock" or len(parts) == 1:
            continue
        there = parts[1]
        if there in LAYERS and there != here:
            assert LAYERS[there] < LAYERS[here], f"{here} imports {name}"


def test_values_and_planning_touch_neither_disk_nor_clock(module):
    path, tree = module
    if name_of(path).startswith(PURE):
        roots = {name.split(".")[0] for name in imports_of(tree)}
        assert not roots & IMPURE_MODULES


# One knows tensors; the other the plans by which torch's own loader asks for parts of them.
KNOW_TORCH = ("tensors/torch.py", "torch/dcp.py")


def test_two_modules_import_torch_and_only_when_called(module):
    path, tree = module
    if name_of(path) in KNOW_TORCH:
        tree = ast.Module(list(when_imported(tree)), [])
    assert not [name for name in imports_of(tree) if name.split(".")[0] == "torch"]


def test_only_the_disk_layer_renames_syncs_and_deletes(module):
    path, tree = module
    calls = set(called_attributes(tree))
    effects = {f"os.{name}" for name in ("rename", "replace", "fsync", "link", "unlink", "rmdir")}
    if name_of(path) != "disk/effects.py":
        assert not calls & effects
    allowed = ("atomic", "directory", "place", "resumable")
    if name_of(path) not in [f"disk/{name}.py" for name in allowed]:
        assert not [call for call in calls if call.endswith(("disk.rename", "disk.sync"))]
    assert "shutil.rmtree" not in calls  # it follows what it finds; ours are flat directories
    if name_of(path) not in ("disk/directory.py", "disk/spool.py"):
        assert not [call for call in calls if call.endswith("remove_directory")]


def test_no_module_is_too_long(module):
    path, _ = module
    assert len(path.read_text().splitlines()) <= 400


def test_every_module_says_what_it_knows(module):
    _, tree = module
    assert ast.get_docstring(tree)


def test_nothing_maps_files(module):
    """A file truncated under a mapping kills the process; see docs/guarantees.md."""
    path, tree = module
    if name_of(path) != "tensors/arrays.py":
        assert "mmap" not in set(imports_of(tree))
    assert "np.memmap" not in set(called_attributes(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    maps = [call for call in calls if ast.unparse(call.func).endswith("mmap")]
    assert all(ast.unparse(call.args[0]) == "-1" for call in maps)  # memory, and no file
