"""The texts for a policy: the instruction for a task, and the feedback on a verdict.

Their length is bounded, and they reveal no hidden input.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Protocol

from kbx_env.grading.static.aliases import MODULES
from kbx_env.outcome import LAUNCHLESS, Build, Outcome, Verdict

RULES = """\
Rules
- Write one Python module that defines `{entry}{signature}` on module level. Triton kernels do all the work on data.
- Host code may allocate (torch.empty, zeros, ones, full, empty_like, new_empty; torch.tensor of Python numbers, up to
  16 KiB per call), take views (view, reshape, expand, permute, squeeze, as_strided, slices such as x[:, 1:], ...), copy
  (contiguous, clone, copy_) and fill (fill_, zero_). It may read up to 64 scalars per call (.item()). A seed may be drawn
  with torch.randint of one element.
- Host code may convert (to, copy_) between float types, between integer types, from bool to integers, and an argument that
  is integer or bool, as it was passed, to a float type. It converts no result of a kernel from integers to floats, and
  nothing from floats to integers.
- Every other torch operation is refused and costs the reward, even inside try/except: no arithmetic, reductions,
  comparisons, arange, indexing with tensors, or torch.nn calls on tensors. tl.arange and plain Python numbers are free.
- Nothing else may be imported than: {imports}.
  An import of another module that is never used counts as a compile error; its use costs the reward. No files, processes,
  network.
- Allocate on the inputs' device. Loads and stores must stay inside the tensors (mask them). The programs of a launch run
  in any order: no result may depend on it.
- Inputs that the contract does not name as changed must stay unchanged; results are new tensors unless it says otherwise.
- Terms of the contract: any strides (a tensor need not be contiguous, an expanded one has strides of 0), 0-d (no axes),
  empty (no elements), a number or a float (a Python int or float, of any sign where no range is given). A result may have
  any strides unless the contract says contiguous. NaN, infinities, empty and 0-d tensors occur only where the contract
  mentions them."""


def _importable() -> str:
    """List the modules that a source may import, those of a package together: ``torch (also torch.nn, ...)``."""
    names = sorted(m for m in MODULES if m != "__future__")
    plain = [m for m in names if m.partition(".")[0] not in ("torch", "triton")]
    packages = [
        f"{root} ({', '.join(m.removeprefix(root) for m in names if m.startswith(root + '.'))})" for root in ("torch", "triton")
    ]
    return ", ".join([*packages, *plain])


IMPORTS = textwrap.fill(
    f"{_importable()}; libdevice is `from triton.language.extra import libdevice`", 118, subsequent_indent="  ",
    initial_indent=" " * 40, break_long_words=False, break_on_hyphens=False,
).strip()  # fmt: skip
"""The modules of ``RULES``, in lines of its width; the first line has room for the words before it."""


class Described(Protocol):
    """What the instruction says of a task: a ``Task``, or its ``Summary``."""

    @property
    def id(self) -> str:
        """``category/name``."""

    @property
    def entry(self) -> str:
        """Name of the function."""

    @property
    def signature(self) -> object:
        """Its parameters; the text is shown."""

    @property
    def spec(self) -> str:
        """The contract."""


def instruction(task: Described, backend: str) -> str:
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
    shown = RULES.format(entry=task.entry, signature=task.signature, imports=IMPORTS)
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
    "lane_conflict": "Two elements of one store write to one place",
    "order_dependent": "Depends on the order of programs",
    "reordered": "May be compiled wrongly",
}


_CONSTANT = re.compile(r"'(?:int|float|bool|NoneType)' object has no attribute '(\w+)'")
_MADE = re.compile(r"(\w+)=(\S+) \(made a constant\)")


def explained(message: str) -> str:
    """Explain an error whose text does not name its cause.

    Args:
        message: of an outcome.

    Returns:
        The cause and what to write instead, "" for other errors.
    """
    found = _CONSTANT.search(message)
    if found is None or "CompilationError" not in message:
        return ""
    made, attribute = _MADE.findall(message), found.group(1)
    shown = ", ".join(f"{name}={value}" for name, value in made[:6])
    used = [name for name, _ in made if re.search(rf"\b{name}\s*\.\s*{attribute}\b", message)]
    name = (used or [name for name, _ in made] or ["n"])[0]
    instead = f"tl.cast({name}, tl.int64) instead of {name}.to(tl.int64)" if attribute == "to" else f"tl.to_tensor({name})"
    return (
        "Triton compiles an integer argument that equals 1 into the kernel as a constant"
        + (f" (here: {shown})" if shown else "")
        + f", and a Python number has no .{attribute}. Write {instead}, which takes both, or keep the argument a variable with "
        f'@triton.jit(do_not_specialize=["{name}"]).'
    )


def _some(lines: Sequence[str], limit: int, what: str = "") -> list[str]:
    """Return the first lines, and how many are left out."""
    more = len(lines) - limit
    return [*lines[:limit], *([f"... and {more} more{what}"] if more > 0 else [])]


def _for(build: Build) -> str:
    return f" ({build.specialisation})" if build.specialisation else ""


def stopped(outcome: Outcome) -> str:
    """Say at which case an error ended the run, and how many cases were not run; "" where all ran."""
    cases = outcome.cases
    if cases is None or cases.stopped_at is None:
        return ""
    left = cases.total - cases.stopped_at
    return f"stopped at case {cases.stopped_at} of {cases.total}, {left} not run: {cases.stopped_in}"


def notes(outcome: Outcome) -> list[str]:
    """List facts that explain a wrong result or an error, one a line."""
    found = [explained(outcome.message)] if explained(outcome.message) else []
    dots = outcome.evidence.dots if outcome.evidence is not None else ()
    if outcome.verdict is Verdict.INCORRECT and "tf32" in dots:
        found.append(
            'Matrix products ran in TF32, which keeps 10 of the 23 bits of fp32 operands: tl.dot(a, b, input_precision="ieee") '
            "keeps all of them."
        )
    return found


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
    if at := stopped(outcome):
        lines.append(at[0].upper() + at[1:])
    if outcome.verdict in HALTED and outcome.slips:
        # A compiler reports the first error only; these are found without it. They come before its message, which may be long.
        others = [s for s in outcome.slips if s == LAUNCHLESS or s.partition(": ")[2] not in outcome.message]
        lines += _some([f"Also fails where it is reached: {s}" for s in others], 8, " such lines")
    listed = {f"{f.case}: {f.reason}" for f in outcome.cases.failures} if outcome.cases else set()
    if outcome.message and not outcome.correct and outcome.message not in listed:
        lines.append(f"Reason: {outcome.message}")
    lines += notes(outcome)
    if outcome.cases is not None:
        lines += [f"- {f.case}{f' [{f.layouts}]' if f.layouts else ''}: {f.reason}" for f in outcome.cases.failures]
        more = outcome.cases.wrong - len(outcome.cases.failures)
        lines += [f"- and {more} more failed cases"] if more > 0 else []
    lines += _some([f"Rule broken: {v.rule}: {v.detail}" for v in outcome.violations], 5, " rules broken")
    if outcome.evidence is not None:
        new = [f for f in outcome.evidence.findings if f.text not in outcome.message]
        lines += _some([f"{KINDS[f.kind]}: {f.text}" for f in new], 8, " findings")
    bad = [b for b in outcome.compile if not b.ok]
    lines += _some([f"Build failed: {b.kernel} for {b.target}{_for(b)}: {b.error}" for b in bad], 4, " failed builds")
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
