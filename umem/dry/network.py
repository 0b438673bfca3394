"""The first connection of a program to another machine."""

from __future__ import annotations

import sys
from typing import Any


class FirstConnection:
    """Notes the first host that is asked for; Python keeps the hook for the process.

    Attributes:
        place: the host, with a port where one is known; None before there was one.
    """

    def __init__(self) -> None:
        self.place: str | None = None
        self._is_on = True
        sys.addaudithook(self._heard)

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in ("socket.getaddrinfo", "socket.connect"):
            return
        if not self._is_on or self.place is not None:
            return
        if event == "socket.getaddrinfo":
            host, port = given[:2]
        elif isinstance(given[1], tuple):
            host, port = given[1][:2]
        else:
            return  # a socket of this machine, such as those of multiprocessing
        if isinstance(host, bytes):
            host = host.decode(errors="replace")
        if host and host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
            self.place = f"{host}:{port}" if port else str(host)

    def stop(self) -> None:
        """Note nothing more."""
        self._is_on = False
