"""The house: imports flow down the folders, names are said once, and no file is long."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import umem

ROOT = Path(umem.__file__).parent
LOOSE = ("errors", "units")
"""Modules that lie at the top of umem/, beside `__init__` and `__main__`."""
COMMON = "_common"
"""What every room may import, and imports none."""
FOLDERS = (
    "trace", "dry", "devices", "planner", "memory", "predict", "reports", "onnx", "chainer",
    "choosing", "cli",
)  # fmt: skip
"""From the ground up: a folder imports `_common`, the loose modules, itself and what is before."""
CUDA_ON_HOST = "host_cuda"
"""It imports `_common` and loose modules only: no trace, no model, no recorder. It stands below
devices, cli and choosing."""
STARTER = "umem_software_gpu"
"""A package beside umem."""
EDGES = ("onnx",)
"""Folders that only cli imports."""
FACES = ("dask",)
"""Modules at the top for another framework, on memory and what is below; nobody imports them."""
ANNEXES = ("compat", "data", "graphs", "launch", "snapshots")
"""They import `_common` and loose modules only, and only chainer and cli import them."""
CUDA = ("cupy", "cupyx", "cupy_backends", "cuda")
LONGEST = 600
PARALLEL = {"devices/cuda", "devices/virtual", "host_cuda"}
"""Folders whose files bear the same names where they do the same."""


@cache
def modules() -> dict[str, Path]:
    """Every module of umem by its full name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported() -> dict[str, set[str]]:
    """What each module imports anywhere in it, annotations included."""
    return {name: set(_imports(path)) - {name} for name, path in modules().items()}


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else str(node.module) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield argument.value


def inside() -> dict[str, set[str]]:
    """What each module imports of umem."""
    return {m: {n for n in found if n in modules()} for m, found in imported().items()}


def part(name: str) -> str:
    """The part of umem that a module's full name belongs to; empty for umem itself."""
    return name.split(".")[1] if "." in name else ""


def refused(importer: str, module: str) -> str | None:
    """Why one module may not import another."""
    here, there = part(importer), part(module)
    ground = (*LOOSE, COMMON)
    if here in LOOSE or (here == COMMON and there not in ground):
        return None if there in LOOSE else f"{here} stands below {there}"
    if here in ("", "__main__") or there in ground or here == there:
        return None
    if there in FACES:
        return f"{there} is a face"
    if there == "":
        return (
            None
            if here in ("chainer", "choosing", "cli")
            else f"{here} stands below the public names"
        )
    if here == CUDA_ON_HOST:
        return f"{here} knows nothing of {there}"
    if there == CUDA_ON_HOST:
        return None if here in ("devices", "choosing", "cli") else f"{there} is under devices"
    if here in FACES:
        return None if there in FOLDERS[: FOLDERS.index("memory") + 1] else f"{here} is on memory"
    if here in ANNEXES:
        return f"{here} stands below {there}"
    if there in ANNEXES:
        return None if here in ("chainer", "choosing", "cli") else f"{there} is an annex"
    if there in EDGES:
        return None if here == "cli" else f"{there} is at the edge"
    if there == "__main__" or FOLDERS.index(there) > FOLDERS.index(here):
        return f"{here} stands below {there}"
    if here == "planner" and there == "devices":
        return "a planner sees no device"
    allocators = ("umem.memory.process", "umem.memory.mode_blocks", "umem.devices.virtual")
    if here == "reports" and module.startswith((*allocators, "umem.devices.cuda")):
        return "a report sees no allocator"
    return None


@pytest.mark.thorough
def test_imports_flow_down() -> None:
    wrong = [
        f"{importer} imports {module}: {why}"
        for importer, found in imported().items()
        for module in found
        if module.partition(".")[0] == "umem" and (why := refused(importer, module))
    ]
    assert not wrong


def test_only_the_devices_import_cupy() -> None:
    may = {
        "umem.chainer.gcn": {
            "cupyx.cusparse",
            "cupyx.scipy.sparse",
        }  # cuSPARSE's matrices: no allocation
    }
    wrong = [
        f"{name} imports {module}"
        for name, found in imported().items()
        for module in found - may.get(name, set())
        if module.partition(".")[0] in CUDA
        and not name.startswith(("umem.devices.cuda", "umem.devices.software", "umem.host_cuda"))
        and not name.startswith("umem.compat.")  # which mends CuPy as it is imported
    ]
    assert not wrong


def test_umem_does_not_import_the_package_that_starts_it() -> None:
    """It is imported by every Python process, and imports umem where a GPU is asked for."""
    found = {name for name, own in imported().items() for m in own if m.startswith(STARTER)}
    assert not found


def test_the_top_of_the_house_is_small() -> None:
    files = {path.stem for path in ROOT.glob("*.py")}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert files == {"__init__", "__main__", *LOOSE, *FACES}
    assert folders == {COMMON, CUDA_ON_HOST, *FOLDERS, *ANNEXES}


def test_no_file_is_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_no_two_files_bear_the_same_name() -> None:
    places = defaultdict(list)
    for path in modules().values():
        folder = str(path.relative_to(ROOT).parent)
        if path.stem != "__init__":
            places[path.stem].append("devices" if folder in PARALLEL else folder)
    assert not {stem: found for stem, found in places.items() if len(set(found)) > 1}


@pytest.mark.thorough
def test_no_two_classes_bear_the_same_name() -> None:
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = inside()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = found.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    assert not sorted(name for name in found if name in reached(name))


def test_no_public_function_is_called_as_a_module_beside_it() -> None:
    packages = [
        umem,
        *(importlib.import_module(f"umem.{name}") for name in ("chainer", "data", "graphs")),
    ]
    for package in packages:
        beside = {module.name for module in pkgutil.iter_modules(package.__path__)}
        public = {name for name, value in vars(package).items() if not inspect.ismodule(value)}
        assert not beside & (public | set(package.__all__) - {"__version__"}), package.__name__


