"""Sizes and compulsory work of one timed case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.timing.contestants import SLOTS
from kbx_env.spec.task import Case, Task

FEW_SLOTS, FEW_SLOTS_BYTES = 2, 1 << 30
"""Sets of buffers of a case whose arguments and results have more than so many bytes."""


@dataclass(frozen=True)
class CaseWork:
    """Sizes and compulsory work of one case, the same for every draw of its inputs.

    Attributes:
        result_bytes: bytes of a correct result.
        kept_bytes: bytes of a correct result and of the tensors written in place.
        ideal_bytes: compulsory traffic in bytes.
        operations: operations that the task must do.
        tensor_bytes: bytes of all arguments and results.
    """

    result_bytes: int
    kept_bytes: int
    ideal_bytes: int
    operations: int
    tensor_bytes: int

    @property
    def input_bytes(self) -> int:
        """Bytes of all arguments."""
        return self.tensor_bytes - self.kept_bytes

    @classmethod
    def by_shapes(cls, task: Task, case: Case) -> CaseWork | None:
        """Count without values, by running the reference on the meta device.

        Args:
            task: the task.
            case: the case.

        Returns:
            The counts; ``None`` where they depend on values, or where an operation has no implementation for meta
            tensors.
        """
        try:
            return cls.of(task, case, inputs.described(task, case), "meta")
        except Exception:  # torch raises several types where a value of a meta tensor is asked for
            return None

    @classmethod
    def of(cls, task: Task, case: Case, args: dict[str, Any], backend: str) -> CaseWork:
        """Count from one draw of the case.

        Args:
            task: the task.
            case: the case.
            args: from ``inputs.draw``.
            backend: where the reference is evaluated.

        Returns:
            The counts.
        """
        expected = reference.expect(task, case, args, backend, exact=False)
        result_bytes = sum(o.numel() * o.element_size() for o in expected.native)
        kept_bytes = result_bytes + sum(o.numel() * o.element_size() for o in expected.native_written.values())
        ideal = compulsory_work.ideal_bytes(task, case, args, expected)
        tensors = [v for v in args.values() if isinstance(v, torch.Tensor)]
        tensor_bytes = kept_bytes + sum(v.numel() * v.element_size() for v in tensors)
        return cls(result_bytes, kept_bytes, ideal, compulsory_work.flops(task, case, args), tensor_bytes)


def slots_of(work: CaseWork) -> int:
    """Return how many sets of buffers a case has; large ones have fewer.

    Args:
        work: of the case.
    """
    return FEW_SLOTS if work.tensor_bytes > FEW_SLOTS_BYTES else SLOTS
