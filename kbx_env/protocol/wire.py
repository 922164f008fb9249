"""The messages between the grader and a runner: length-prefixed JSON and raw bytes, never pickles.

A frame is ``magic, header length, blob count, blob lengths, header, blobs``. A runner's messages are untrusted claims:
the decoder checks every length, dtype, shape and stride before it builds a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

MAGIC = b"kbx1"
MAX_HEADER = 8 << 20
MAX_BLOBS = 256
MAX_BYTES = 1 << 30
BUFFER_BYTES = 4 << 20
"""Bytes that wait in a connection for the other side to read, if the system allows so many (Linux: ``net.core.wmem_max``). With
its default of 208 KiB a tensor of 8 MB took three times as long, because both sides wait for each other in turn."""
MAX_DEPTH = 32
"""Deepest nesting of lists and objects, so that code may recurse over a message; the deepest honest message has six."""

DTYPES: Mapping[str, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
NAMES = {v: k for k, v in DTYPES.items()}


_CONTROL = {c: f"\\x{c:02x}" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def clean(value: Any) -> Any:
    """Return a value from a runner in printable form: texts, at any depth, without surrogates and control characters."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode().translate(_CONTROL)
    if isinstance(value, list):
        return [clean(v) for v in value]
    if isinstance(value, dict):
        return {clean(k): clean(v) for k, v in value.items()}
    return value


