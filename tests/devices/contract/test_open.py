"""A device of one's own: a class, a row, and a subclass of the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contracts import DeviceContract

import umem
from umem._common.scopes import Scope
from umem.cli import main
from umem.devices.base import Device
from umem.devices.open import DeviceKind, current_device, parse_device, register
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError
from umem.memory import DeviceBlock


class ToyDevice(VirtualGPU):
    """A model as the virtual GPU is, and there for the whole process."""

    def __init__(self) -> None:
        super().__init__("v100-16gb", vram_bytes=64 << 20)
        self.name = "toy"


@pytest.fixture
def toy() -> Iterator[Device]:
    """The toy device, whose operations are followed as long as there is a row for it."""
    device, scope = ToyDevice(), Scope("the life of a toy")
    scope.open(*device.enter(scope))

    def open_toy(gpu: object = None, vram_bytes: int | None = None) -> Device:
        return device if gpu is None else ToyDevice()

    restore = register(DeviceKind("toy", True, open_toy, lambda: None))
    yield device
    restore()
    scope.close()


class TestToyDevice(DeviceContract):
    @pytest.fixture
    def device(self, toy: Device) -> Device:
        return toy


def test_a_registered_device_is_the_current_one_until_it_is_taken_out(toy: Device) -> None:
    status = umem.status()
    assert (status.device, status.simulated, status.vram_bytes) == ("toy", True, 64 << 20)
    with umem.managed() as memory:
        array = memory.xp.ones(1 << 20, "uint8")
        assert umem.location(array).managed and umem.status().managed_bytes >= array.nbytes
    assert toy.figures is not None and toy.figures.peak_bytes == 1 << 20


def test_a_block_goes_before_a_registered_device(toy: Device) -> None:
    with umem.virtual_gpu("t4") as gpu:
        assert current_device() is gpu
        with DeviceBlock("toy", "any"):
            assert current_device().name == "toy"
        assert current_device() is gpu
    assert current_device() is toy


@pytest.mark.parametrize("text", ["toy", "virtual", "virtual:", "cuda:0", "tpu", ""])
def test_what_names_no_device_is_told_those_that_there_are(text: str) -> None:
    with pytest.raises(DeviceError, match=r"a device is virtual:NAME or cuda; got "):
        parse_device(text)


def test_the_doctor_examines_a_registered_device(
    toy: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["doctor", "--device", "toy:any"])
    assert stop.value.code == 0
    assert "Everything works on toy (simulated)" in capsys.readouterr().out