ROOMS = (
    "trace.recording", "trace.analysis", "devices.cuda", "devices.virtual", "devices.software",
    "planner.prefetch", "chainer.layers", "chainer.optimizers",
)  # fmt: skip
"""Packages inside of a top room that other rooms may import, besides the top rooms themselves."""
OUTSIDE = ("bench", "docs", "examples", "tests")
"""Folders beside umem/ whose imports of rooms are looked at."""
TESTS_OF = {"on_chainer": "chainer", "on_onnx": "onnx"}
"""Folders of tests/ that bear another name than their room."""
INSIDES = {
    "bench/budgets.py": "chainer.recompute.graph_store",
    "bench/updates.py": "chainer.optimizers.paths",
    "tests/conformance/resume_parts/costs.py": "chainer.resume.run_state chainer.resume.saver",
    "tests/conformance/resume_parts/kills.py": "chainer.resume.saver",
    "tests/conformance/stream_programs.py":
        "chainer.offload.mover chainer.offload.offloaded_pass chainer.saved.tiers.pinned",
    "tests/devices/cuda/test_cupy_blocks.py": "trace.recording.sources",
    "tests/devices/cuda/test_modes.py": "compat.finder",
    "tests/host_cuda/test_streams.py":
        "chainer.parallel.shard_layout chainer.resume.collecting chainer.saved.tiers.pinned",
    "tests/devices/software/test_each_test.py": "host_cuda.faults",
    "tests/devices/software/test_discards.py": "host_cuda.libcuda",
    "tests/devices/software/test_workspace.py":
        "chainer.chunking.functions chainer.chunking.gpu_windows chainer.chunking.windows",
    "tests/host_cuda/test_cache.py": "devices.software.opening",
    "tests/house/test_how_to_add.py":
        "choosing.technique_rows devices.base devices.presets devices.virtual.advice "
        "reports.outputs",
    "tests/memory/test_nesting.py": "devices.cuda.install",
    "tests/memory/test_rmm_resource.py": "devices.cuda.bounds",
    "tests/on_chainer/test_kernels.py": "devices.software.cupy_source",
    "tests/support/allocators.py": "devices.cuda.install",
    "tests/support/sharded_program.py": "chainer.resume.loop_snapshots",
    "tests/test_adding.py": "planner.dispatch",
    "tests/test_fork.py": "devices.cuda.driver devices.cuda.gpus",
    "tests/test_interpreter_exit.py": "devices.cuda.driver devices.cuda.gpus",
    "tests/test_signals.py": "trace.recording.sources",
}  # fmt: skip
"""Imports of another room's modules that are left, by importer: the list may only shrink. Most are
tests that replace a function of a module, or plant a fault in it."""


def inner(importer: str, module: str) -> bool:
    """Whether a module lies in another room than the importer's, and is not its face."""
    there = part(module)
    if importer in ("__main__", there) or there in ("", COMMON, *LOOSE):
        return False
    return module.partition(".")[2] not in (there, *ROOMS)


IMPORT = re.compile(
    r"""^[ >"']*from[ ](umem[.\w]*)[ ]import[ ](\([^)]*\)|[^\n\\#]*)  # a package, names
    |   ^[ >"']*import[ ](umem[.\w]*)
    |   import_module\("(umem[.\w]*)"\)""",
    re.MULTILINE | re.VERBOSE,
)
"""An import in a program, in a page, or in a program that stands in a string."""


def beside() -> Iterator[tuple[str, str, set[str]]]:
    """Yield the files beside umem/: path, the room that they belong to if any, what they import."""
    for path in (path for folder in OUTSIDE for path in (ROOT.parent / folder).rglob("*")):
        if path.suffix not in (".py", ".md") or path == Path(__file__):
            continue
        found: set[str] = set()
        for package, names, *whole in IMPORT.findall(path.read_text("utf-8")):
            full = {f"{package}.{name}" for name in re.findall(r"\w+", names)}
            found |= (full & modules().keys()) or {package, *whole}
        top, *folders = path.relative_to(ROOT.parent).parts
        room = folders[0] if top == "tests" else ""
        name = "/".join((top, *folders))
        yield name, TESTS_OF.get(room, room), found & modules().keys()


def test_rooms_import_each_others_faces() -> None:
    found = [(name, part(name), own) for name, own in inside().items()]
    left = {
        name: " ".join(sorted(m.partition(".")[2] for m in own if inner(room, m)))
        for name, room, own in (*found, *beside())
    }
    assert {name: words for name, words in left.items() if words} == INSIDES


@pytest.mark.parametrize(
    "name", [name for name in modules() if "import face" in modules()[name].read_text("utf-8")]
)
def test_a_face_is_the_same_for_who_checks_types_and_who_runs(name: str) -> None:
    tree = ast.parse(modules()[name].read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    typed = {(str(node.module), alias.name) for node in imports for alias in node.names}
    (call,) = (
        node
        for one in block.orelse
        for node in ast.walk(one)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "face"
    )
    loaded = {
        (f"{name}.{str(places.arg).replace('__', '.')}", word)
        for places in call.keywords
        for word in ast.literal_eval(places.value).split()
    }
    for packages in call.args[1:]:
        loaded |= {(name, word) for word in ast.literal_eval(packages).split()}
    assert typed == loaded
    room = importlib.import_module(name)
    for module, word in loaded:
        assert inspect.ismodule(getattr(room, word)) is (module == name)
    with pytest.raises(AttributeError, match="has no attribute 'not_there'"):
        room.not_there  # noqa: B018
