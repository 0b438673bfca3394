"""A rank that waits in MPI is told from one that computes; no MPI is needed to see that."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from umem.launch.waiting import MISSED_SECONDS, MainThreadBack, missed, mpi_call


class Request:
    __module__ = "mpi4py.MPI"

    def wait(self, gate: threading.Event) -> bool:
        return gate.wait()


class Comm:
    __module__ = "mpi4py.MPI"

    def Recv(self, gate: threading.Event) -> bool:
        return gate.wait()

    def Irecv(self) -> Request:
        return Request()

    def recv(self) -> SimpleNamespace:
        """Any object that another rank has sent."""
        return SimpleNamespace(computed=lambda gate: gate.wait())


File = type("File", (), {"Read": lambda self, gate: gate.wait(), "__module__": "mpi4py.MPI"})


def waits_by_a_name(gate: threading.Event) -> None:
    comm = Comm()
    comm.Recv(gate)


def waits_by_an_attribute(gate: threading.Event) -> None:
    owner = SimpleNamespace(mpi_comm=Comm())
    max(1, owner.mpi_comm.Recv(gate))


def waits_over_lines(gate: threading.Event) -> None:
    comm = Comm()
    comm.Recv(
        gate  # so that the call has several lines
    )


def waits_by_a_method_of_its_own_name(gate: threading.Event) -> None:
    receive = Comm().Recv
    receive(gate)


def waits_by_a_partial(gate: threading.Event) -> None:
    receive = functools.partial(Comm().Recv, gate)
    receive()


def waits_by_an_item(gate: threading.Event) -> None:
    comms, which = {"all": [Comm()]}, 0
    comms["all"][which].Recv(gate)


def waits_for_a_request(gate: threading.Event) -> None:
    comm = Comm()
    comm.Irecv().wait(gate)


def computes_with_what_came(gate: threading.Event) -> None:
    comm = Comm()
    comm.recv().computed(gate)


def computes(gate: threading.Event) -> None:
    gate.wait()


def reads(gate: threading.Event) -> None:
    File().Read(gate)
    file = File()
    file.Read(gate)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (waits_by_a_name, "Recv (test_ranks_waiting.py:"),
        (waits_by_an_attribute, "Recv (test_ranks_waiting.py:"),
        (waits_over_lines, "Recv (test_ranks_waiting.py:"),
        (waits_by_a_method_of_its_own_name, "Recv (test_ranks_waiting.py:"),
        (waits_by_a_partial, "Recv (test_ranks_waiting.py:"),
        (waits_by_an_item, "Recv (test_ranks_waiting.py:"),
        (waits_for_a_request, "wait (test_ranks_waiting.py:"),
        pytest.param(
            computes_with_what_came,
            None,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="before 3.11 a frame tells its line alone"
            ),
        ),
        (computes, None),
        (reads, None),
    ],
)
def test_the_call_that_a_frame_is_in(work: Callable[..., None], expected: str | None) -> None:
    gate = threading.Event()
    thread = threading.Thread(target=work, args=(gate,))
    thread.start()
    try:
        while (frame := own_frame(thread, work)) is None:
            time.sleep(0.01)
        time.sleep(0.05)
        call = mpi_call(frame)
    finally:
        gate.set()
        thread.join()
    assert call is None if expected is None else str(call).startswith(expected)


def own_frame(thread: threading.Thread, work: Any) -> Any:
    """The frame of the work itself; mpi4py's methods, which are C, have none above it."""
    frame: Any = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not work.__code__:
        frame = frame.f_back
    return frame


def test_a_call_next_to_one_of_mpi_is_none() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("before 3.11 a frame tells its line alone")

    def both(comm: Any, gate: threading.Event) -> None:
        comm.Send(gate.wait())

    gate = threading.Event()
    sender = type("Comm", (), {"Send": lambda self, value: None, "__module__": "mpi4py.MPI"})()
    thread = threading.Thread(target=both, args=(sender, gate))
    thread.start()
    while (frame := own_frame(thread, both)) is None:
        time.sleep(0.01)
    time.sleep(0.05)
    call = mpi_call(frame)
    gate.set()
    thread.join()
    assert call is None


def test_the_main_thread_is_back_when_it_runs_python() -> None:
    made: list[MainThreadBack] = []
    thread = threading.Thread(target=lambda: made.append(MainThreadBack()))
    thread.start()
    thread.join()
    deadline = time.monotonic() + 30
    while not made[0].came and time.monotonic() < deadline:
        pass
    assert made[0].came


class Seat(SimpleNamespace):
    """What the launcher knows of a rank."""

    def order(self, **message: Any) -> None:
        self.orders.append(message)


def seat(rank: int, **known: Any) -> Any:
    usual = {"over_at": None, "ended": None, "has_mpi": True, "waits": None, "orders": []}
    return Seat(**{**usual, "rank": rank, "begins_mpi_at": 0.0, "is_asked": False, **known})


def test_nobody_is_asked_while_all_go_on_or_all_are_over() -> None:
    seats = [seat(0), seat(1)]
    assert missed(seats, 100.0) is None and not seats[0].orders
    assert missed([seat(0, over_at=1.0), seat(1, ended=0)], 100.0) is None


def test_a_rank_that_is_over_is_missed_when_all_others_wait() -> None:
    over, waits, computes = seat(1, over_at=9.0), seat(0, waits="Recv (a.py:3)"), seat(2)
    assert missed([waits, over, computes], 100.0) is None
    assert computes.orders == waits.orders == [{"ask": True}]
    assert missed([waits, over, computes], 101.0) is None and len(computes.orders) == 1
    computes.waits = "Barrier (a.py:9)"
    found = missed([waits, over, computes], 102.0)
    assert found is not None and found[0] is over
    assert found[1] == "ended (status 0) while rank 0 waits for others in Recv (a.py:3)"


def test_ranks_in_mpi_init_miss_one_that_never_comes() -> None:
    over, waits = seat(1, over_at=9.0, has_mpi=False), seat(0, has_mpi=False, begins_mpi_at=10.0)
    assert missed([waits, over], 10.0 + MISSED_SECONDS / 2) is None
    found = missed([waits, over], 11.0 + MISSED_SECONDS)
    assert found is not None and found[1].endswith("waits for others in MPI_Init")
