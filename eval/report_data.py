"""Reports as data: the input of figures, statistics, tables and the leaderboard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError

FILE = "report.json"
PUBLISHED = "published"
"""The timed sizes of reports that do not state any: such reports are older than the held-out sizes."""


@dataclass(frozen=True)
class Row:
    """One judged or masked answer. ``None`` is not known.

    Attributes:
        task: the task.
        category: of the task.
        difficulty: of the task.
        sample: number of the answer, from 0.
        verdict: of the grading.
        masked: whether the grading ended in an infrastructure fault; such answers are left out of every rate.
        compiled: whether it compiles; false if masked.
        correct: whether it is correct; false if masked.
        speedup: over eager, geometric mean over sizes.
        low: lower end of the speedup's 95 % interval.
        high: upper end of the speedup's 95 % interval.
        floor_ratio: the largest speedup that the device allows.
        traffic: moved / ideal bytes.
        launches: of kernels.
        message: of the grading.
        turns: submissions on the way to the answer.
        spent: resources that the answer took.
        raw: the row of ``report.json``.
    """

    task: str
    category: str
    difficulty: int
    sample: int
    verdict: str
    masked: bool
    compiled: bool
    correct: bool
    speedup: float | None
    low: float | None
    high: float | None
    floor_ratio: float | None
    traffic: float | None
    launches: int | None
    message: str
    turns: tuple[Mapping[str, Any], ...]
    spent: Mapping[str, Any]
    raw: Mapping[str, Any]

    @property
    def void(self) -> tuple[str, ...]:
        """Reasons why a person has to look at this kernel's times before they count; empty if they count."""
        timing = self.raw.get("timing") or {}
        cases = [c for c in timing.get("cases") or () if c.get("void")]
        return tuple(f"{c['case']}: {c['candidate_us']} us, eager {c['eager_us']} us, floor {c.get('floor_us')} us" for c in cases)

    @property
    def compiled_speedup(self) -> float | None:
        """Speedup over the torch.compile'd baseline, if the run measured it (``--compiled``)."""
        found = (self.raw.get("timing") or {}).get("compiled_speedup")
        return float(found) if isinstance(found, int | float) and math.isfinite(found) and found > 0 else None


@dataclass(frozen=True)
class PolicyStudy:
    """All answers of one policy in one run.

    Attributes:
        name: for people.
        manifest: of the run: device, versions, settings.
        about: of the policy: model, sampling, what it uses besides the task's text.
        rows: the answers.
        source: the folder that it was read from; empty for the present run.
        spec: the policy's name on the command line.
        beside: comparison with a second grading (``eval/regrade.py``); empty without one.
    """

    name: str
    manifest: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: tuple[Row, ...]
    source: str = ""
    """The folder it was read from, empty for the run at hand."""
    spec: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether correct kernels were timed."""
        return bool(self.manifest.get("timed"))

    @property
    def sizes(self) -> str:
        """The timed sizes: ``published`` (also for reports that do not say), or ``held-out``."""
        return str(self.manifest.get("sizes") or PUBLISHED)

    @property
    def judged(self) -> tuple[Row, ...]:
        """The answers that are not masked."""
        return tuple(r for r in self.rows if not r.masked)


@dataclass(frozen=True)
class Study:
    """Several policies to compare."""

    policies: tuple[PolicyStudy, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of all tasks, sorted."""
        return tuple(sorted({r.category for p in self.policies for r in p.rows}))


def from_reports(reports: Sequence[Mapping[str, Any]], source: str = "") -> Study:
    """Return a study from the JSON of each policy, as `kbx_env.eval.report.report_of` makes it.

    Args:
        reports: JSON of each policy.
        source: the folder of the report.

    Returns:
        The study.
    """
    names = [_short(r["policy"]) for r in reports]
    return Study(tuple(
        PolicyStudy(
            name if names.count(name) == 1 else r["policy"], r["manifest"], r.get("about") or {}, tuple(map(_row, r["tasks"])),
            source, r["policy"], r.get("beside") or {},
        ) for name, r in zip(names, reports)
    ))  # fmt: skip


def _short(spec: str) -> str:
    """Return a policy's name without the folders of a path: ``replay:runs/answers.jsonl`` is ``replay:answers``."""
    kind, colon, path = spec.rpartition(":")
    if "/" not in path or (colon and kind not in ("replay", "hf")):  # a model's name may hold a slash
        return spec
    return f"{kind}{colon}{Path(path).name.removesuffix('.jsonl') or path}"


def read(path: str | Path) -> Study:
    """Read a report.

    Args:
        path: its folder, or its ``report.json``.

    Returns:
        The study.

    Raises:
        UsageError: there is no report, or the file is none.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise UsageError(f"no {FILE} in {str(path)!r}; give the folder of a report, or run eval/report.py --out {path}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return from_reports(data.get("policies") or [data], str(file.parent))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(f"{file} is no report of this project ({type(e).__name__}: {e}); write it anew with --resume") from e


def joined(studies: Sequence[Study]) -> Study:
    """Return all policies in one study; names that occur twice get the name of their folder added."""
    every = [p for s in studies for p in s.policies]
    names = [p.name for p in every]
    return Study(tuple(
        p if names.count(p.name) == 1 or not p.source
        else replace(p, name=f"{p.name} ({Path(p.source).name})")
        for p in every
    ))  # fmt: skip


def _row(raw: Mapping[str, Any]) -> Row:
    t, e = raw.get("timing") or {}, raw.get("evidence") or {}
    # A time that is not believed does not count as a speed; the kernel is correct all the same.
    t = {} if any(c.get("void") for c in t.get("cases") or ()) else t
    correct, masked = bool(raw["correct"]), raw.get("fault") == "infra"
    moved, ideal = e.get("moved_bytes"), e.get("ideal_bytes")
    return Row(
        raw["task"], raw["category"], int(raw["difficulty"]), int(raw["sample"]), raw["verdict"], masked,
        bool(raw["compiled"]) and not masked, correct, t.get("speedup"), t.get("low"), t.get("high"), t.get("floor_ratio"),
        moved / ideal if correct and moved and ideal else None, e.get("launches"), raw.get("message") or "",
        tuple(raw.get("turns") or ()), raw.get("spent") or {}, raw,
    )  # fmt: skip
