"""The command ``kbx calls FILE``: prints recorded calls of language models, one JSON object a line."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
from pathlib import Path

from kbx_env.errors import UsageError


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``calls`` to a parser."""
    c = sub.add_parser("calls", help="print the recorded calls of language models (calls.sqlite), one JSON object a line")
    c.add_argument("path", help="the file, such as runs/report/calls.sqlite")
    c.add_argument("--policy", help="only calls of this policy")
    c.add_argument("--task", default="*", help="only calls for tasks that match this glob, such as 'math/*'")
    c.add_argument("--failures", action="store_true", help="print failed attempts instead")
    c.add_argument("--total", action="store_true", help="print only the totals of all calls")


def command(a: argparse.Namespace) -> int:
    """Run ``calls``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: no such file, or one of another kind.
    """
    from kbx_env.baselines.llm.log import CallLog

    if not Path(a.path).is_file():
        raise UsageError(f"no file {a.path!r}; give the calls.sqlite of a report, such as runs/report/calls.sqlite")
    with contextlib.closing(CallLog(a.path)) as log:
        if a.total:
            print(json.dumps(log.total().to_dict()))
            return 0
        for row in log.failures() if a.failures else log.rows():
            if (a.policy is None or row["policy"] == a.policy) and fnmatch.fnmatchcase(row["task"], a.task):
                print(json.dumps(dict(row), ensure_ascii=False))
    return 0
