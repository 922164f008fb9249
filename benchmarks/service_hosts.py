"""A trainer and a grading machine as two hosts, whose link is cut for a minute in the middle of a batch. Needs root.

    python benchmarks/service_hosts.py --out runs/service-hosts.json

The hosts are network namespaces of this machine, each with an address of its own, joined by a switch
(``tests/helpers/two_hosts.py``). The grading machine runs ``kbx serve`` with a token, two workers and the real grader; the
trainer runs one of:

- ``client``: ``Client.grade_many`` of distinct kernels;
- ``reward``: ``KernelReward(url=...)``, as TRL calls it, with as many completions in one batch.

When a quarter of the batch is graded, the cable of the grading machine is pulled out of the switch for ``--cut-seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "helpers")]

from service_load import KERNELS, LOGGED, ROOT, START, TOKEN
from two_hosts import two_hosts

from kbx_env.client import Client, ServiceError
from kbx_env.outcome import Outcome

PORT = 8300


def submissions(count: int, kind: str) -> list[tuple[str, str]]:
    """Return distinct sources: in turn an expert and a kernel that the screen refuses."""
    from kbx_env.spec.catalog import expert_source

    experts = [(task, expert_source(task)) for task in KERNELS]
    made = []
    for k in range(count):
        task, source = experts[k // 2 % len(experts)]
        made.append((task, f"# {kind} {k}\n{source if k % 2 == 0 else 'x = 1'}\n"))
    return made


def train(kind: str, url: str, count: int) -> None:
    """Do what the trainer does, and print what it got as lines of JSON."""
    client = Client(url, TOKEN, 600)
    until = time.monotonic() + 120
    while True:
        try:
            client.health()
            break
        except ServiceError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    print(json.dumps({"ready": time.monotonic()}), flush=True)
    pairs = submissions(count, kind)
    if kind == "client":
        for number, outcome in client.grade_many(pairs, split="train", targets=[]):
            tell(number, outcome)
        return
    from kbx_env.trl import KernelReward

    with KernelReward("default", url=url, token=TOKEN, targets=[]) as reward:
        rewards = reward(["p"] * count, [source for _, source in pairs], task=[task for task, _ in pairs])
    for number, value in enumerate(rewards):
        print(json.dumps({"number": number, "at": time.monotonic(), "reward": value}), flush=True)


def tell(number: int, outcome: Outcome) -> None:
    """Print an outcome."""
    row = {"number": number, "at": time.monotonic(), "verdict": str(outcome.verdict), "message": outcome.message[:100]}
    print(json.dumps(row), flush=True)


def part(kind: str, count: int, cut_seconds: float) -> dict[str, Any]:
    """Run one trainer against a new service, and cut the link."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        code = START.format(
            root=str(ROOT), here=str(ROOT / "benchmarks"), port=PORT, workers=2, grader=LOGGED,
            store=str(folder / "gradings.sqlite"), token=str(folder / "token"),
        ).replace("Settings(", f"Settings(host={hosts.grader!r}, ")  # fmt: skip
        log = folder / "graded"
        server = hosts.start("grader", [sys.executable, "-c", code], env={**os.environ, "KBX_FAKE_LOG": str(log)})
        url = f"http://{hosts.grader}:{PORT}"
        trainer = hosts.start(
            "trainer", [sys.executable, __file__, "--trainer", kind, "--url", url, "--count", str(count)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert trainer.stdout is not None
        graded = lambda: len(log.read_bytes().splitlines()) if log.exists() else 0  # noqa: E731
        events: list[str] = []
        try:
            start = float(json.loads(trainer.stdout.readline())["ready"])
            rows: list[dict[str, Any]] = []
            reader = threading.Thread(target=lambda: rows.extend(json.loads(line) for line in trainer.stdout or ()))
            reader.start()
            while graded() < count // 4:
                time.sleep(0.05)
            hosts.cut()
            cut_at, at_cut = time.monotonic(), graded()
            events.append(f"{cut_at - start:.1f} s: cut, {at_cut} gradings begun")
            time.sleep(cut_seconds)
            events.append(f"{time.monotonic() - start:.1f} s: joined again, {graded()} gradings begun")
            hosts.mend()
            mended = time.monotonic()
            reader.join(400)
            seconds = time.monotonic() - start
        finally:
            for process in (trainer, server):
                process.kill()
                process.wait()
        counted = Counter(line.split(b" ", 1)[1] for line in log.read_bytes().splitlines())
    # A reward is printed only at the end of its batch.
    first = min((r["at"] for r in rows if r["at"] > mended), default=None)
    return {
        "submissions": count, "answers": len(rows), "distinct": len({r["number"] for r in rows}),
        "answers_while_cut": sum(cut_at + 0.5 < r["at"] < mended for r in rows),
        "got": dict(Counter(str(r.get("verdict", r.get("reward"))) for r in rows)),
        "graded": sum(counted.values()), "graded_twice": sum(n > 1 for n in counted.values()),
        "first_answer_after_the_cut": first and round(first - mended, 1), "seconds": round(seconds, 1), "events": events,
    }  # fmt: skip


def main() -> None:
    """Run both trainers, and write what was seen into the file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("runs/service-hosts.json"))
    p.add_argument("--count", type=int, default=300, help="submissions of the batch")
    p.add_argument("--cut-seconds", type=float, default=60.0)
    p.add_argument("--kinds", nargs="+", default=["client", "reward"], choices=["client", "reward"])
    p.add_argument("--trainer", help=argparse.SUPPRESS)
    p.add_argument("--url", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.trainer:
        train(a.trainer, a.url, a.count)
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {kind: part(kind, a.count, a.cut_seconds) for kind in a.kinds}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
