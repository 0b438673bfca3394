"""How many of other projects' own GPU tests pass on the software GPU?

Each project of `client_projects.py` has an environment of its own with its version, CuPy's, and
this umem; `--venvs` is the folder of these, outside of the repository, and they are made where they
are not there. Tests that no wheel has are run from checkouts, which are subfolders of `--tests`.
Of the cases for a GPU a sample is drawn. Those of `clients_left_out.txt` are left out, with a
reason each, which lies with the project, with CuPy or with the machine. The others run in
processes of their own, some hundred cases each, under a limit of memory and of time; one that ends
its process has failed, and died. Cases that a project skips itself count as neither. Those that did
something on the GPU are counted apart. A result that is there keeps the rows of projects that were
not asked for; each row names its commits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_path
import click
import common
import foreign_tests
from client_projects import CLIENTS, COMMON_REQUIREMENTS, Client
from report_tables import counted, listed, percent, quantity, text

WANTED_SHARE, MOST_LEFT_OUT = 0.995, 0.01
LEFT_OUT = bench_path.HERE / "clients_left_out.txt"
QUICK_SAMPLE = 20


# -- where a client is ---------------------------------------------------------------------------


def environment(client: Client, folder: Path) -> str:
    """Return the interpreter of a client's environment, with this checkout of umem in it.

    It is made where it is not there, or where it has the umem of another checkout.

    Raises:
        click.ClickException: something cannot be installed.
    """
    python = folder / "bin" / "python"
    wanted = requirements(client)
    ready, state = folder / "ready.json", [*wanted, str(bench_path.ROOT)]
    if not ready.exists() or json.loads(ready.read_text("utf-8")) != state:
        click.echo(f"installing {client.name} into {folder}", err=True)
        _done([sys.executable, "-m", "venv", str(folder)])
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _done([*install, *wanted])
        _done([*install, "-e", str(bench_path.ROOT)])
        ready.write_text(json.dumps(state), "utf-8")
    return str(python)


def requirements(client: Client) -> list[str]:
    """List what an environment needs; a client's own version of a package goes before ours."""
    own = {requirement.partition("==")[0] for requirement in client.requires}
    ours = (one for one in COMMON_REQUIREMENTS if one.partition("==")[0] not in own)
    return [*ours, *client.requires]


