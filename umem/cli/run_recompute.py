"""``umem run`` with --recompute or --workspace: a script that takes less memory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import click

from umem._common.extras import command
from umem._common.nearest import did_you_mean
from umem.cli.files_and_sizes import say
from umem.compat import find_package
from umem.errors import UmemError


class RecomputeOptions:
    """Turns a memory budget and a workspace cap on around a script.

    Args:
        budget: as `umem.chainer.Recompute` takes it, or None.
        workspace: as `umem.chainer.workspace` takes it, or None.

    Raises:
        click.ClickException: Chainer is missing, or one of the two is no size.
    """

    def __init__(self, budget: str | None, workspace: str | None) -> None:
        self._budget = budget
        self._cap: Any = None
        self._memory: Any = None
        if budget is None and workspace is None:
            return
        if find_package() is None:
            raise click.ClickException(
                f"--recompute and --workspace need Chainer, which is not installed; "
                f"{command('chainer')}"
            )
        import umem.chainer

        if workspace is not None:
            self._cap = _made("--workspace", umem.chainer.workspace, workspace)
        if budget is not None:
            self._memory = _made("--recompute", umem.chainer.Recompute, budget, "card", "min")

    def begin(self, stack: ExitStack) -> None:
        """Turn budget and cap on until the stack unwinds, which prints the result.

        The cap is the process's: it holds in the script's threads as well.
        """
        if self._memory is not None:
            stack.callback(self._report, os.getpid())
        if self._cap is not None:
            self._cap.enable()
            stack.callback(self._cap.disable)
        if self._memory is not None:
            stack.enter_context(self._memory)

    def _report(self, process: int) -> None:
        if os.getpid() == process:  # no child by fork that came to the end of the script
            say(f"umem: --recompute {self._budget}: {self._memory.summary()}", err=True)


def _made(option: str, make: Any, size: str, *names: str) -> Any:
    try:
        return make(size)
    except UmemError as error:
        hint = did_you_mean(size, names)
        message = f"{error}{hint and '.'}{hint}"
        raise click.BadParameter(message, param_hint=option) from error
