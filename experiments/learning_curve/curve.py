"""The learning curve of a run of TRL: prints it while the run goes on, keeps it as ``curve.jsonl``, draws it as ``curve.png``.

    python experiments/learning_curve/curve.py runs/learn/seed-*/curve.jsonl --out curve.png      # several runs in one picture
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.eval import plot_style as style
from transformers import PrinterCallback, TrainerCallback

from kbx_env import jsonl

FILE = "curve.jsonl"
"""File of the curve, in the folder of a run: one line for each step."""
SHARE = 0.05
"""Share of the steps at either end whose mean is the reward at the start and at the end."""
_LOGGED = {"reward": "reward", "correct": "kernel/correct_rate", "compiles": "kernel/compile_rate"}
"""Names in the curve, and in the log of a run with ``kbx_env.trl.KernelReward``."""
_PANELS = {"reward": "Reward", "correct": "Correct kernels", "compiles": "Kernels that compile"}


class Printer(TrainerCallback):
    """Prints a line of some numbers whenever the trainer logs."""

    def __init__(self, name: str, steps: int, shown: Mapping[str, str]) -> None:
        """Print nothing yet.

        Args:
            name: begins each line.
            steps: steps of the whole run.
            shown: names in the trainer's log, by the names that are printed.
        """
        self._name, self._steps, self._shown = name, steps, shown
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since training began."""
        return time.monotonic() - self._began

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print one line."""
        if all(key in (logs or {}) for key in self._shown.values()):
            numbers = ", ".join(f"{name} {float((logs or {})[key]):.2f}" for name, key in self._shown.items())
            print(f"{self._name} {state.global_step:3d} of {self._steps}: {numbers}, {self.seconds():.0f} s", flush=True)


class Curve(Printer):
    """Prints each step of GRPO with ``KernelReward``, and writes it to ``curve.jsonl``."""

    def __init__(self, out: str | Path, steps: int) -> None:
        """Begin an empty curve.

        Args:
            out: folder of the run.
            steps: steps of the whole run.
        """
        super().__init__("grpo", steps, _LOGGED)
        self.file = Path(out) / FILE
        self.file.parent.mkdir(parents=True, exist_ok=True)
        jsonl.write(self.file, [])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print and write one line."""
        super().on_log(args, state, control, logs, **kwargs)
        if logs is not None and "reward" in logs:
            answers = state.global_step * args.generation_batch_size // args.steps_per_generation
            line = {"step": state.global_step, "answers": answers, "seconds": round(self.seconds(), 1)}
            jsonl.append(self.file, line | {name: round(float(logs[key]), 5) for name, key in _LOGGED.items() if key in logs})


def only_ours(trainer: Any, callback: TrainerCallback) -> None:
    """Let a trainer report by a callback, instead of a dictionary for each step."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callback)


def prepare() -> None:
    """Check that the curve can be drawn, and switch off the libraries' progress bars and warnings about future versions.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check()
    import datasets
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def ends(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """Return the mean of a number over the first and over the last twentieth of the steps.

    Args:
        lines: of the curve, at least one.
        name: ``reward``, ``correct`` or ``compiles``.

    Returns:
        Both means.
    """
    values = [line[name] for line in lines if line.get(name) is not None]
    some = max(1, round(SHARE * len(values)))
    return statistics.fmean(values[:some]), statistics.fmean(values[-some:])


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one line that says how reward and correct kernels changed."""
    reward, correct = ends(lines, "reward"), ends(lines, "correct")
    answers = lines[-1]["answers"]
    return (
        f"reward {reward[0]:.2f} -> {reward[1]:.2f}, correct kernels {100 * correct[0]:.0f} % -> {100 * correct[1]:.0f} % "
        f"(first and last twentieth of {answers:,} answers)"
    )


def draw(files: Sequence[str | Path], png: str | Path) -> Path:
    """Draw reward, correct kernels and kernels that compile against the number of graded answers; a line for each run.

    Args:
        files: curves of runs.
        png: the picture.

    Returns:
        The picture.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check()
    runs = [jsonl.read(f) for f in files]
    with style.themed():
        sheet = style.sheet("learning curve", 2.9)
        for axes, (name, title) in zip(sheet.subplots(1, len(_PANELS), sharey=True), _PANELS.items(), strict=True):
            for lines, colour in zip(runs, [*style.PALETTE, *[style.GREY] * len(runs)]):
                known = [(line["answers"], line[name]) for line in lines if line.get(name) is not None]
                axes.plot(*zip(*known), ".", color=colour, markersize=3, alpha=0.35)
                axes.plot([a for a, _ in known], _smooth([v for _, v in known]), color=colour, linewidth=1.8)
            axes.set_title(title)
            axes.set_xlabel("graded answers")
            axes.set_xlim(0, None)
            axes.set_ylim(-0.02, 1.02)
        note = f"dots: one step; lines: mean over a twentieth of the steps; {len(runs)} run{'s' * (len(runs) != 1)}"
        sheet.supxlabel(note, fontsize=8, x=0.99, ha="right", alpha=style.DIM)
        style.settled(sheet).savefig(png, dpi=150, metadata={"Software": None})
    return Path(png)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a twentieth of the values around each; the window is cut off at both ends."""
    half = max(1, round(SHARE * len(values))) // 2
    return [statistics.fmean(values[max(0, k - half) : k + half + 1]) for k in range(len(values))]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw several curves; prints how each run began and ended."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("curves", nargs="+", type=Path)
    p.add_argument("--out", type=Path, default=Path("curve.png"))
    a = p.parse_args(argv)
    for file in a.curves:
        print(f"{file}: {summary(jsonl.read(file))}")
    print(draw(a.curves, a.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
