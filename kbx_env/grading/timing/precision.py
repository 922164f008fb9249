"""How narrow an interval must be before measuring stops: narrow for reports, wider and faster for training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kbx_env.options import PRECISIONS


@dataclass(frozen=True)
class Precision:
    """When the measurement of a case stops. Widths are half-widths of the 95 % interval of the log-ratio, in log units.

    Attributes:
        pairs: pairs of blocks in one round of short calls.
        early_rounds: after so many rounds a case may stop, if its half-width is below ``early_half_width``; where the
            whole interval lies beyond ``CLEAR_LOG_RATIO``, below ``clear_half_width`` or below ``clear_relative_width``
            of the log-ratio is enough.
        early_half_width: see ``early_rounds``.
        clear_half_width: see ``early_rounds``.
        clear_relative_width: share of the log-ratio: rewards are logarithms of the speedup.
        min_rounds: after so many rounds a case stops if its half-width is below ``half_width`` or ``budget`` is spent.
        max_rounds: most rounds of a case.
        half_width: see ``min_rounds``.
        budget: seconds of measuring a case: noise that depends on the process does not shrink in three.
        still_us: if two calls take longer than this together, in microseconds, the buffers move before the first round
            only: the address of a buffer changes the time of a call by a fraction of a microsecond.
        graph_us: microseconds of a captured graph, if three calls fit: it runs at least three times while the GPU is held alone.
        audit_us: microseconds of the audit's back-to-back run: long compared with one command to a runner, which takes some tenths
            of a millisecond. A run that does not fit is repeated, and then lasts longer.
        quiet: no other process makes a CUDA context while a case is measured, which disturbs one call in a hundred or fewer.
    """

    pairs: int
    early_rounds: int
    early_half_width: float
    clear_half_width: float
    clear_relative_width: float
    min_rounds: int
    max_rounds: int
    half_width: float
    budget: float
    still_us: float
    graph_us: float
    audit_us: float
    quiet: bool


CLEAR_LOG_RATIO = math.log(2.0)
"""Log units: the candidate takes less than half or more than twice eager's time."""
REPORT = Precision(
    pairs=2, early_rounds=4, early_half_width=0.005, clear_half_width=0.015, clear_relative_width=0.02,
    min_rounds=6, max_rounds=24, half_width=0.01, budget=1.0, still_us=1000.0, graph_us=30_000.0,
    audit_us=10_000.0, quiet=True,
)  # fmt: skip
"""For reports: within 1 %."""
TRAINING = Precision(
    pairs=1, early_rounds=3, early_half_width=0.03, clear_half_width=0.05, clear_relative_width=0.05,
    min_rounds=4, max_rounds=8, half_width=0.03, budget=0.4, still_us=100.0, graph_us=15_000.0,
    audit_us=5_000.0, quiet=False,
)  # fmt: skip
"""For rewards: within 3 %, in about half the time. Fewer timed calls are judged: as few as three of each case."""
BY_NAME = dict(zip(PRECISIONS, (REPORT, TRAINING), strict=True))
"""By the name of ``GradeOptions.precision``."""
