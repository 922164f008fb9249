"""What the device's driver says, without a device."""

from __future__ import annotations

import ctypes

import pytest

from kbx_env.device.driver import bind


def test_a_code_other_than_zero_is_an_error_and_zero_is_none() -> None:
    libc = ctypes.CDLL(None)
    call = bind(libc, "abs", ctypes.c_int)
    assert call(0) is None
    with pytest.raises(RuntimeError, match=r"abs failed with error 7$"):
        call(-7)
    with pytest.raises(RuntimeError, match="out of memory"):
        call(2)
