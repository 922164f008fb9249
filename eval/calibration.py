"""Measures the noise of a report's timings: the run that reports speedups also times kernels against themselves."""

from __future__ import annotations

from typing import Any

from rich.progress import track


def calibrate(runs: int) -> dict[str, Any]:
    """Time the project's own kernels against themselves, each time in two fresh processes, sizes of 5 to 300 us in turns.

    Args:
        runs: how many comparisons.

    Returns:
        ``runs``, the number of comparisons that ended; ``failed``, the errors of the others; ``within``, how many
        ratios are within 1 % of 1 (3 % below 20 us); ``holds``, how many 95 % intervals contain 1; ``worst``, the ratio
        farthest from 1.
    """
    from kbx_env.eval import timing_quality

    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for job in track(timing_quality.jobs(runs, 0, 0), "kernels against themselves"):
        try:
            rows.append(timing_quality.compared(job))
        except Exception as e:  # the report is written all the same, with the error
            failed.append(f"{type(e).__name__}: {e}"[:200])
    summary = timing_quality.summary(rows)
    return {
        "runs": len(rows), "failed": failed, "within": sum(t["within_bound"] for t in summary),
        "holds": sum(t["interval_holds_truth"] for t in summary), "worst": max((r["ratio"] for r in rows), key=_far, default=None),
    }  # fmt: skip


def _far(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def sentence(found: dict[str, Any]) -> str:
    """Describe a result of `calibrate` in words, for the report."""
    if not found["runs"]:
        why = f" ({found['failed'][0]})" if found["failed"] else ""
        return f"Kernels against themselves: none of {len(found['failed'])} runs ended{why}."
    n = found["runs"]
    text = f"Kernels against themselves on this machine: {found['within']} of {n} within 1 % (3 % below 20 us), the interval "
    text += f"holds 1 in {found['holds']} of {n}, the farthest is {found['worst']:.3f}x."
    return text + (f" {len(found['failed'])} runs failed." if found["failed"] else "")
