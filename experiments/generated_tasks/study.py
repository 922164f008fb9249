"""Do demonstrations of generated tasks help a small model on the benchmark's eval tasks?

    python experiments/generated_tasks/study.py OUT --pack DIR --prepare-only --workers 2       # demonstrations, on a CPU
    python experiments/generated_tasks/study.py OUT --pack DIR --seeds 3 --seconds 280 --device cuda --workers 14

For each seed the same model is trained twice, with equal steps and rows: on the kernels of the benchmark's train split (arm
``train``), and on these and the kernels of a generated pack (arm ``both``). Each model answers the 56 eval tasks and generated
tasks that it was not shown, greedily and at a temperature. The answers are graded on the CPU tier. A command that ends early
continues when it is given again; with other settings it needs another OUT.

Writes OUT/result.json, OUT/result.md and, with matplotlib, OUT/generated_tasks.png.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from kbx_env.eval import stats
from kbx_env.rewards.compose import load_term

from experiments.generated_tasks.files import ARMS, LOG, run_folder
from kbx_env import jsonl
from kbx_env.deadlines import deadline_of
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec.catalog import load_tasks

GRADINGS = "gradings.jsonl"
"""File with the verdict of every distinct answer."""
FIXED = {
    "data/prompts.json": ("held", "vocab", "context", "length", "copies", "pack_copies", "pack_name"),
    "runs": ("steps", "rows", "hidden", "layers", "heads", "lr", "share", "samples", "temperature", "answer"),
}
"""Settings that cannot change once a file or folder of OUT is there."""
NAMES = {"train": "train tasks alone", "both": "and generated tasks"}
SETS = {"eval": "eval tasks of the benchmark", "held": "generated tasks, not shown"}
VALUES = {"compiles": "compile", "correct": "correct"}
Key = tuple[str, str]

Children = dict[tuple[str, int], "subprocess.Popen[bytes]"]


class Gradings:
    """Grades answers in the background, equal answers once, and keeps the verdicts in a file."""

    def __init__(self, out: Path, workers: int, wall: float) -> None:
        """Read the verdicts of earlier commands; worker processes start with the first answer.

        Args:
            out: folder of the study.
            workers: gradings at a time.
            wall: seconds for one submission.
        """
        self._file, self._workers, self._wall = out / GRADINGS, workers, wall
        rows = jsonl.read(self._file, skip_broken=True) if self._file.is_file() else []
        self.known: dict[Key, dict[str, Any]] = {(r["task"], r["digest"]): r for r in rows}
        self._running: dict[Future[Outcome], Key] = {}
        self._executor: Executor | None = None
        self._compiles = load_term("compiles")

    def submit(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Queue answers: greedy ones first, and those to eval tasks before others."""
        if self._executor is None:
            self._executor = Executor(ProcessPool(self._workers), deadline=deadline_of(False, self._wall), capacity=sys.maxsize)
        options = {"backend": "cpu", "targets": (), "timing": False, "wall": self._wall}
        for a in answers:
            key = key_of(a)
            if key in self.known or key in self._running.values():
                continue
            priority = 2 * (a["sample"] == 0) + (a["set"] == "eval")
            request = Request(a["task"], a["source"].encode("utf-8", "surrogatepass"), options, priority=priority)
            self._running[self._executor.submit(request)] = key

    def take(self) -> int:
        """Write the verdicts that have come since, and return how many gradings are left."""
        for future in [f for f in self._running if f.done()]:
            task, digest = self._running.pop(future)
            outcome = future.result()
            if outcome.fault is Fault.INFRA:
                continue  # not judged: another command grades it again
            row = {"task": task, "digest": digest, "verdict": str(outcome.verdict), "compiles": self._compiles(outcome) == 1.0,
                   "correct": outcome.correct, "message": outcome.message[:200]}  # fmt: skip
            self.known[task, digest] = row
            jsonl.append(self._file, row)
        return len(self._running)

    def close(self) -> None:
        """End the worker processes."""
        if self._executor is not None:
            self._executor.close()


