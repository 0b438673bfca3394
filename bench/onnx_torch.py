"""Does a model that PyTorch exported say what PyTorch keeps for its backward?

Nine networks of eight architectures, by both exporters: the one that traces, at opset 13 and 17,
and that of torch.export at 18, its lowest, optimised and as it is written. Compared with PyTorch's
own saved tensors in training mode (`torch.autograd.graph.saved_tensors_hooks`, each storage once,
without parameters and buffers) is what backward of the file's step reads. Needs torch and
onnxscript, which umem does not: PYTHONPATH may lead to where they are.

Index types differ by design and are counted apart: PyTorch keeps the indexes of a max pooling in 8
bytes, the step in 4, as CuPy has them, and words are an input of 8 bytes in both. By design too,
PyTorch keeps the input of a pooling, which Chainer does not: where nothing else keeps it, the file
says less. The optimised export of torch.export folds batch normalisations into convolutions, even
of a network in training mode: such a file is of another network, and is not compared.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import common
import onnx
from report_tables import Row, Table, percent, quantity, text

from umem.trace import Alloc, Trace
from umem.trace.exported import onnx_step
from umem.units import KIB, MIB

SAVED = 0.03
"""The target: at most so far apart."""
EXPORTERS = ("traced, opset 13", "traced, opset 17", "torch.export", "torch.export, as written")
QUICK = ("VGG", "ConvNeXt, LayerNorm")


# -- what PyTorch keeps ----------------------------------------------------------------------------


def saved_by_torch(model: Any, x: Any) -> dict[str, int]:
    """Bytes of the storages that autograd keeps, by whether they hold floating-point numbers."""
    import torch

    own = [*model.parameters(), *model.buffers()]
    excluded = {tensor.untyped_storage().data_ptr() for tensor in own}
    held: dict[int, Any] = {}  # alive meanwhile, so that no address comes twice

    def keep(tensor: Any) -> Any:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    found = {"floats": 0, "indexes": 0}
    for address, tensor in held.items():
        if address not in excluded:
            kind = "floats" if tensor.is_floating_point() else "indexes"
            found[kind] += tensor.untyped_storage().nbytes()
    del y
    return found


# -- what the file says ----------------------------------------------------------------------------


def exported(model: Any, x: Any, exporter: str, path: Path) -> None:
    import torch

    options: dict[str, Any] = {"opset_version": 18, "dynamo": True}
    if exporter.startswith("traced"):
        training = torch.onnx.TrainingMode.TRAINING
        options = {"opset_version": int(exporter.split()[-1]), "dynamo": False}
        options |= {"training": training, "do_constant_folding": False}
    elif exporter.endswith("as written"):
        options["optimize"] = False
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), **options)


def saved_by_step(trace: Trace, indexes: set[str]) -> dict[str, int]:
    """Bytes of what backward reads, beside parameters, state and gradients.

    Args:
        indexes: names of inputs of whole numbers.
    """
    made = {event.tensor: event for event in trace.events if isinstance(event, Alloc)}
    read = {access.tensor for op in trace.ops if op.phase == "backward" for access in op.reads}
    found = {"floats": 0, "indexes": 0}
    for tensor in read:
        alloc = made[tensor]
        if alloc.kind in ("activation", "stash", "input"):
            is_index = alloc.label.endswith(".indexes") or alloc.label in indexes
            found["indexes" if is_index else "floats"] += alloc.nbytes
    return found


def row_of(name: str, exporter: str, folder: Path) -> Row:
    import torch
    from onnx_parts.torch_models import ARCHITECTURES

    torch.manual_seed(0)
    build, given = ARCHITECTURES[name]
    model, x = build().train(), given()
    theirs = saved_by_torch(model, x)
    path = folder / "model.onnx"
    exported(model, x, exporter, path)
    row: dict[str, Any] = {"network": name, "exporter": exporter}
    row |= {f"torch_{kind}_bytes": nbytes for kind, nbytes in theirs.items()}
    model_proto = onnx.load(path)
    norms = sum(isinstance(part, torch.nn.BatchNorm2d) for part in model.modules())
    found = sum(node.op_type == "BatchNormalization" for node in model_proto.graph.node)
    row["folded"] = norms > found
    indexes = {
        value.name
        for value in model_proto.graph.input
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64
    }
    ours = saved_by_step(onnx_step(path).trace, indexes)
    return {**row, **{f"file_{kind}_bytes": nbytes for kind, nbytes in ours.items()}}


# -- what is said ----------------------------------------------------------------------------------


def with_ratio(row: Row) -> dict[str, Any]:
    return {**row, "saved": row["file_floats_bytes"] / row["torch_floats_bytes"] - 1}


def tables(result: common.Result) -> Iterable[Table]:
    columns = [
        text("network", "network"),
        text("exporter", "exporter"),
        quantity("saved by PyTorch", "torch_floats_bytes", "MiB", per=MIB),
        quantity("from the file", "file_floats_bytes", "MiB", per=MIB),
        text("apart", lambda row: "folded" if row["folded"] else percent(row["saved"], True)),
        quantity("indexes, PyTorch", "torch_indexes_bytes", "KiB", per=KIB),
        quantity("from the file", "file_indexes_bytes", "KiB", per=KIB),
    ]
    yield Table(columns, list(map(with_ratio, result["rows"])))


def answer(result: common.Result) -> str:
    rows = list(map(with_ratio, result["rows"]))
    compared = [row for row in rows if not row["folded"]]
    near = [row for row in compared if abs(row["saved"]) <= SAVED]
    worst = max(compared, key=lambda row: abs(row["saved"]))
    networks = {row["network"] for row in rows}
    whole = networks - {row["network"] for row in compared if row not in near}
    total = sum(row["torch_floats_bytes"] for row in compared) / MIB
    return (
        f"Of {len(networks)} networks {len(whole)} keep what PyTorch saves within {percent(SAVED)} "
        f"by every exporter, in {len(near)} of {len(compared)} files of {total:.4g} MiB in all; at "
        f"worst {percent(worst['saved'], True)} for the {worst['network']}, {worst['exporter']}; "
        f"in {len(rows) - len(compared)} files the exporter had folded batch normalisation away."
    )


def notes(result: common.Result) -> Iterable[str]:
    yield f"Compared with {', '.join(' '.join(pair) for pair in result['frameworks'].items())}."


BENCH = common.Bench("onnx_torch", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two networks.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    try:
        import onnxscript
        import torch
    except ImportError as error:
        raise click.ClickException(f"needs torch and onnxscript: {error}") from error
    from onnx_parts.torch_models import ARCHITECTURES

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in QUICK if quick else ARCHITECTURES:
            for exporter in EXPORTERS:
                rows.append(row_of(name, exporter, Path(folder)))
    versions = {"torch": torch.__version__, "onnxscript": onnxscript.__version__}
    BENCH.finish(rows, path, simulated=True, options={"quick": quick}, frameworks=versions)


if __name__ == "__main__":
    main()
