"""The ``umem`` command as a whole: help, versions, and what starting it costs."""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import processes
import pytest
from click.testing import CliRunner

import umem
from umem.cli import HEADINGS, main
from umem.cli.run_resume import parsed

ROOT = Path(umem.__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return processes.python(*arguments, cwd=ROOT, COLUMNS="80", NO_COLOR="1")


# -- help --------------------------------------------------------------------------------------


HELP = """
import json, sys
from click.testing import CliRunner
from umem.cli import COMMANDS, main
asked = [[sys.argv[1]], *([name, sys.argv[1]] for name in COMMANDS)]
print(json.dumps([CliRunner().invoke(main, words).stdout for words in asked]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_everything_has_help_that_fits_a_terminal(option: str) -> None:
    # a process for each: click keeps the names of the option from the first call
    texts = json.loads(python("-c", HELP, option).stdout)
    assert len(texts) > 10
    for text in texts:
        assert text.startswith("Usage: ")
        assert len(text.splitlines()) > 4
        assert max(map(len, text.splitlines())) <= 80


def test_the_group_lists_every_command_under_a_wish_with_a_whole_sentence() -> None:
    text = python("-m", "umem", "--help").stdout
    for heading, names in HEADINGS.items():
        listed = text.split(f"\n{heading}:\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == list(names)
        assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def commands_below(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all below it, each with what to type."""
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            own = click.Context(below, info_name=name, parent=context)
            yield from commands_below(below, own)


ALL = dict(commands_below(main, click.Context(main, info_name="umem")))


def examples_of(command: click.Command) -> list[list[str]]:
    """Return the lines of the examples in a command's help: of each its comment and its command."""
    lines = inspect.cleandoc(command.help or "").split("Examples:\n\n\b\n")[1].split("\n\n")[0]
    found = [line.strip() for line in lines.splitlines()]
    return [found[at : at + 2] for at in range(0, len(found), 2)]


@pytest.mark.parametrize("path", ALL)
def test_help_has_two_examples_that_parse(path: str) -> None:
    examples = examples_of(ALL[path])
    assert len(examples) == 2
    for comment, line in examples:
        assert comment.startswith("# ") and len(line) <= 72
        words = [word for word in shlex.split(line) if not word.startswith("XDG_CACHE_HOME=")]
        assert " ".join(words).startswith(path)
        context: click.Context = click.Context(main, info_name="umem")
        command: click.Command | None = main
        rest = words[1:]
        while isinstance(command, click.Group):
            _, command, rest = command.resolve_command(context, rest)
        assert command is not None
        command.make_context(command.name, rest, parent=context)


def test_help_shows_examples_before_options_line_by_line() -> None:
    text = python("-m", "umem", "run", "--help").stdout
    assert text.index("Examples:\n\n      # Run train.py in unified memory\n      umem") < (
        text.index("\nMemory:\n")
    )


def test_each_option_of_run_is_under_one_heading() -> None:
    command = ALL["umem run"]
    headed = [name for names in command.headings.values() for name in names]
    options = {one.name for one in command.params if isinstance(one, click.Option)}
    assert len(set(headed)) == len(headed)
    assert options - set(headed) == {"traceback", "module", "technique"}
    assert not set(headed) - options


@pytest.mark.parametrize("path", ALL)
def test_an_option_says_what_it_does(path: str) -> None:
    for option in ALL[path].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help and option.help[0].isupper(), option.opts
            assert option.help.endswith((".", ")")), option.opts


def test_the_module_is_the_command() -> None:
    result = python("-m", "umem", "--version")
    assert (result.returncode, result.stdout) == (0, f"umem, version {umem.__version__}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dmeo", "No such command 'dmeo'. Did you mean 'demo'?"),
        ("train.py", "No such command 'train.py'. To run a program: umem run SCRIPT."),
        ("kernels lits", "No such command 'lits'. Did you mean 'list'?"),
        ("graph cutt a b", "No such command 'cutt'. Did you mean 'cut'?"),
        ("run --limt 3GiB a.py --limt 4", "No such option '--limt'. Did you mean '--limit'?"),
        ("run --dry-step=2 a.py", "No such option '--dry-step'."),
        ("choose --gqu t4 a.py", "No such option '--gqu'. Did you mean '--gpu'?"),
        ("run --mode managd a.py", "Did you mean 'managed'?"),
        ("run --dry t4 --writes scrtch FILE", "Did you mean 'scratch'?"),
        ("replay FILE --mode hybird", "Did you mean 'hybrid'?"),
        ("report FILE --export perfeto out", "Did you mean 'perfetto'?"),
        ("choose a.onnx --optimizer adma", "Did you mean 'adam'?"),
        ("kernels warm --dtype flaot32", "Did you mean 'float32'?"),
        ("demo --device virtul:t4", "Did you mean 'virtual'?"),
        ("doctor --device virtul:t4", "Did you mean 'virtual'?"),
        ("doctor --device virtual:t44", "did you mean t4"),
        ("run --software t44 FILE", "did you mean t4"),
        ("run --dry v10016gb FILE", "did you mean v100-16gb"),
        ("choose --gpu a10040gb FILE", "did you mean a100-40gb"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(line: str, message: str) -> None:
    words = [__file__ if word == "FILE" else word for word in line.split()]
    result = CliRunner().invoke(main, words)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())


def test_a_misspelt_key_of_an_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(click.BadParameter, match=r"unknown key 'evry'.* Did you mean 'every'\?"):
        parsed("evry=1")


def test_options_after_the_script_are_its_own() -> None:
    command = ALL["umem run"]
    context = command.make_context("run", ["--mode", "managed", "a.py", "--limt", "3", "--mode"])
    assert context.params["arguments"] == ("--limt", "3", "--mode")


def test_help_loads_neither_chainer_nor_cupy() -> None:
    code = (
        "import sys; sys.argv = ['umem', 'demo', '--help']\n"
        "from umem.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([n for n in ('chainer', 'cupy', 'scipy') if n in sys.modules])"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


# -- what starting costs ------------------------------------------------------------------------

STANDARD = (
    "contextlib, contextvars, dataclasses, functools, gc, inspect, os, re, shlex, textwrap, "
    "threading, types, typing"
)
OWN = (
    "umem umem._common umem._common.faces umem._common.locks umem._common.scopes "
    "umem._common.stacks umem.devices umem.devices.base umem.devices.blocks_of_memory "
    "umem.devices.cuda_source umem.devices.open umem.devices.presets umem.errors umem.memory "
    "umem.memory.current_status umem.memory.environment umem.memory.hints umem.memory.limits "
    "umem.memory.mode_blocks umem.memory.process umem.trace umem.trace.frameworks "
    "umem.trace.recording umem.trace.recording.sources umem.units"
)


def test_importing_umem_loads_these_modules_and_no_other() -> None:
    code = (
        f"import sys, numpy, __future__, {STANDARD}; before = set(sys.modules); import umem; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert python("-c", code).stdout.split() == OWN.split()


def test_a_name_that_is_loaded_later_is_there_as_any_other() -> None:
    code = (
        "import umem; assert set(umem.__all__) <= set(dir(umem))\n"
        "from umem import *; print(Trace.__name__, record.__name__, replay is umem.replay)\n"
        "umem.nothing"
    )
    done = python("-c", code)
    assert done.stdout == "Trace record True\n"
    assert "AttributeError: module 'umem' has no attribute 'nothing'" in done.stderr
