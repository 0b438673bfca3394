"""Chainer 7.8 on today's NumPy, Python and CuPy, and old packages on today's NumPy.

Importing this package does not import Chainer, so that a start-up hook can use it.
"""

from typing import TYPE_CHECKING

from umem.compat.finder import install, is_installed
from umem.compat.lending import lend_removed_names

__all__ = ["install", "is_installed", "lend_removed_names"]

if TYPE_CHECKING:
    from umem.compat.chainer_installer import get_chainer
    from umem.compat.finder import arm
    from umem.compat.installation import find_package, package_version
    from umem.compat.lending import LentNames, package_in_need
    from umem.compat.pth import install_pth, installed_pth, remove_pth
    from umem.compat.shim_report import Row, check, import_mended
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        chainer_installer="get_chainer",
        finder="arm",
        installation="find_package package_version",
        lending="LentNames package_in_need",
        pth="install_pth installed_pth remove_pth",
        shim_report="Row check import_mended",
    )