def key_of(answer: Mapping[str, Any]) -> Key:
    """Return what identifies the grading of an answer: its task, and a digest of its source."""
    return answer["task"], hashlib.sha256(answer["source"].encode("utf-8", "surrogatepass")).hexdigest()[:20]


def answers_of(out: Path, run: tuple[str, int]) -> list[dict[str, Any]] | None:
    """Return the answers of a run; ``None`` if it is not finished."""
    file = run_folder(out, *run) / "answers.jsonl"
    return jsonl.read(file) if file.is_file() else None


def work(out: Path, runs: Sequence[tuple[str, int]], devices: Sequence[str], workers: int, wall: float, until: float) -> str:
    """Train, answer and grade until all is done or the time is over.

    Args:
        out: folder of the study.
        runs: arm and seed of each run, in the order in which they begin.
        devices: a device for each run at a time.
        workers: gradings at a time.
        wall: seconds for one submission.
        until: end of the time, as ``time.time`` counts.

    Returns:
        What is left; empty if everything is done.

    Raises:
        UsageError: a run failed.
    """
    grading, free = Gradings(out, workers, wall), list(devices)
    queue, given, children = [r for r in runs if answers_of(out, r) is None], set[tuple[str, int]](), Children()
    on = dict[tuple[str, int], str]()
    last, left = 0.0, 1
    try:
        while time.time() < until and (queue or children or left or len(given) < len(runs)):
            while queue and free:
                run = queue.pop(0)
                children[run], on[run] = _start(out, run, free[0], until - time.time()), free.pop(0)
            for run, child in list(children.items()):
                if (status := child.poll()) is not None:
                    del children[run]
                    free.append(on.pop(run))
                    if status not in (0, 3):
                        raise UsageError(_failure(out, run, status))
            for run in runs:
                if run not in given and (found := answers_of(out, run)) is not None:
                    grading.submit(found)
                    given.add(run)
            left = grading.take()
            if time.time() - last > 10:
                last = time.time()
                print(f"{until - last:.0f} s left; {_state(out, children)}; {len(queue)} runs wait; {left} gradings to do, "
                      f"{len(grading.known)} done", flush=True)  # fmt: skip
            time.sleep(0.2)
        for child in children.values():  # they save their state by themselves
            try:
                child.wait(max(1.0, until + 10 - time.time()))
            except subprocess.TimeoutExpired:
                child.kill()
    finally:
        for child in children.values():
            child.kill()
        left = grading.take()
        grading.close()
    missing = [r for r in runs if answers_of(out, r) is None]
    return "" if not missing and not left else f"{len(missing)} runs without answers, {left} answers not graded"


def _start(out: Path, run: tuple[str, int], device: str, seconds: float) -> subprocess.Popen[bytes]:
    folder = run_folder(out, *run)
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(out.resolve()), run[0], str(run[1]), device, f"{seconds:.1f}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "experiments/generated_tasks/learn.py"), *words], stdout=output,
            stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


def _failure(out: Path, run: tuple[str, int], status: int) -> str:
    """Return why a run ended: its status, its file, and the last line that it wrote."""
    path = run_folder(out, *run) / "output.txt"
    lines = path.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
    return f"run {run} failed with status {status}: {lines[-1]} (all of it: {path})"


def _state(out: Path, children: Children) -> str:
    """Return the last step and loss of the runs that train."""
    parts = []
    for run in children:
        log = run_folder(out, *run) / LOG
        lines = jsonl.read(log, skip_broken=True) if log.is_file() else []
        steps = [x for x in lines if "step" in x]
        parts.append(f"{run[0]}-{run[1]} " + (f"step {steps[-1]['step']}, loss {steps[-1]['loss']}" if steps else "starts"))
    return ", ".join(parts) or "no run trains"


