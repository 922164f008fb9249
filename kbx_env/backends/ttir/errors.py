"""Errors raised while parsing or executing TTIR."""

from __future__ import annotations


class TtirError(Exception):
    """Base of every error of the TTIR executor."""


class Unsupported(TtirError):
    """The program uses an operation that the executor does not implement.

    Attributes:
        op: Name of the operation.
        line: Source line, 0 when unknown.
        file: Source file, "" when unknown.
    """

    def __init__(self, op: str, line: int = 0, file: str = "", detail: str = "") -> None:
        self.op, self.line, self.file = op, line, file
        super().__init__(f"unsupported operation {op}{' (' + detail + ')' if detail else ''} at line {line}")


class OutOfBounds(TtirError):
    """An unmasked lane touched an address outside every region.

    Attributes:
        kernel: Name of the kernel.
        line: Source line of the access, 0 when unknown.
        program_id: Coordinates (x, y, z) of the offending program.
        address: First offending address.
        region: Name of the nearest region.
        by_bytes: Distance in bytes between the access and that region (at least 1).
        is_store: Whether the access writes.
    """

    def __init__(
        self,
        kernel: str,
        line: int,
        program_id: tuple[int, int, int],
        address: int,
        region: str,
        by_bytes: int,
        is_store: bool,
        file: str = "",
    ) -> None:
        self.kernel, self.line, self.program_id, self.address = kernel, line, program_id, address
        self.region, self.by_bytes, self.is_store, self.file = region, by_bytes, is_store, file
        kind = "store" if is_store else "load"
        super().__init__(
            f"{kernel}: out-of-bounds {kind} at line {line}, program {program_id}: "
            f"{by_bytes} byte(s) outside {region or 'every buffer'}"
        )


class DeviceAssert(TtirError):
    """A ``tl.device_assert`` failed.

    Attributes:
        kernel: Name of the kernel.
        line: Source line of the assertion.
        message: Text given to the assertion.
        program_id: Coordinates of the first failing program.
    """

    def __init__(self, kernel: str, line: int, message: str, program_id: tuple[int, int, int], file: str = "") -> None:
        self.kernel, self.line, self.message = kernel, line, message
        self.program_id, self.file = program_id, file
        super().__init__(f"{kernel}: device assertion failed at line {line}, program {program_id}: {message}")
