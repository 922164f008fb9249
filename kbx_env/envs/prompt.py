"""The texts for a policy: the instruction for a task, and the feedback on a verdict.

Their length is bounded, and they reveal no hidden input.
"""

from __future__ import annotations

from kbx_env.outcome import LAUNCHLESS, Outcome, Verdict
from kbx_env.spec.task import Task

RULES = """\
Rules
- Write one Python module that defines `{entry}{signature}` on module level. Triton kernels do all the work on data.
- Host code may allocate (torch.empty, zeros, full, empty_like, new_empty), view (view, reshape, expand, permute,
  contiguous, as_strided, ...), copy and convert between float types or between integer types (copy_, clone, to), fill
  (fill_, zero_), and read up to 64 scalars per call back to the host (.item()). A seed may be drawn with torch.randint of
  one element.
- Every other torch operation is refused and costs the reward, even inside try/except: no arithmetic, reductions,
  comparisons, indexing or torch.nn calls on tensors.
- Imports: torch, triton, triton.language, math, random, typing, functools and the like. No files, processes, network.
- Allocate on the inputs' device. Loads and stores must stay inside the tensors (mask them).
- Inputs that the contract does not name as changed must stay unchanged; results are new tensors unless it says otherwise."""


def instruction(task: Task, backend: str) -> str:
    """Write the instruction for a task.

    Args:
        task: the task.
        backend: ``cpu`` or ``cuda``: the text says whether kernels are timed.

    Returns:
        The text with signature, contract and rules.
    """
    judged = (
        "Graded on hidden inputs of many shapes, layouts and value ranges against an fp64 reference; correct kernels "
        + ("are then timed against torch eager on this GPU." if backend == "cuda" else "are not timed on this machine.")
    )
    shown = RULES.format(entry=task.entry, signature=task.signature)
    return (
        f"Task {task.id}: write a Triton GPU kernel.\n\nSignature\n    {task.entry}{task.signature}\n\n"
        f"Contract\n{task.spec}\n\n{shown}\n\n{judged}\nAnswer with the whole module in one ```python block."
    )


ADVICE = {
    Verdict.MALFORMED: "Send one whole Python module with the entry function and its exact parameters.",
    Verdict.REJECTED: "Move the work into a Triton kernel and drop what the rules forbid.",
    Verdict.COMPILE_ERROR: "Fix the kernel so that Triton compiles it.",
    Verdict.RUNTIME_ERROR: "Fix the error; the line refers to your source.",
    Verdict.TIMEOUT: "Look for endless loops and far too much work per call.",
    Verdict.INCORRECT: "Fix the failing cases; the sizes are listed, the values are hidden.",
    Verdict.INFRA_FAULT: "This was not judged: the grader could not run it. Nothing is held against it.",
}
HALTED = (Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR)
"""Verdicts of a kernel that stopped at an error, so that later errors are not known from running it."""
KINDS = {
    "out_of_bounds": "Out of bounds",
    "uninitialised_read": "Read before written",
    "decides_on_unwritten": "Decides on memory that nothing has written",
    "write_conflict": "Write conflict",
    "order_dependent": "Depends on the order of programs",
    "reordered": "May be compiled wrongly",
}


def feedback(outcome: Outcome, limit: int = 4000) -> str:
    """Describe a verdict: what failed, where, by how much, and what to do.

    Args:
        outcome: the outcome.
        limit: largest number of characters.

    Returns:
        The text, one fact a line; if it is too long, the end is cut but not the advice.
    """
    lines = [f"Verdict: {outcome.verdict} (stage: {outcome.stage})"]
    if outcome.cases is not None:
        lines.append(f"Cases passed: {outcome.cases.passed} of {outcome.cases.total}")
    if outcome.verdict in HALTED and outcome.slips:
        # A compiler reports the first error only; these are found without it. They come before its message, which may be long.
        others = [s for s in outcome.slips if s == LAUNCHLESS or s.partition(": ")[2] not in outcome.message]
        lines += [f"Also fails where it is reached: {s}" for s in others[:8]]
    listed = {f"{f.case}: {f.reason}" for f in outcome.cases.failures} if outcome.cases else set()
    if outcome.message and not outcome.correct and outcome.message not in listed:
        lines.append(f"Reason: {outcome.message}")
    if outcome.cases is not None:
        lines += [f"- {f.case}: {f.reason}" for f in outcome.cases.failures]
    lines += [f"Rule broken: {v.rule}: {v.detail}" for v in outcome.violations[:5]]
    if outcome.evidence is not None:
        lines += [f"{KINDS[f.kind]}: {f.text}" for f in outcome.evidence.findings[:8] if f.text not in outcome.message]
    bad = [b for b in outcome.compile if not b.ok]
    lines += [f"Build failed: {b.kernel} for {b.target}: {b.error}" for b in bad[:4]]
    e = outcome.evidence
    if e is not None and e.moved_bytes and e.ideal_bytes and outcome.correct:
        lines.append(f"Bytes moved: {e.moved_bytes}, at least {e.ideal_bytes} needed; launches: {e.launches}")
        if e.sector_bytes and e.sector_bytes > 1.25 * e.moved_bytes:
            lines.append(f"Uncoalesced: these accesses touch {e.sector_bytes} bytes of 32-byte sectors")
    if outcome.timing is not None:
        t = outcome.timing
        lines.append(f"Speedup over eager: {t.speedup:.3f} (95 % interval {t.low:.3f} to {t.high:.3f})")
        lines += [f"- {c.case}: {c.candidate_us:.1f} us, eager {c.eager_us:.1f} us" for c in t.cases]
    if outcome.estimate is not None:
        g = outcome.estimate
        lines.append(f"Estimated on {g.device} (not measured): {100 * g.estimated_share:.0f} % of the roofline")
        lines += [
            f"- {c.case}: {c.estimated_us:.1f} us, bound by {c.bound_by}, at best {c.floor_us:.1f} us" for c in g.cases
        ]
    advice = "\n" + ADVICE[outcome.verdict] if outcome.verdict in ADVICE else ""
    text, room = "\n".join(lines), max(0, limit - len(advice))
    # The advice is never cut: it is the part that a policy can act on.
    cut = text if len(text) <= room else text[: max(0, room - 4)] + "\n..."
    return (cut + advice)[:limit]