def _done(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return done.stdout


def root_of(client: Client, python: str, tests: Path | None) -> Path:
    """Return the folder from which a client's cases are named.

    A project that is imported from its checkout is put on the path of its environment.

    Raises:
        click.ClickException: its checkout is not there, or is at another commit than was pinned.
    """
    where = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    packages = Path(_done([python, "-c", where]))
    if client.is_ours:
        return bench_path.HERE / client.root
    if client.checkout is None:
        return packages
    name, commit = client.checkout
    if tests is None or not (tests / name).is_dir():
        raise click.ClickException(f"{client.name}: --tests needs a checkout {name} at {commit}")
    found = _done(["git", "-C", str(tests / name), "rev-parse", "HEAD"]).strip()
    if not found.startswith(commit):
        raise click.ClickException(f"{client.name}: {name} is at {found}, not at {commit}")
    if client.source is not None:
        (packages / "client_source.pth").write_text(f"{tests / client.source}\n", "utf-8")
    return tests / name / client.root


def installed(python: str) -> dict[str, str]:
    """Versions of all that is installed there."""
    packages = json.loads(_done([python, "-m", "pip", "list", "--format=json"]))
    return {package["name"]: package["version"] for package in packages}


# -- its cases -----------------------------------------------------------------------------------


def left_out(client: Client) -> Iterator[str]:
    """The lines of the list that are a client's, as `foreign_tests.reasons` reads them."""
    for line in LEFT_OUT.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition("|")
        if name.strip() == client.name and not line.startswith("#"):
            yield rest.strip()


def examined(
    client: Client,
    python: str,
    root: Path,
    *,
    tests: Path | None,
    gpu: str,
    kept: Path,
    devices: int = 1,
    **how: Any,
) -> dict[str, Any]:
    """Run cases of a client; return its row.

    Args:
        client: the project.
        python: the interpreter of its environment.
        root: where its cases are named from.
        tests: the folder of checkouts.
        gpu: a value of UMEM_SOFTWARE_GPU.
        kept: a folder of what was found before, to which is added.
        devices: how many GPUs there are.
        how: as of `foreign_tests.examine`.
    """
    left, used, lines = (kept / f"{client.name}.{kind}" for kind in ("list", "used", "jsonl"))
    left.write_text("\n".join(left_out(client)), encoding="utf-8")
    suite = foreign_tests.Suite(
        root,
        client.paths,
        gpu,
        left,
        options=["-p", "gpu_use", *(option.format(tests=tests) for option in client.options)],
        environment={**client.environment, "GPU_USE_FILE": str(used)},
        devices=devices,
        python=python,
    )
    found = foreign_tests.examine(suite, depth=1, kept=lines, **how)
    names = set(used.read_text(encoding="utf-8").splitlines()) if used.exists() else set()
    reasons = foreign_tests.reasons(left)
    on_gpu = [name for name in names if foreign_tests.reason_of(name, (), reasons) is None]
    ends = (line["outcome"] for line in foreign_tests.read_kept(lines, on_gpu))
    used_count = sum(end in ("passed", "failed") for end in ends)
    return {**row_of(client, found), "used_count": used_count}


def row_of(client: Client, found: dict[str, Any]) -> dict[str, Any]:
    """Make a client's row of what `foreign_tests.examine` found."""
    failures = found["failures"]
    return {
        **found["rows"][-1],
        "name": client.name,
        "all_count": found["all_count"],
        "died_count": sum(": signal" in said for said in failures.values()),
        "requires": requirements(client),
        "checkout": client.checkout,
        "left_out_by_reason": found["left_out_by_reason"],
        "skipped_by_reason": found["skipped_by_reason"],
        "commits": found["commits"],
        "failures": failures,
    }


# -- all of them ---------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    rows = result["rows"]
    passed, failed = (sum(row[f"{end}_count"] for row in rows) for end in ("passed", "failed"))
    wanted = [row["name"] for row in rows if (row["passed_share"] or 0) < WANTED_SHARE]
    large = (
        row["name"] for row in rows if row["left_out_count"] > MOST_LEFT_OUT * row["all_count"]
    )
    more = listed([*large] or ["none"])
    checked = all("checked" in row["gpu"] for row in rows)
    return ("In checked mode: " if checked else "") + (
        f"{passed:,} of {passed + failed:,} that ran, of {len(rows)} projects; "
        f"{percent(WANTED_SHARE)} of each are wanted, which {len(rows) - len(wanted)} reach; "
        f"{sum(row['died_count'] for row in rows):,} processes died; more than "
        f"{percent(MOST_LEFT_OUT)} of the cases are left out of {more}."
    )


def notes(result: common.Result) -> Iterator[str]:
    for row in result["rows"]:
        reasons = "; ".join(f"{why} {count:,}" for why, count in row["left_out_by_reason"].items())
        if reasons:
            yield f"{row['name']} left out: {reasons}"
        if row["failures"]:
            yield f"{row['name']} failed: {', '.join(sorted(row['failures'])[:20])}"


BENCH = common.Bench(
    "clients",
    __doc__,
    answer,
    (
        text("project", "name"),
        counted("GPU cases", "all_count"),
        counted("left out", "left_out_count"),
        counted("not run", "not_run_count"),
        counted("skipped by it", "skipped_count"),
        counted("passed", "passed_count"),
        counted("failed", "failed_count"),
        counted("died", "died_count"),
        counted("used the GPU", "used_count"),
        quantity("passed", lambda row: row["passed_share"], "%", per=0.01),
    ),
    notes=notes,
)


@click.command(help=__doc__)
@click.option("--client", "names", multiple=True, type=click.Choice(list(CLIENTS)))
@click.option("--venvs", type=click.Path(path_type=Path), required=True, help="Environments.")
@click.option("--tests", type=click.Path(path_type=Path, exists=True), help="Checkouts.")
@click.option("--gpu", default="h100-sxm", show_default=True, help="As UMEM_SOFTWARE_GPU has it.")
@click.option("--quick", is_flag=True, help=f"At most {QUICK_SAMPLE} cases a project.")
@foreign_tests.options
def main(
    names: tuple[str, ...],
    venvs: Path,
    tests: Path | None,
    gpu: str,
    quick: bool,
    path: Path | None,
    kept: Path | None,
    devices: int,
    **how: Any,
) -> None:
    common.writable(path)
    if quick:
        how["sample"] = QUICK_SAMPLE
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (kept or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        for name in names or CLIENTS:
            client = CLIENTS[name]
            python = environment(client, venvs.resolve() / name)
            here = tests and tests.resolve()
            root = root_of(client, python, here)
            where = {"tests": here, "gpu": gpu, "kept": folder, "devices": devices}
            row = examined(client, python, root, **where, **how)
            chosen = {"gpu": gpu, "sample": how["sample"], "seed": how["seed"]}
            rows.append({**row, **chosen, "versions": installed(python)})
    order = list(CLIENTS)
    rows += [row for row in rows_of(path) if row["name"] not in {one["name"] for one in rows}]
    rows.sort(key=lambda row: order.index(row["name"]))
    BENCH.finish(rows, path, simulated=True, options={"clients": [row["name"] for row in rows]})


def rows_of(path: Path | None) -> list[dict[str, Any]]:
    """Read the rows of a result, to which others are added; none where there is no file."""
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


if __name__ == "__main__":
    main()
