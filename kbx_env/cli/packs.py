"""The commands ``kbx check-pack PACK`` and ``kbx new-task CATEGORY/NAME --pack FOLDER``."""

from __future__ import annotations

import argparse
import json
import keyword
import re
import sys
from pathlib import Path
from string import Template

from kbx_env.errors import KbxError, UsageError
from kbx_env.spec import packs
from kbx_env.spec.catalog import load_task, load_tasks

TASK = Template('''\
"""$local."""

import torch
from kbx_env.tasks._cases import stream
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Outlier, T, task


# The decorator declares the task; the function is its reference. Replace both, and the contract below.
@task(
    difficulty=1,
    takes={"input": T("*")},
    truth=Close(ulps=8),
    # flops: of the plain algorithm; least: what every algorithm needs. Bytes: inputs read once, results written once.
    cost=Cost(flops="5 * numel(input)", least="numel(input)"),
    cases=(
        Case({"*": (129, 257)}),
        Case({"*": (129, 257)}, {"slope": 1.5}),
        Case({"*": (128, 512)}, {"slope": -0.75}, draw=Outlier()),
        Case({"*": (33, 65)}, {"slope": 2.0}, layouts={"input": "transposed"}),
        Case({"*": (7, 31)}, layouts={"input": "strided"}),
        Case({"*": ()}),
        Case({"*": (0, 3)}),
        # Held-out cases are used in evaluation only.
        Case({"*": (3, 5, 211)}, {"slope": 0.3}, held=True),
    ),
    # Every grading draws one case of each family.
    varied=(elementwise(lambda pick: {"slope": pick.real(-2, 2)}),),
    timed=stream(),
)
def $name(input, slope=1.0):
    """Swish with a slope, elementwise: y = x * sigmoid(slope * x), where sigmoid(z) = 1 / (1 + exp(-z)).

    Example: $name([0, 1, -2]) = [0, 0.731059, -0.238406]
    Example: $name([1], slope=2.0) = [0.880797]

    input is an fp32 tensor of any shape with any strides; it may be 0-d or empty, and is not changed. slope is a float.
    The result is a new fp32 tensor of the same shape. Infinities and NaN are not tested.
    """
    return input * torch.sigmoid(slope * input)
''')
EXPERT = Template('''\
# parts: pointwise
"""The kernel that shows that the task can be solved; the part pointwise calls op."""

import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    z = s * x
    # Neither branch overflows: exp of a number that is not positive.
    e = tl.exp(-tl.abs(z))
    return x * tl.where(z >= 0, 1.0, e) / (1.0 + e)


def $name(input, slope=1.0):
    return pointwise(input, s=float(slope))
''')


def add_parsers(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two commands to a parser."""
    c = sub.add_parser("check-pack", help="check the tasks of a pack and grade their experts; exits with 2 if one has a fault")
    c.add_argument("pack", help="a folder with task files, or the name of an installed pack")
    c.add_argument("--tasks", default="*", help="globs over task ids or names, separated by commas (default: all)")
    c.add_argument("--no-grade", action="store_true", help="do not grade the experts")
    c.add_argument("--gradings", type=int, default=1, help="fresh gradings of each expert (default: 1)")
    c.add_argument("--json", action="store_true", help="print one JSON object: task -> list of faults")
    n = sub.add_parser("new-task", help="write a task and its expert into a pack, as a template that passes check-pack")
    n.add_argument("task", help="category/name of the new task; the name becomes the function's name")
    n.add_argument("--pack", required=True, metavar="FOLDER", help="folder of the pack; it is made if it does not exist")


def check(a: argparse.Namespace) -> int:
    """Run ``check-pack``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status: 0, or 2 if a task has a fault.

    Raises:
        UsageError: no such pack, no such task, or a wrong number of gradings.
    """
    from rich.console import Console
    from rich.progress import track

    if a.gradings < 1:
        raise UsageError(f"--gradings is {a.gradings}; at least 1")
    pack = packs.find(a.pack)
    place = str(pack.root)
    import torch

    from kbx_env.eval import task_checks
    from kbx_env.executor.direct import retrying
    from kbx_env.grading.grader import Grader

    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    without = 0
    with Grader() as grader:
        grade = None if a.no_grade else retrying(grader.grade)
        for task_id in track(_listed(place, a.tasks), "checking", console=Console(stderr=True), transient=True):
            try:
                found[task_id] = task_checks.faults(load_task(task_id, place), grade, a.gradings)
                without += _missing(task_id)
            except KbxError as e:
                found[task_id] = [str(e)]
    if a.json:
        print(json.dumps(found, indent=1))
    else:
        for task_id, lines in found.items():
            for line in lines:
                print(f"{task_id}: {line}")
        bad = sum(map(bool, found.values()))
        unchecked = f", {without} without an expert, so nothing shows that they can be solved" if without else ""
        print(f"{pack.name}: {len(found)} tasks, {bad} with faults{unchecked}")
    return 2 if any(found.values()) else 0


def _listed(place: str, pattern: str) -> list[str]:
    """Return the ids of the tasks of a pack; files that cannot be loaded are among them."""
    from kbx_env.spec.catalog import task_ids

    if pattern == "*":
        return list(task_ids(place))
    return [t.id for t in load_tasks(pattern=pattern, tasks_from=place)]


def _missing(task_id: str) -> bool:
    from kbx_env.spec.catalog import expert_source

    return expert_source(task_id) is None


def new(a: argparse.Namespace) -> int:
    """Run ``new-task``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: a name that cannot be used, or a file that exists.
    """
    category, _, name = a.task.partition("/")
    packs.check_categories(category)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"task {a.task!r}: the name must be that of a Python function; use CATEGORY/NAME, such as math/my_scan")
    root = Path(a.pack)
    files = {root / category / f"{name}.py": TASK, root / "experts" / category / f"{name}.py": EXPERT}
    for path in files:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name, or delete it first")
    try:
        for path, template in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(template.substitute(name=name, local=f"{category}/{name}"))
    except OSError as e:
        raise UsageError(f"cannot write to --pack {a.pack!r}: {e.strerror}") from e
    packs.find(str(root))
    for path in files:
        print(path)
    print(f"Change both files, then: python -m kbx_env check-pack {a.pack}", file=sys.stderr)
    return 0
