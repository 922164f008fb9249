"""Errors raised while parsing or executing TTIR."""

from __future__ import annotations

from dataclasses import dataclass

_TEMPLATES = {
    "out_of_bounds": "{what}, {by}outside the tensor",
    "uninitialised_read": "{what}, which nothing has written yet",
    "write_conflict": "{what}, which another program writes as well: {detail}",
    "lane_conflict": "{what} twice in one operation: {detail}, so it is not defined which of them stays",
    "reordered": "flattens several tensors and reduces them together: the compiler may order each of them differently, and "
    "pairs the wrong elements then; reduce one axis after the other",
    "decides_on_unwritten": "{what} lets memory that nothing has written decide {detail}",
    "order_dependent": "{what}: {detail}, so the result depends on which of them runs first",
}
"""Texts of findings by kind."""


@dataclass(frozen=True)
class Finding:
    """A fault that the executor found and that a run on a GPU would not report.

    Attributes:
        kind: "out_of_bounds", "uninitialised_read", "write_conflict", "lane_conflict", "order_dependent",
            "reordered" or "decides_on_unwritten".
        kernel: Name of the kernel.
        line: Source line of the access, 0 when unknown.
        file: Source file, "" when unknown.
        program: Coordinates (x, y, z) of the offending program.
        tensor: Name of the tensor that the pointer came from, "" when unknown.
        index: Element index relative to the first element of the tensor; may be negative.
        by: For out_of_bounds, how many bytes of the access or how far before and after the
            tensor it lies, at least 1; otherwise 0.
        detail: A description in words, without addresses and values.
        access: "load", "store", "atomic" or "reduce"; "host" for a value that the host code reads
            back; "decision" for a value that decides what is executed.
        indirect: Whether the address or the mask depends on loaded values. Then ``index`` and ``by`` may
            reveal them, and ``text`` leaves them out.
    """

    kind: str
    kernel: str
    line: int
    file: str
    program: tuple[int, int, int]
    tensor: str
    index: int
    by: int = 0
    detail: str = ""
    access: str = "load"
    indirect: bool = False

    def text(self) -> str:
        """Return one line of plain English for the author of the kernel."""
        if self.access == "host":
            return "the host code reads back a value that nothing has written"
        if self.access == "decision":
            where = f"line {self.line}: " if self.line else ""
            return f"{self.kernel}, {where}" + _TEMPLATES[self.kind].format(
                what=f"program {self.program}", detail=self.detail
            )
        if self.access == "reduce":
            return f"{self.kernel}, line {self.line}: " + _TEMPLATES[self.kind]
        verb = {"load": "loads", "store": "stores to", "atomic": "updates"}[self.access]
        tensor = f"`{self.tensor}`" if self.tensor else "unknown memory"
        element = "an element" if self.indirect else f"element {self.index}"
        what = f"program {self.program} {verb} {element} of {tensor}"
        by = "" if self.indirect else f"{self.by} byte(s) "
        where = f"line {self.line}: " if self.line else ""
        return f"{self.kernel}, {where}" + _TEMPLATES[self.kind].format(what=what, by=by, detail=self.detail)


class TtirError(Exception):
    """Base of every error of the TTIR executor."""


class Unsupported(TtirError):
    """The program uses an operation that the executor does not implement.

    Args:
        op: Name of the operation.
        line: Source line, 0 when unknown.
        file: Source file, "" when unknown.
        detail: More about the variant that is not implemented, for the message.
    """

    def __init__(self, op: str, line: int = 0, file: str = "", detail: str = "") -> None:
        self.op, self.line, self.file = op, line, file
        super().__init__(f"unsupported operation {op}{' (' + detail + ')' if detail else ''} at line {line}")


class OutOfBounds(TtirError):
    """An unmasked lane touched an address outside its tensor.

    Args:
        finding: The same as data for feedback.
        address: First offending address; never to be shown.

    Attributes:
        kernel: Name of the kernel.
        line: Source line of the access, 0 when unknown.
        file: Source file, "" when unknown.
        program_id: Coordinates (x, y, z) of the offending program.
        region: Name of the tensor, or of the nearest region when the pointer's origin is unknown.
        by_bytes: Distance in bytes between the access and the tensor (at least 1).
        is_store: Whether the access writes.
    """

    def __init__(self, finding: Finding, address: int) -> None:
        self.finding, self.address = finding, address
        self.kernel, self.line, self.file = finding.kernel, finding.line, finding.file
        self.program_id, self.region, self.by_bytes = finding.program, finding.tensor, finding.by
        self.is_store = finding.access != "load"
        by = "" if finding.indirect else f"{self.by_bytes} byte(s) "
        super().__init__(
            f"{self.kernel}: out-of-bounds {'store' if self.is_store else 'load'} at line {self.line}, "
            f"program {self.program_id}: {by}outside {self.region or 'every buffer'}"
        )


class DecidesOnUnwritten(TtirError):
    """A value loaded from unwritten memory decides a branch, a mask or an address.

    Args:
        finding: The same as data for feedback.

    Attributes:
        line: Source line of the decision, 0 when unknown.
        file: Source file, "" when unknown.
    """

    def __init__(self, finding: Finding) -> None:
        self.finding, self.line, self.file = finding, finding.line, finding.file
        super().__init__(finding.text())


class DeviceAssert(TtirError):
    """A ``tl.device_assert`` failed.

    Args:
        kernel: Name of the kernel.
        line: Source line of the assertion.
        message: Text given to the assertion.
        program_id: Coordinates of the first failing program.
        file: Source file, "" when unknown.
    """

    def __init__(self, kernel: str, line: int, message: str, program_id: tuple[int, int, int], file: str = "") -> None:
        self.kernel, self.line, self.message = kernel, line, message
        self.program_id, self.file = program_id, file
        super().__init__(f"{kernel}: device assertion failed at line {line}, program {program_id}: {message}")


class Deadlock(TtirError):
    """Every running program waits for a change of memory that no program makes.

    Args:
        kernel: Name of the kernel.
        line: Source line of the waiting loop.
        file: Source file, "" when unknown.
        program_id: Coordinates of the first program that waits.
        waiting: Number of programs that wait.
        unstarted: Number of programs that have not started.
    """

    def __init__(
        self, kernel: str, line: int, file: str, program_id: tuple[int, int, int], waiting: int, unstarted: int
    ) -> None:
        self.kernel, self.line, self.file, self.program_id = kernel, line, file, program_id
        more = f"; {unstarted} more cannot start before one of these has ended" if unstarted else ""
        super().__init__(
            f"deadlock: {kernel}: program {program_id} waits at line {line} for what no program does any more: "
            f"{waiting} program(s) wait, none can go on{more}"
        )