def judged(out: Path, runs: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the answers of all finished runs with their verdicts; answers that are not graded are left out."""
    rows = jsonl.read(out / GRADINGS, skip_broken=True) if (out / GRADINGS).is_file() else []
    known = {(r["task"], r["digest"]): r for r in rows}
    found = []
    for arm, seed in runs:
        for a in answers_of(out, (arm, seed)) or ():
            if (verdict := known.get(key_of(a))) is not None:
                found.append({"arm": arm, "seed": seed, **{k: a[k] for k in ("set", "task", "sample", "ended", "tokens")},
                              **{k: verdict[k] for k in ("verdict", "compiles", "correct")}})  # fmt: skip
    return found


def summarised(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rates by set, kind of answer and arm, and the difference of the arms.

    A task counts with the mean over its answers of all seeds. Intervals draw tasks (``eval/stats.mean``). The difference is over
    the answers (task, seed, number) that both arms have.

    Args:
        rows: of ``judged``.

    Returns:
        Figures as plain JSON types.
    """
    found: dict[str, Any] = {}
    for which in SETS:
        for kind in ("greedy", "sampled"):
            some = [r for r in rows if r["set"] == which and (r["sample"] == 0) == (kind == "greedy")]
            if not some:
                continue
            have = [{(r["task"], r["seed"], r["sample"]) for r in some if r["arm"] == arm} for arm in ARMS]
            both = have[0] & have[1]
            figures: dict[str, Any] = {"answers_of_both_arms": len(both)}
            for value in VALUES:
                cells = {arm: _by_task([r for r in some if r["arm"] == arm], value) for arm in ARMS}
                paired = {arm: _by_task([r for r in some if r["arm"] == arm and (r["task"], r["seed"], r["sample"]) in both], value)
                          for arm in ARMS}  # fmt: skip
                figures[value] = {
                    **{arm: _mean(list(c.values())) for arm, c in cells.items()},
                    "difference": _mean([paired[ARMS[1]][t] - paired[ARMS[0]][t] for t in paired[ARMS[0]]]),
                    "by_seed": {arm: _by_seed([r for r in some if r["arm"] == arm], value) for arm in ARMS},
                    "tasks_with_one": {arm: sorted({r["task"] for r in some if r["arm"] == arm and r[value]}) for arm in ARMS},
                }
            figures["verdicts"] = {arm: dict(Counter(r["verdict"] for r in some if r["arm"] == arm)) for arm in ARMS}
            found[f"{which}, {kind}"] = figures
    return found


def _by_task(rows: Iterable[Mapping[str, Any]], value: str) -> dict[str, float]:
    cells = defaultdict[str, list[float]](list)
    for r in rows:
        cells[r["task"]].append(float(r[value]))
    return {task: sum(v) / len(v) for task, v in cells.items()}


def _by_seed(rows: Iterable[Mapping[str, Any]], value: str) -> dict[str, float]:
    cells = defaultdict[str, list[float]](list)
    for r in rows:
        cells[str(r["seed"])].append(float(r[value]))
    return {seed: round(sum(v) / len(v), 4) for seed, v in sorted(cells.items())}


def _mean(values: Sequence[float]) -> dict[str, Any] | None:
    found = stats.mean(values)
    if found is None:
        return None
    return {"value": round(found.value, 4), "tasks": found.tasks,
            **{k: None if v is None else round(v, 4) for k, v in (("low", found.low), ("high", found.high))}}  # fmt: skip


def table(figures: Mapping[str, Any]) -> str:
    """Return the rates as a Markdown table."""
    lines = [f"| tasks and answers | rate | {NAMES['train']} | {NAMES['both']} | difference |", "|---|---|---|---|---|"]
    for name, one in figures.items():
        for value, text in VALUES.items():
            cells = [one[value][k] for k in (*ARMS, "difference")]
            lines.append(f"| {name} | {text} | {' | '.join(_shown(c) for c in cells)} |")
    return "\n".join(lines) + "\n"


def _shown(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    ends = "" if cell["low"] is None else f" [{100 * cell['low']:.1f}, {100 * cell['high']:.1f}]"
    return f"{100 * cell['value']:.1f} %{ends}"


def draw(figures: Mapping[str, Any], png: Path) -> Path:
    """Draw compile and correct rates of both arms with their intervals, one panel for each set of tasks."""
    from kbx_env.eval import plot_style as style

    style.check()
    with style.themed():
        sheet = style.sheet("generated tasks", 3.0)
        panels = sheet.subplots(1, len(SETS), sharey=True, squeeze=False)[0]
        colours, names = dict(zip(ARMS, style.PALETTE, strict=False)), list(VALUES)
        for axes, (which, title) in zip(panels, SETS.items(), strict=True):
            places = [(kind, value) for kind in ("greedy", "sampled") for value in names]
            top = 0.05
            for at, (kind, value) in enumerate(places):
                one = figures.get(f"{which}, {kind}", {}).get(value, {})
                for k, arm in enumerate(ARMS):
                    if (cell := one.get(arm)) is None:
                        continue
                    x = at + 0.24 * (k - 0.5)
                    low, high = (cell["value"] if cell[e] is None else cell[e] for e in ("low", "high"))
                    top = max(top, high, *one["by_seed"][arm].values())
                    axes.plot([x, x], [low, high], color=colours[arm], linewidth=1.6)
                    axes.plot([x], [cell["value"]], "o", color=colours[arm], markersize=6)
                    for rate in one["by_seed"][arm].values():
                        axes.plot([x + 0.1], [rate], "_", color=colours[arm], markersize=6)
            axes.set_xticks(range(len(places)), [f"{VALUES[value]}\n{kind}" for kind, value in places])
            axes.set_title(title)
            axes.set_xlim(-0.6, len(places) - 0.4)
            style.shares(axes, "y", 1.0)
        panels[0].set_ylabel("share of the answers")
        style.key(sheet, [(NAMES[arm], {"color": colours[arm], "linestyle": "-", "marker": "o"}) for arm in ARMS])
        note = "dot: mean over tasks and seeds; line: 95 % interval over tasks; dash: one seed"
        sheet.supxlabel(note, fontsize=8, x=0.99, ha="right", alpha=style.DIM)
        style.settled(sheet).savefig(png, dpi=150, metadata={"Software": None})
    return png


def report(out: Path, runs: Sequence[tuple[str, int]], settings: Mapping[str, Any], left: str) -> None:
    """Write result.json, result.md and the figure of what is there."""
    rows = judged(out, runs)
    logs = {f"{arm}-{seed}": jsonl.read(file, skip_broken=True) for arm, seed in runs
            if (file := run_folder(out, arm, seed) / LOG).is_file()}  # fmt: skip
    figures = summarised(rows)
    result = {
        "left": left, "not_judged": sum(len(answers_of(out, r) or ()) for r in runs) - len(rows), "settings": dict(settings),
        "data": json.loads((out / "data/about.json").read_text()), "rates": figures,
        "runs": {name: {"last": [x for x in log if "step" in x][-1:], "answering": [x for x in log if "answers" in x][-1:]}
                 for name, log in logs.items()},
    }  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "result.md").write_text(text := table(figures))
    jsonl.write(out / "judged.jsonl", rows)
    print(text)
    if figures and importlib.util.find_spec("matplotlib") is not None:
        print(draw(figures, out / "generated_tasks.png"))
    print(f"not finished: {left}; give the command again" if left else "finished", flush=True)


def settings_of(a: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a command, and write them; those that change results must be as in earlier commands.

    Raises:
        UsageError: they differ from those of the folder.
    """
    s = {**vars(a), "out": str(a.out), "pack_name": Path(a.pack).name}
    file = a.out / "settings.json"
    if file.is_file():
        before = json.loads(file.read_text())
        if changed := [k for name, fixed in FIXED.items() if (a.out / name).exists() for k in fixed if before.get(k) != s[k]]:
            shown = ", ".join(f"{k} was {before.get(k)}" for k in changed)
            raise UsageError(f"{a.out} has results of other settings ({shown}); give those, or another folder")
    a.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(s, indent=1) + "\n")
    return s


def devices_of(device: str, parallel: int) -> list[str]:
    """Return the device of each run that trains at a time."""
    if device != "cuda":
        return [device] * parallel
    import torch

    if not (count := torch.cuda.device_count()):
        raise UsageError("--device cuda, and there is no GPU; --device cpu tries the study out")
    return [f"cuda:{k}" for _ in range(parallel) for k in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; exit status 0 when all is done, 1 when the time was over before, 2 on bad usage or a failed run."""
    began = time.time()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="OUT")
    p.add_argument("--pack", required=True, metavar="DIR", help="folder of a generated pack")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    p.add_argument("--seconds", type=float, default=280.0, help="of this command; the next one continues")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda uses all GPUs")
    p.add_argument("--workers", type=int, default=8, help="gradings at a time")
    p.add_argument("--parallel", type=int, default=2, help="runs at a time on each GPU")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    p.add_argument("--prepare-only", action="store_true", help="make the demonstrations and stop")
    p.add_argument("--keep", action="store_true", help="keep the weights of the trained models")
    p.add_argument("--wall", type=float, default=15.0, help="seconds of a submission in grading")
    for name, default, text in (
        ("steps", 600, "training steps"), ("rows", 32, "rows of a step"), ("length", 1024, "tokens of a row"),
        ("hidden", 384, "width of the model"), ("layers", 6, "its blocks"), ("heads", 6, "its attention heads"),
        ("vocab", 3072, "its tokens"), ("context", 2048, "tokens of prompt and answer together"),
        ("answer", 576, "most tokens of an answer"), ("samples", 2, "answers at the temperature, beside the greedy one"),
        ("held", 48, "generated tasks that are evaluated and not shown"),
        ("copies", 64, "copies under made-up names of each kernel of the train split"),
        ("pack_copies", 8, "copies of each kernel of the pack"),
    ):  # fmt: skip
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} (default: {default})")
    for number, value, text in (("lr", 1.5e-3, "learning rate"), ("temperature", 0.7, "of sampled answers"),
                                ("share", 0.5, "share of the generated tasks in the tokens of arm both")):  # fmt: skip
        p.add_argument(f"--{number}", type=float, default=value, help=f"{text} (default: {value})")
    a = p.parse_args(argv)
    try:
        if min(a.seeds, a.workers, a.parallel, a.steps, a.rows) < 1:
            raise UsageError("--seeds, --workers, --parallel, --steps and --rows are at least 1")
        settings = settings_of(a)
        if not (a.out / "data/prompts.json").is_file():
            from experiments.generated_tasks import demonstrations

            demonstrations.prepare(
                a.out / "data", a.pack, held=a.held, vocab=a.vocab, context=a.context, longest=a.length,
                copies=(a.copies, a.pack_copies), seed=0, workers=a.workers,
            )  # fmt: skip
            print((a.out / "data/about.json").read_text(), f"{time.time() - began:.0f} s", flush=True)
        if a.prepare_only:
            return 0
        load_tasks(tasks_from=a.pack)  # opens the pack, so that the workers that grade have it
        runs = [(arm, seed) for seed in range(a.seeds) for arm in ARMS]
        left = work(a.out, runs, devices_of(a.device, a.parallel), a.workers, a.wall, began + a.seconds)
        report(a.out, runs, settings, left)
    except UsageError as e:
        print(f"study.py: {e}", file=sys.stderr)
        return 2
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
