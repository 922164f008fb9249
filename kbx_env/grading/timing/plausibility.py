"""Whether times can be true: they are compared with the roofline of the device, and eager's with each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kbx_env.grading.timing import roofline as rooflines
from kbx_env.grading.timing.case_work import CaseWork
from kbx_env.grading.timing.ratio import Paired
from kbx_env.grading.timing.roofline import Roofline
from kbx_env.spec.task import Task


def claimed_us(paired: Paired) -> float:
    """Return the time that a speedup claims for a call: few calls may decide the ratio, and then it is not the median.

    Args:
        paired: the times.

    Returns:
        Microseconds of a call of the candidate.
    """
    return min(paired.candidate_us, paired.eager_us * math.exp(-paired.log_ratio))


def skewed(paired: Paired) -> str | None:
    """Tell whether few calls of eager decide the ratio. A submission's own calls give it no second attempt.

    Args:
        paired: the times.

    Returns:
        Why the case is measured again; ``None`` where most calls decide.
    """
    if not paired.skewed:
        return None
    return f"eager took {paired.eager_us:.1f} us in most calls, {paired.eager_mean_us or 0:.1f} in the mean"


@dataclass(frozen=True)
class Belief:
    """Whether one case's times are possible by the roofline.

    Attributes:
        floor_us: microseconds below which no kernel can run; ``None`` where that is not known, or refuted by eager.
        doubt: why the case is measured again; ``None`` where nothing is odd.
        impossible: the candidate is faster than physics allows, and eager is not.
        void: the candidate's time is too good to be believed, but not proved to be wrong.
    """

    floor_us: float | None
    doubt: str | None = None
    impossible: bool = False
    void: bool = False


def believed(task: Task, work: CaseWork, roofline: Roofline, paired: Paired) -> Belief:
    """Compare both times with the roofline.

    Eager runs in the grader and is trusted. If it is faster than the floor, the floor is wrong and the candidate is not
    compared with it.

    Args:
        task: the task.
        work: of the case.
        roofline: of the device.
        paired: the times.

    Returns:
        What the times allow to believe.
    """
    claimed = claimed_us(paired)
    floor_us = roofline.floor_us(work.ideal_bytes, work.operations, rooflines.operand_of(task))
    if floor_us is None:
        likely = roofline.likely_us(work.ideal_bytes)
        if likely is None or claimed >= rooflines.PLAUSIBLE * likely or paired.eager_us < likely:
            return Belief(None)
        return Belief(None, f"{claimed:.1f} us; by the measured copy {likely:.1f} us would be needed", void=True)
    if paired.eager_us < rooflines.IMPOSSIBLE * floor_us:
        why = f"the floor of {floor_us:.1f} us is wrong: eager itself took {paired.eager_us:.1f} us"
        return Belief(None, why)
    if claimed < rooflines.IMPOSSIBLE * floor_us:
        why = f"{claimed:.1f} us, the device needs {floor_us:.1f} us to move the data"
        return Belief(floor_us, why, impossible=True)
    share = floor_us / claimed
    if share > max(rooflines.PLAUSIBLE, rooflines.BESIDE_EAGER * floor_us / paired.eager_us):
        return Belief(floor_us, f"{claimed:.1f} us is {share:.2f} of the roofline", void=True)
    return Belief(floor_us)
