"""Messages survive the trip; malformed claims are refused before a tensor is built."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.protocol import wire


def _round(value):
    blobs: list[bytes] = []
    claim = wire.encode(value, blobs)
    return wire.decode(claim, [bytearray(b) for b in blobs])


@pytest.mark.parametrize("dtype", list(wire.NAMES))
def test_tensors_keep_values_and_strides(dtype: torch.dtype) -> None:
    t = torch.ones(6, 8).to(dtype)[1:, ::2].transpose(0, 1)
    back = _round(t)
    assert back.dtype == dtype and back.stride() == t.stride() and torch.equal(back, t)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(allow_nan=False),
                    lambda x: st.tuples(x, x) | st.lists(x, max_size=3), max_leaves=8))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_plain_values_survive(value) -> None:
    assert _round(value) == value


@pytest.mark.parametrize(
    "change",
    [{"shape": [100, 100]}, {"stride": [-1]}, {"dtype": "object"}, {"blob": 7}, {"shape": [-2]}, {"shift": 1 << 40},
     {"shape": [2] * 40, "stride": [1] * 40}, {"stride": [1 << 60]}],
    ids=str,
)  # fmt: skip
def test_a_malformed_claim_is_refused(change: dict) -> None:
    blobs: list[bytes] = []
    claim = wire.encode(torch.arange(4.0), blobs) | change
    with pytest.raises(wire.WireError):
        wire.decode_tensor(claim, [bytearray(b) for b in blobs])


def test_a_frame_that_is_none_is_refused() -> None:
    a, b = socket.socketpair()
    a.sendall(b"garbage on the line, much longer than a header")
    with pytest.raises(wire.WireError, match="not a frame"):
        wire.receive(b, deadline=time.monotonic() + 1)


def test_silence_ends_at_the_deadline() -> None:
    _a, b = socket.socketpair()
    with pytest.raises(wire.Late):
        wire.receive(b, deadline=time.monotonic() + 0.05)


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    a, b = socket.socketpair()
    wire.send(a, {}, [b"x" * 1000])
    with pytest.raises(wire.WireError, match="too large"):
        wire.receive(b, deadline=time.monotonic() + 1, max_bytes=10)


@pytest.mark.parametrize("depth", [33, 700, 100_000])
def test_a_deep_message_is_refused(depth: int) -> None:
    a, b = socket.socketpair()
    text = b'{"x": ' + b"[" * depth + b"]" * depth + b"}"
    threading.Thread(target=a.sendall, args=[wire.MAGIC + struct.pack("<II", len(text), 0) + text], daemon=True).start()
    with pytest.raises(wire.WireError):
        wire.receive(b, deadline=time.monotonic() + 5)
    assert wire.clean(wire.parse("[" * 32 + "]" * 32))


def test_a_closed_connection_is_told_from_nonsense() -> None:
    a, b = socket.socketpair()
    a.close()
    with pytest.raises(wire.Gone):
        wire.receive(b, deadline=time.monotonic() + 1)
    with pytest.raises(wire.Gone):
        wire.send(b, {}, deadline=time.monotonic() + 1)


def test_who_does_not_read_does_not_hold_up_the_grader() -> None:
    a, _b = socket.socketpair()
    with pytest.raises(wire.Late):
        wire.send(a, {}, [bytes(1 << 24)], deadline=time.monotonic() + 0.1)


def test_a_connection_takes_a_tensor_before_the_other_side_reads_it() -> None:
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    data = bytes(min(most, wire.BUFFER_BYTES) // 2)
    ours, theirs = wire.connection()
    with ours, theirs:
        wire.send(ours, {"n": 1}, [data], deadline=time.monotonic() + 5)
        header, blobs = wire.receive(theirs)
    assert header == {"n": 1} and blobs == [data]
