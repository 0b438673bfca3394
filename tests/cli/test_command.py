"""The ``umem`` command as a whole: help, versions, and what starting it costs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import processes
import pytest
from click.testing import CliRunner

import umem
from umem.cli import COMMANDS, main

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


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_everything_has_help_that_fits_a_terminal(option: str) -> None:
    # a process for each: click keeps the names of the option from the first call
    texts = json.loads(python("-c", HELP, option).stdout)
    assert len(texts) == 1 + len(COMMANDS)
    for text in texts:
        assert text.startswith("Usage: ")
        assert len(text.splitlines()) > 4
        assert max(map(len, text.splitlines())) <= 80


def test_the_group_lists_every_command_with_a_sentence() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    listed = text[text.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(len(line.split()) > 3 for line in listed)


def test_the_module_is_the_command() -> None:
    result = python("-m", "umem", "--version")
    assert (result.returncode, result.stdout) == (0, f"umem, version {umem.__version__}\n")


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.output


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
