"""What CUDA refuses: with CUDA's own error, and not under strict=False."""

from __future__ import annotations

import pytest

from umem.host_cuda.strictness import hint, refuse


class StatusError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"ERROR_{status}")
        self.status = status


def failing(status: int) -> None:
    raise StatusError(status)


def test_a_refusal_is_cudas_error_and_ends_with_the_option_that_turns_it_off() -> None:
    with pytest.raises(StatusError, match=r"^ERROR_1: it is too large\. To accept") as caught:
        refuse(failing, 1, "it is too large")
    assert caught.value.status == 1
    assert str(caught.value).endswith(hint())
    for name in ("strict=False", "--not-strict", "not-strict"):
        assert name in hint()