def assembled(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the entry takes them: flat names ``x.0``, ``x.1`` become the list ``x``."""
    grouped: dict[str, Any] = {}
    for name, value in args.items():
        base, dot, _ = name.partition(".")
        if dot:
            grouped.setdefault(base, []).append(value)
        else:
            grouped[name] = value
    return grouped


class WireError(Exception):
    """The other side is gone, too slow, or has sent something that is no frame."""


class Late(WireError):
    """The deadline passed before the frame was complete."""


class Gone(WireError):
    """The other side has closed the connection."""


def connection() -> tuple[socket.socket, socket.socket]:
    """Make the two ends of a connection for large messages.

    Returns:
        The ends, open.

    Raises:
        OSError: the system gives no more sockets.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        with contextlib.suppress(OSError):  # a smaller buffer is only slower
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return ends


def parse(text: str | bytes | bytearray) -> Any:
    """Parse a JSON text from an untrusted process.

    Args:
        text: the JSON.

    Returns:
        Its value.

    Raises:
        WireError: no JSON, or nested deeper than ``MAX_DEPTH``.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise WireError(f"not JSON that can be read ({type(e).__name__})") from None
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, list | dict)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise WireError(f"nested deeper than {MAX_DEPTH}")
        level = [v for held in level for v in (held.values() if isinstance(held, dict) else held)]
    return value


def send(
    sock: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = (), *, deadline: float | None = None
) -> None:
    """Send one frame.

    Args:
        sock: the connection.
        header: plain JSON types.
        blobs: raw bytes that follow the header.
        deadline: in ``time.monotonic`` seconds; ``None`` to wait for ever.

    Raises:
        Late: the deadline passed: the other side does not read.
        Gone: the other side has closed the connection.
    """
    text = json.dumps(header).encode()
    head = MAGIC + struct.pack("<II", len(text), len(blobs)) + b"".join(struct.pack("<Q", len(b)) for b in blobs)
    try:
        for part in (head + text, *blobs):
            _push(sock, part, deadline)
    except OSError as e:
        raise Gone(f"cannot send: {e}") from e


def _push(sock: socket.socket, data: bytes, deadline: float | None) -> None:
    if deadline is None:
        sock.sendall(data)
        return
    view, sent = memoryview(data), 0
    while sent < len(data):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([], [sock], [], left)[1]:
            raise Late("nobody read before the deadline")
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(view[sent : sent + (1 << 20)], socket.MSG_DONTWAIT)


def _exactly(sock: socket.socket, n: int, deadline: float | None) -> bytearray:
    data = bytearray(n)
    view, got = memoryview(data), 0
    while got < n:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([sock], [], [], left)[0]:
                raise Late("no answer before the deadline")
        try:
            k = sock.recv_into(view[got:], min(n - got, 1 << 20))
        except OSError as e:
            raise Gone(f"cannot receive: {e}") from e
        if k == 0:
            raise Gone("connection closed")
        got += k
    return data


def receive(
    sock: socket.socket, *, deadline: float | None = None, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, Any], list[bytearray]]:
    """Receive one frame.

    Args:
        sock: the connection.
        deadline: in ``time.monotonic`` seconds; ``None`` to wait for ever.
        max_bytes: at most so many bytes of blobs.

    Returns:
        The header and the blobs.

    Raises:
        Late: the deadline passed.
        Gone: the connection is closed.
        WireError: malformed frame.
    """
    head = _exactly(sock, 12, deadline)
    if head[:4] != MAGIC:
        raise WireError("not a frame")
    length, count = struct.unpack("<II", head[4:])
    if length > MAX_HEADER or count > MAX_BLOBS:
        raise WireError(f"frame too large: header of {length} bytes, {count} blobs")
    sizes = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count, deadline))
    if sum(sizes) > max_bytes:
        raise WireError(f"frame too large: {sum(sizes)} bytes, at most {max_bytes}")
    header = parse(_exactly(sock, length, deadline))
    if not isinstance(header, dict):
        raise WireError("header is not an object")
    return header, [_exactly(sock, s, deadline) for s in sizes]


def raw_bytes(t: torch.Tensor, count: int | None = None) -> bytes:
    """Return bytes of a CPU tensor's storage from the tensor's first element on.

    Args:
        t: the tensor.
        count: how many bytes; by default as many as a contiguous tensor of this shape has.

    Returns:
        The content of a contiguous tensor; of another one also what lies between its elements.
    """
    nbytes = t.numel() * t.element_size() if count is None else count
    return ctypes.string_at(t.data_ptr(), nbytes) if nbytes else b""


def encode(value: Any, blobs: list[bytes]) -> dict[str, Any]:
    """Encode one argument. Tensors keep their strides and the part of their storage that they span.

    Args:
        value: a tensor on the CPU, a tuple or list, a dtype, a number, a text or ``None``.
        blobs: the bytes of tensors are appended here.

    Returns:
        The argument as plain JSON types; ``k`` is its kind.

    Raises:
        TypeError: a value of another type.
    """
    if isinstance(value, torch.Tensor):
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        blobs.append(raw_bytes(value, span * value.element_size()))
        return {
            "k": "tensor", "dtype": NAMES[value.dtype], "shape": list(value.shape), "stride": list(value.stride()),
            "shift": value.storage_offset() % 64, "blob": len(blobs) - 1,
        }  # fmt: skip
    if isinstance(value, tuple):
        return {"k": "tuple", "v": [encode(v, blobs) for v in value]}
    if isinstance(value, list):
        return {"k": "list", "v": [encode(v, blobs) for v in value]}
    if isinstance(value, torch.dtype):
        return {"k": "dtype", "v": NAMES[value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"k": "float", "v": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"k": "py", "v": value}
    raise TypeError(f"cannot send a {type(value).__name__}")


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of storage elements that a tensor spans.

    Args:
        shape: its sizes.
        stride: its strides, in elements.

    Returns:
        Elements from the first to the last one, with those between them that do not belong to the tensor; 0 if it is empty.
    """
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def layout(d: Mapping[str, Any], max_elements: int = 1 << 30) -> tuple[torch.dtype, list[int], list[int], int, int]:
    """Read and check the layout of a tensor claim.

    Args:
        d: the claim.
        max_elements: largest number of elements.

    Returns:
        Dtype, shape, strides, offset of the first element (all in elements) and number of elements.

    Raises:
        WireError: they make no tensor.
    """
    try:
        dtype, shape, stride = DTYPES[d["dtype"]], [int(n) for n in d["shape"]], [int(n) for n in d["stride"]]
        shift = int(d.get("shift", 0))
    except (KeyError, ValueError, TypeError) as e:
        raise WireError(f"malformed tensor claim: {e}") from e
    numel = math.prod(shape)
    if len(shape) != len(stride) or len(shape) > 32 or min((*shape, *stride, shift), default=0) < 0:
        raise WireError("malformed tensor claim: shape and strides")
    if numel > max_elements or shift >= 64:
        raise WireError(f"malformed tensor claim: {numel} elements")
    return dtype, shape, stride, shift, numel


def decode_tensor(d: Mapping[str, Any], blobs: Sequence[bytearray], max_elements: int = 1 << 30) -> torch.Tensor:
    """Rebuild a CPU tensor from a claim.

    Args:
        d: the claim, with the index of its blob.
        blobs: the blobs of the frame.
        max_elements: largest number of elements.

    Returns:
        A tensor with the claimed dtype, shape, strides and bytes.

    Raises:
        WireError: dtype, shape, strides and bytes do not fit together.
    """
    dtype, shape, stride, shift, numel = layout(d, max_elements)
    try:
        blob = blobs[int(d["blob"])]
    except (KeyError, ValueError, TypeError, IndexError) as e:
        raise WireError(f"malformed tensor claim: {e}") from e
    item = dtype.itemsize
    elements = span(shape, stride)
    if elements * item != len(blob):
        raise WireError(f"malformed tensor claim: {len(blob)} bytes for a span of {elements} elements")
    if numel == 0:
        return torch.empty_strided(shape, stride, dtype=dtype)
    base = torch.empty(shift + elements, dtype=dtype)
    ctypes.memmove(base.data_ptr() + shift * item, (ctypes.c_char * len(blob)).from_buffer(blob), len(blob))
    return base.as_strided(shape, stride, shift)


def decode(d: Mapping[str, Any], blobs: Sequence[bytearray]) -> Any:
    """Decode an argument: the inverse of ``encode``.

    Args:
        d: the encoded argument.
        blobs: the blobs of the frame.

    Returns:
        The argument.

    Raises:
        WireError: a tensor's dtype, shape, strides and bytes do not fit together.
    """
    kind = d["k"]
    if kind == "tensor":
        return decode_tensor(d, blobs)
    if kind in ("tuple", "list"):
        items = [decode(v, blobs) for v in d["v"]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dtype":
        return DTYPES[d["v"]]
    if kind == "float":
        return float(d["v"])
    return d["v"]
