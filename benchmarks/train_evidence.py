"""What training does to a small model in the minutes of a borrowed GPU: SFT, then GRPO by one answer and over several turns.

    python benchmarks/train_evidence.py OUT --data runs/data/demonstrations.parquet [--minutes 9] [--seeds 3]
                                        [--parts sft,single,multi,report,ppo] [--config FILE.yaml] [--model CHECKPOINT]

A model with random weights is taught the demonstrations (``sft``). From there GRPO goes on, ``single`` and ``multi``, all seeds
at the same time on one GPU, and compared is what each was at the same number of gradings, the largest that every run reached.
``report`` asks the SFT checkpoint and all of these for the eval split, held-out shapes included. ``ppo`` learns schedules
(measured, on a GPU) and grades them beside the experts as they are. Each step has its share of the minutes; one that runs out is
stopped with SIGINT, says so, and what it had by then counts. Checkpoints live in ``--work``; OUT gets evidence.json,
training.json, evaluation.json and ppo.json. ``--config``: sections ``build``, ``sft``, ``grpo`` and ``ppo`` of those scripts'
settings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from _evidence_jobs import MARKS, child
from _evidence_stats import beside, compared, quarters
from _evidence_time import GRACE, SHARES, Budget, say, together

PARTS = ("sft", "single", "multi", "report", "ppo")
MOST = 15 << 20
"""Bytes of one file."""


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, without one that a kill cut off."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


class Evidence:
    """One run of this script."""

    def __init__(self, a: argparse.Namespace) -> None:
        import torch
        from omegaconf import OmegaConf

        self.a, self.parts = a, [p for p in PARTS if p in a.parts.split(",")]
        self.cuda = torch.cuda.is_available()
        self.work = Path(a.work or tempfile.mkdtemp(prefix="kbx-evidence-")).absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        a.out.mkdir(parents=True, exist_ok=True)
        self.said = self.work / "said"
        self.more: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(a.config)) if a.config else {}  # type: ignore[assignment]
        if unknown := set(self.more) - {"build", "sft", "grpo", "ppo"}:
            raise SystemExit(f"--config {a.config}: unknown section {', '.join(unknown)}; build, sft, grpo and ppo are known")
        self.modes = [m for m in ("single", "multi") if m in self.parts]
        steps = [s for s in SHARES if s in self.parts or (s == "grpo" and self.modes)]
        self.budget = Budget(60 * a.minutes, steps)
        self.cores = os.cpu_count() or 1
        self.model: Path | None = Path(a.model).absolute() if a.model else None
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "arguments": {k: str(v) for k, v in vars(a).items()}, "config": self.more,
            "device": torch.cuda.get_device_name(0) if self.cuda else "cpu", "cores": self.cores,
            "python": sys.version.split()[0], "versions": _versions(), "steps": {}, "failures": {},
        }  # fmt: skip
        self.training: dict[str, Any] = {}
        # Threads of many processes would fight for the cores.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}

    def write(self, name: str, value: Any) -> None:
        """One file of OUT, after every step: whatever ends this script, what was found is there."""
        text = json.dumps(value)
        if len(text) > MOST:
            text = json.dumps({"left out": f"{len(text)} bytes"})
        (self.a.out / f"{name}.json").write_text(text)

    def settings(self, section: str, name: str, ours: Mapping[str, Any], fixed: Mapping[str, Any]) -> str:
        """A YAML file for a script: our defaults, over them the user's section, over that what this comparison rests on."""
        from omegaconf import OmegaConf

        file = self.work / f"{name}.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.merge(ours, self.more.get(section, {}), fixed)))
        return str(file)

    def job(self, name: str, seconds: float, **job: Any) -> list[str]:
        """The command of a child; it ends by itself a little before it would be stopped."""
        file = self.work / f"{name}.json"
        until = time.time() + max(1.0, seconds - min(GRACE, seconds / 4) - 4)
        file.write_text(json.dumps({**job, "until": until}))
        return [sys.executable, str(Path(__file__).resolve()), str(self.a.out), "--child", str(file)]

    def run(self, step: str, commands: Mapping[str, Sequence[str]], seconds: float, said: Callable[[], str] = lambda: "") -> None:
        """Run commands, and keep how they ended."""
        say(f"{step}: {', '.join(commands)}; {seconds:.0f} s")
        for name, end in together(commands, seconds, self.said, said=said, env=self.env).items():
            self.result["steps"][name] = {"status": end.status, "seconds": end.seconds, "stopped": end.stopped}
            if end.stopped:
                say(f"{name}: out of time, ended after {end.seconds} s with status {end.status}")
            elif end.status:
                self.result["failures"][name] = end.tail
                say(f"{name}: exit status {end.status}: {end.tail.strip()[-600:]}")

    def sft(self) -> None:
        """A model from nothing, then demonstrations."""
        from kbx_env.train import models, settings

        seconds, before = self.budget.take("sft"), time.monotonic()
        if self.model is None:
            a = self.a
            sizes = {"hidden": a.hidden, "layers": a.layers, "heads": a.heads, "vocab": a.vocab, "context": a.context, "seed": 0}
            file = self.settings("build", "build", sizes, {"out": str(self.work / "model")})
            self.model = models.build(settings.read(models.Build, [file]))
        from kbx_env.train.memory import weights_of

        self.result["weights"] = weights_of(self.model)
        say(f"model: {self.result['weights']:,} weights")
        out = self.work / "sft"
        ours = {"trainer": {
            "max_steps": 100_000, "learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20,
            "per_device_train_batch_size": 16 if self.cuda else 2, "logging_steps": 5 if self.cuda else 1,
            "save_strategy": "no",
            "max_grad_norm": 1.0, "disable_tqdm": True,
        }}  # fmt: skip
        fixed = {"model": str(self.model), "data": str(Path(self.a.data).absolute()), "out": str(out)}
        seconds -= time.monotonic() - before
        command = self.job("sft", seconds, kind="sft", settings=self.settings("sft", "sft", ours, fixed))

        def said() -> str:
            last = (_lines(out / "log.jsonl") or [{}])[-1]
            return f"sft: step {last.get('step')}, loss {last.get('loss')}"

        self.run("sft", {"sft": command}, seconds, said)
        keys = ("step", "epoch", "seconds", "loss", "mean_token_accuracy")
        self.training["sft"] = [{k: x[k] for k in keys if k in x} for x in _lines(out / "log.jsonl")]
        if not (out / "final").is_dir():
            self.model = None  # GRPO from random weights would tell nothing
            raise RuntimeError("no checkpoint came out of SFT")
        self.model = out / "final"

    def grpo(self) -> None:
        """Every mode and seed side by side, from one checkpoint."""
        a, seconds, commands = self.a, self.budget.take("grpo"), {}
        if self.model is None:
            raise RuntimeError("GRPO begins with a checkpoint: --parts sft, or --model")
        runs = [(m, k) for k in range(a.seeds) for m in self.modes]
        # While a run is graded others generate: all cores are shared out, none kept back.
        workers = a.workers or math.ceil(self.cores / len(runs))
        for mode, seed in runs:
            turns = a.turns if mode == "multi" else 1
            at_once = math.gcd(a.batch // turns, 16)  # answers of a backward pass: six runs share the memory
            ours = {
                "tasks": a.train_tasks, "targets": "none", "wall": a.wall, "workers": workers, "samples": 2, "vllm": "false",
                "per_turn_credit": mode == "multi",
                "trainer": {
                    "learning_rate": 5e-5, "lr_scheduler_type": "constant", "max_grad_norm": 0.5, "temperature": 1.0,
                    "num_generations": a.generations, "per_device_train_batch_size": at_once,
                    "gradient_accumulation_steps": a.batch // turns // at_once, "max_completion_length": a.length * turns,
                    "disable_tqdm": True,
                },
            }  # fmt: skip
            out = self.work / f"{mode}-{seed}"
            # Other processes work on this GPU outside of any lease: what was timed beside them would mean nothing.
            fixed = {"model": str(self.model), "out": str(out), "mode": mode, "max_turns": a.turns, "seed": seed,
                     "backend": a.backend, "timing": False,
                     "trainer": {"max_steps": 100_000, "save_strategy": "no", "logging_steps": 1}}  # fmt: skip
            file = self.settings("grpo", f"grpo-{mode}-{seed}", ours, fixed)
            commands[f"{mode}-{seed}"] = self.job(
                f"{mode}-{seed}", seconds, kind="grpo", settings=file, gradings=a.gradings
            )  # fmt: skip

        def said() -> str:
            every = {n: [x for x in _lines(self.work / n / "log.jsonl") if "gradings" in x] for n in commands}
            last = {n: lines[-1] if lines else {} for n, lines in every.items()}
            return "; ".join(f"{n} {x.get('gradings', 0)} gradings, reward {x.get('reward') or 0:.3f}" for n, x in last.items())

        self.run("grpo", commands, seconds, said)
        keys = ("step", "seconds", "gradings", "reward", "compile_rate", "correct_rate", "masked", "turns", "grading_seconds",
                "entropy", "completions/clipped_ratio", "completions/mean_length", "grad_norm")  # fmt: skip
        for n in commands:
            lines = _lines(self.work / n / "log.jsonl")
            shown = _lines(self.work / n / "samples.jsonl")
            self.training[n] = [{k: x[k] for k in keys if k in x} for x in lines]
            self.training[f"{n} samples"] = [*shown[:2], *shown[-4:]]
            self.result.setdefault("training", {})[n] = quarters(lines)

    def common(self) -> tuple[str, list[str]]:
        """The folder of the last mark that every run reached, and these runs; where one reached none, the end of each."""
        names = [f"{m}-{k}" for m in self.modes for k in range(self.a.seeds)]
        reached = {
            n: max((k for k in range(1, MARKS + 1) if (self.work / n / f"at-{k}").is_dir()), default=0)
            for n in names if list((self.work / n).glob("at-*/gradings.json")) or (self.work / n / "final/gradings.json").is_file()
        }  # fmt: skip
        for n in sorted(set(names) - set(reached)):
            self.result["failures"].setdefault(n, "no step was done in time")
        mark = min(reached.values(), default=0)
        if mark:
            return f"at-{mark}", list(reached)
        return "final", [n for n in reached if (self.work / n / "final/gradings.json").is_file()]

    def report(self) -> None:
        """The eval split, asked of the start and of every run at the same number of gradings."""
        a, seconds, commands = self.a, self.budget.take("report"), {}
        if self.model is None:
            raise RuntimeError("there is no checkpoint to evaluate")
        mark, runs = self.common()
        folders = {f"sft-{k}": self.model for k in range(a.seeds)} | {n: self.work / n / mark for n in runs}
        counts = {n: json.loads((folders[n] / "gradings.json").read_text()) for n in runs}
        self.result["compared_at"] = {"mark": mark, "of": MARKS, "equal": mark != "final", "runs": counts}
        say(f"compared at {self.result['compared_at']}")
        for name, folder in folders.items():
            commands[f"report-{name}"] = self.job(
                f"report-{name}", seconds, kind="evaluate", model=str(folder), tasks=a.eval_tasks, backend=a.backend,
                workers=a.workers or math.ceil(self.cores / len(folders)), wall=a.wall, turns=a.turns, length=a.length,
                samples=a.samples, round=a.round, seed=1000 + int(name.split("-")[1]), rows=str(self.work / f"rows-{name}.jsonl"),
            )  # fmt: skip

        def said() -> str:
            return "; ".join(f"{n} {len(_lines(self.work / f'rows-{n}.jsonl'))} episodes" for n in folders)

        self.run("report", commands, seconds, said)
        rows = list({
            (n, r["task"], r["sample"]): {"kind": n.split("-")[0], "seed": int(n.split("-")[1]), **r}  # the later one knows more
            for n in folders for r in _lines(self.work / f"rows-{n}.jsonl")
        }.values())  # fmt: skip
        self.write("evaluation", rows)
        self.result["evaluation"] = found = compared(rows, ("sft", "single", "multi"))
        for value in ("first", "best"):
            say(f"{value}: {found[value]['answers']} answers of each checkpoint")
            for name, told in list(found[value].items())[1:]:
                say(f"{value} answer, {name}: {told['mean']} [{told['low']}, {told['high']}]")

    def ppo(self) -> None:
        """Schedules: learnt, exported, graded beside the experts as they are."""
        a, seconds, out = self.a, self.budget.take("ppo"), self.work / "ppo"
        began = time.monotonic()
        backend = "cuda" if self.cuda else "cpu"
        ours = {
            "tasks": a.ppo_tasks, "split": "all", "batch": 16, "minibatch": 16, "lr": 0.002, "entropy": 0.003,
            "workers": min(4, self.cores - 1), "save_every": 1, "iterations": 1000,
        }  # fmt: skip
        fixed = {"backend": backend, "out": str(out), "minutes": round(0.45 * seconds / 60, 3)}
        command = [sys.executable, str(ROOT / "train/ppo.py"), self.settings("ppo", "ppo", ours, fixed)]

        def said() -> str:
            last = (_lines(out / "log.jsonl") or [{}])[-1]
            return f"ppo: {last.get('gradings', 0)} gradings, gain {last.get('gain')}"

        self.run("ppo", {"ppo": command}, 0.7 * seconds, said)
        if not list(out.glob("checkpoints/0*")):
            raise RuntimeError("PPO ended no iteration in its time")
        files = {"policy": out / "policy.jsonl", "best": out / "best.jsonl"}
        tasks = [f"tasks={a.ppo_tasks}", "split=all"]
        exports = {
            n: [*command[:2], "export", f"checkpoint={out}", *tasks, f"out={f}", f"best={n == 'best'}"] for n, f in files.items()
        }  # fmt: skip
        self.run("export", {f"export-{n}": c for n, c in exports.items()}, max(20.0, seconds - (time.monotonic() - began)))
        found = {n: str(f) for n, f in [("default", out / "policy.default.jsonl"), *files.items()] if f.is_file()}
        left = seconds - (time.monotonic() - began)
        command = self.job(
            "schedules", left, kind="schedules", files=found, backend=backend, workers=a.workers or max(1, self.cores - 2),
            repetitions=a.repetitions, rows=str(self.work / "schedules.jsonl"),
        )  # fmt: skip
        self.run("schedules", {"schedules": command}, left)
        rows, log = _lines(self.work / "schedules.jsonl"), _lines(out / "log.jsonl")
        settings = {n: {r["task"]: r["settings"] for r in _lines(Path(f))} for n, f in found.items() if n != "default"}
        self.write("ppo", {"log": log, "settings": settings, "graded": rows})
        self.result["ppo"] = {"backend": backend, "gradings": log[-1]["gradings"] if log else 0, **beside(rows)}
        say(f"ppo: {json.dumps(self.result['ppo'])[:800]}")

    def all(self) -> int:
        """Every step that was asked for; one that fails leaves the others what they can do."""
        for name in SHARES:
            if not (name in self.parts or (name == "grpo" and self.modes)):
                continue
            try:
                getattr(self, name)()
            except Exception as e:
                self.result["failures"][name] = traceback.format_exc()[-2000:]
                say(f"{name} failed: {type(e).__name__}: {e}")
            self.result["seconds"] = round(self.budget.elapsed, 1)
            self.write("training", self.training)
            self.write("evidence", self.result)
        if not self.a.work:
            shutil.rmtree(self.work, ignore_errors=True)
        say(f"{len(self.result['failures'])} failures; {self.a.out}")
        return 1 if self.result["failures"] else 0


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "transformers", "trl", "accelerate", "ray", "gymnasium"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--data", help="demonstrations, as train/data.py writes them (part sft)")
    p.add_argument("--minutes", type=float, default=9.0)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--parts", default=",".join(PARTS))
    p.add_argument("--config", help="YAML with sections build, sft, grpo, ppo: over this script's own values")
    p.add_argument("--model", help="begin with this checkpoint instead of random weights")
    p.add_argument("--work", help="folder of checkpoints, kept; default: a temporary one")
    p.add_argument("--backend", default="cpu", help="of gradings but PPO's: cpu, or cuda (never timed: runs share the GPU)")
    p.add_argument("--workers", type=int, help="gradings at a time of each process; default: the cores, shared out")
    p.add_argument("--wall", type=float, default=20.0, help="seconds of one grading")
    for name, value, text in (
        ("hidden", 512, "width"), ("layers", 8, "of the model"), ("heads", 8, "of attention"), ("vocab", 4096, "tokens"),
        ("context", 4096, "tokens"), ("length", 1024, "tokens of one answer"), ("turns", 2, "of multi, and of the evaluation"),
        ("generations", 8, "answers of a group"), ("batch", 64, "gradings of a step, at most"),
        ("gradings", 1024, "of each run"), ("samples", 4, "answers to each task of the eval split"),
        ("round", 1, "of these at a time"), ("repetitions", 5, "of the grading of schedules"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    p.add_argument("--train-tasks", default="*")
    p.add_argument("--eval-tasks", default="*")
    p.add_argument("--ppo-tasks", default="activation/gelu_fp16,math/add,reduce/sum,reduce/argmax,math/softmax,optimizer/SGD")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    asked = a.parts.split(",")
    if unknown := set(asked) - set(PARTS):
        p.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if not a.child and "sft" in asked and not (a.data and Path(a.data).exists()):
        p.error("--data: no demonstrations; make them with train/data.py")
    if a.seeds < 1 or not a.minutes > 0 or a.turns < 1:
        p.error("--seeds, --minutes and --turns are above 0")
    if a.batch % (a.generations * a.turns):
        p.error(f"--batch {a.batch} is no multiple of --generations {a.generations} x --turns {a.turns}")
    if math.ceil(a.gradings / MARKS) < a.batch:
        p.error(f"--gradings {a.gradings}: at least {MARKS} steps of --batch {a.batch}, {MARKS * a.batch} in all")
    return a


@contextlib.contextmanager
def _polite() -> Iterator[None]:
    """SIGTERM ends the children too."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when all was done, 1 when something failed, 130 when interrupted; what was found is in OUT either way."""
    a = arguments(argv)
    if a.child:
        return child(a.child)
    with _polite():
        try:
            return Evidence(a).all()
        except KeyboardInterrupt:
            say("interrupted")
            return 130


if __name__ == "__main__":
    sys.exit(main())
