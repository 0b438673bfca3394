"""``python -m umem`` is the ``umem`` command."""

from umem.cli import main

main(prog_name="umem")
