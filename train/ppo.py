"""PPO (RLlib) learns schedules of the project's own kernels: block sizes, warps and stages, with one grading a step.

    python train/ppo.py train/configs/tiny-ppo.yaml out=runs/ppo
    python train/ppo.py train/configs/ppo.yaml iterations=100 workers=4
    python train/ppo.py resume=runs/ppo [iterations=200]          continues a run that was killed
    python train/ppo.py export checkpoint=runs/ppo tasks='math/*' out=schedules.jsonl [best=true]

An export is graded like any policy: ``python eval/report.py --policy replay:schedules.jsonl --policy
replay:schedules.default.jsonl``. Training needs the extra ``rllib``; export and ``ScheduleAgent`` do not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbx_env.train import ppo_run
from kbx_env.train import settings as reading
from kbx_env.train.ppo_envs import MOST
from kbx_env.train.ppo_run import Progress
from kbx_env.train.schedule_export import ExportSettings, best_of, export
from kbx_env.train.schedule_policy import CHECKPOINTS, About, ScheduleAgent, newest

from kbx_env import jsonl
from kbx_env.envs.schedule import find_idle
from kbx_env.envs.schedule_env import ScheduleEnv
from kbx_env.errors import KbxError, SandboxError, UsageError
from kbx_env.executor.pools import ray_session
from kbx_env.extras import install_hint
from kbx_env.outcome import Outcome

MAY_CHANGE = ("iterations", "gradings", "minutes", "workers", "save_every", "store")
"""Settings that a resumed run may change."""
PATIENCE = 3
"""A run ends after so many iterations in a row of which the machine lost every grading."""


@dataclass
class PPOSettings:
    """Settings of a training run."""

    tasks: str = "*"
    """Glob over task ids, comma-separated."""
    split: str = "train"
    """train, eval or all tasks."""
    backend: str = "auto"
    """auto, cpu or cuda."""
    reward: str = ""
    """A reward preset; empty for ``estimated`` on the CPU (a cost model's estimate) and ``default`` on CUDA (measured speed)."""
    relative: bool = True
    """Subtract the reward of the unchanged expert."""
    shapes: str = "train"
    """train, or eval: also grade on the held-out shapes, and time (on the CPU estimate) held-out sizes."""
    max_turns: int = 1
    """Gradings of an episode."""
    reach: int = 2
    """Longest move, in steps along a knob's choices: 1 or 2."""
    screen: bool = False
    """First find out with the compiler which knobs change the code of the timed shapes (a second a knob); others get no slot."""
    wall: float = 30.0
    """Seconds for one grading."""
    iterations: int = 50
    """Iterations in all, with those before a resumption."""
    gradings: int = 0
    """End after so many gradings (those from the store do not count); 0 for no such limit."""
    minutes: float = 0.0
    """End after so many minutes; 0 for no such limit."""
    batch: int = 64
    """Steps of an iteration."""
    minibatch: int = 32
    """Steps of an update."""
    epochs: int = 8
    """Passes over the steps of an iteration."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    clip: float = 0.2
    """PPO's clip range."""
    hiddens: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the layers."""
    still: float = 0.0
    """Initial logit of leaving a slot as it is; e^still are its odds against any one move. 0: even odds."""
    seed: int = 0
    """Seed of weights, sampling and order of tasks."""
    workers: int | None = None
    """Gradings at a time, each in a process of its own; null: as many as the cores allow."""
    save_every: int = 5
    """Iterations between checkpoints."""
    out: str = "runs/ppo"
    """Folder of the run."""
    store: str = ""
    """A file of gradings that several runs may share, so that none repeats another's; empty for gradings.sqlite in out."""
    resume: str = ""
    """The out= folder of a run to continue."""


def train(given: PPOSettings, grade: Callable[..., Outcome] | None = None) -> dict[str, Any]:
    """Train from the beginning, or continue a run.

    Args:
        given: the settings.
        grade: grades instead of the sandbox; several threads call it.

    Returns:
        By task the policy's final choice: its ``settings``, their reward ``value``, and the reward of the ``default`` schedule.

    Raises:
        UsageError: settings that cannot be used, a folder that is in use, or no Ray.
    """
    settings = _resumed(given) if given.resume else given
    _check(settings, new=not given.resume)
    out = Path(settings.out)
    env = _options(settings)
    _unused(out, resumed=bool(given.resume))
    settings = dataclasses.replace(settings, store=_shared(settings))
    # An env is made first, since it checks names and the shared store.
    probe = ScheduleEnv(**env, store=settings.store or None, grade=grade)
    try:
        algorithm_of = _rllib()
        _begin(out, settings)
        env["idle"] = _idle(settings, probe, out)
        device = probe.device.name if probe.device else None
        about = About(tuple(settings.hiddens), probe.backend, device, settings.max_turns, env["idle"], settings.reach)
        env["tasks"], env["backend"] = [t.id for t in probe.tasks], probe.backend
    finally:
        probe.close()
    progress, folder = Progress(), None
    if given.resume:
        progress, folder = ppo_run.restore(out)
    level = os.environ.get("RAY_BACKEND_LOG_LEVEL")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # each env runner would print a warning
    _, connected = ray_session.connect("local", 1)
    algorithm = None
    try:
        envs = {"file": str((out / ppo_run.STEPS).absolute()), "workers": settings.workers, "grade": grade}
        algorithm = algorithm_of(settings, envs | {"options": {**env, "store": _store(settings)}}, progress.iteration)
        if folder is not None:
            _load(algorithm, folder)
        _loop(algorithm, settings, about, progress, out)
    finally:
        if algorithm is not None:
            algorithm.stop()
        if connected:
            ray_session.disconnect()
        if level is None:  # Ray would print it in every process that this one starts
            os.environ.pop("RAY_BACKEND_LOG_LEVEL", None)
    return _greedy(ScheduleAgent.load(out), settings, env | {"grade": grade}, out)


def _check(s: PPOSettings, new: bool) -> None:
    for name in ("iterations", "batch", "minibatch", "epochs", "save_every", "max_turns"):
        if getattr(s, name) < 1:
            raise UsageError(f"{name} is {getattr(s, name)!r}; a whole number, at least 1")
    for name in ("gradings", "minutes"):
        if getattr(s, name) < 0:
            raise UsageError(f"{name} is {getattr(s, name)!r}; 0 or more")
    if s.workers is not None and s.workers < 1:
        raise UsageError(f"workers is {s.workers}; at least 1")
    if new and s.batch % s.max_turns:
        raise UsageError(f"batch is {s.batch}, an episode {s.max_turns} steps (max_turns); a multiple of that")
    if new and s.batch > MOST * s.max_turns and s.batch % (8 * s.max_turns):
        each = 8 * s.max_turns
        raise UsageError(f"batch is {s.batch}: above {MOST * s.max_turns} a multiple of {each}, to be graded side by side")
    if not 0 <= s.still < math.inf:
        raise UsageError(f"still is {s.still!r}; a number, 0 or more")
    if not s.lr > 0 or not s.hiddens or min(s.hiddens) < 1:
        raise UsageError(
            f"lr is {s.lr!r} and hiddens {s.hiddens!r}; a rate above 0, and at least one width of at least 1"
        )


def _load(algorithm: Any, folder: Path) -> None:
    try:
        algorithm.restore_from_path(str((folder / ppo_run.RLLIB).absolute()))
    except Exception as e:
        raise UsageError(f"{str(folder)!r} cannot be restored: {ray_session.last_line(e)}") from e


def _options(s: PPOSettings) -> dict[str, Any]:
    """Return the options of ``ScheduleEnv``."""
    return {
        "tasks": s.tasks, "split": s.split, "backend": s.backend, "reward": s.reward or None, "relative": s.relative,
        "shapes": s.shapes, "max_turns": s.max_turns, "reach": s.reach, "wall": s.wall,
    }  # fmt: skip


def _store(s: PPOSettings) -> str:
    """Return the file of gradings."""
    return s.store or str(Path(s.out, ppo_run.STORE).absolute())


def _shared(s: PPOSettings) -> str:
    """Return the shared file of gradings as an absolute path, since a run may be resumed elsewhere; empty where none is shared."""
    if not s.store:
        return ""
    file = Path(s.store).expanduser().absolute()
    if not file.parent.is_dir():
        raise UsageError(f"store={s.store}: there is no folder {str(file.parent)!r}; make it, or leave store= empty")
    return str(file)


def _rllib() -> Any:
    """Return a function that builds the algorithm.

    Returns:
        A function of the settings, the envs' config and the iteration to start at.

    Raises:
        UsageError: RLlib is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from kbx_env.train import ppo_rllib
    except ImportError as e:
        raise UsageError(f"training needs RLlib ({e}); install it: {install_hint('rllib')}") from e

    def build(s: PPOSettings, env: Mapping[str, Any], iteration: int) -> Any:
        # With the first seed, a resumed run would get the tasks of its first iterations again.
        return ppo_rllib.configure(
            env, hiddens=s.hiddens, still=s.still, batch=s.batch, max_turns=s.max_turns, minibatch=s.minibatch, epochs=s.epochs,
            lr=s.lr, entropy=s.entropy, clip=s.clip, seed=s.seed + 100_003 * iteration,
        ).build_algo()  # fmt: skip

    return build


def _unused(out: Path, resumed: bool) -> None:
    if not resumed and (out / ppo_run.RUN).exists():
        raise UsageError(f"{str(out)!r} holds a run already; go on with resume={out}, or choose another out=")


def _begin(out: Path, s: PPOSettings) -> None:
    try:
        (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        ppo_run.write(out / ppo_run.RUN, dataclasses.asdict(s))
        reading.save(s, out)
    except OSError as e:
        raise UsageError(f"cannot write to {str(out)!r}: {e}") from e


def _resumed(given: PPOSettings) -> PPOSettings:
    """Return the settings of the run to continue, with those that may change taken from the command line."""
    file = Path(given.resume) / ppo_run.RUN
    try:
        known = {f.name for f in dataclasses.fields(PPOSettings)}
        saved = PPOSettings(**{k: v for k, v in json.loads(file.read_text()).items() if k in known})
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise UsageError(f"resume={given.resume!r} is no run of train/ppo.py: {file} cannot be read ({e})"[:300]) from e
    plain = PPOSettings()
    changed_here = {k for k in known - {"resume", "out"} if getattr(given, k) != getattr(plain, k)}
    fixed = sorted(k for k in changed_here - set(MAY_CHANGE) if getattr(given, k) != getattr(saved, k))
    if fixed:
        raise UsageError(f"a resumed run keeps its {fixed[0]}; only {', '.join(MAY_CHANGE)} may change")
    changed = {k: getattr(given, k) for k in changed_here & set(MAY_CHANGE)}
    if saved.workers == 0:  # runs of earlier versions wrote 0 for the default
        changed = {"workers": None} | changed
    return dataclasses.replace(saved, out=given.resume, resume="", **changed)


def _idle(s: PPOSettings, env: ScheduleEnv, out: Path) -> dict[str, tuple[str, ...]]:
    if not s.screen:
        return {}
    file = out / "idle.json"
    if file.exists():
        return {t: tuple(names) for t, names in json.loads(file.read_text()).items()}
    from kbx_env.baselines.search.compile_report import Compiler
    from rich.console import Console

    from kbx_env.spec.catalog import load_task

    compiler, found = Compiler(), {}
    try:
        with Console(stderr=True).status("asking the compiler which numbers matter") as status:
            for n, task in enumerate(t.id for t in env.tasks):
                status.update(f"asking the compiler which numbers matter: {task} ({n + 1} of {len(env.tasks)})")
                found[task] = find_idle(task, lambda source, task=task: compiler(load_task(task), source).launch_hash)  # type: ignore[misc]
    finally:
        compiler.close()
    ppo_run.write(file, found)
    return found


def _loop(algorithm: Any, s: PPOSettings, about: About, progress: Progress, out: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.monotonic() - progress.seconds
    saved, lost = -1, 0
    with Bar(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task("iterations", total=s.iterations, completed=progress.iteration)
        while progress.iteration < s.iterations and not _enough(progress, s):
            _train(algorithm)
            rows, progress.offset = ppo_run.rows_of(out / ppo_run.STEPS, progress.offset)
            lost = 0 if any(not r["masked"] for r in rows) else lost + 1
            if lost >= PATIENCE:
                why = next((r["message"] for r in reversed(rows) if r.get("message")), "nothing was graded")
                raise SandboxError(f"the machine lost every grading of {lost} iterations: {why}")
            line_of_log = progress.take(rows)
            progress.seconds = line_of_log["seconds"] = round(time.monotonic() - began, 2)
            jsonl.append(out / ppo_run.LOG, line_of_log)
            progress.log = (out / ppo_run.LOG).stat().st_size
            ppo_run.write(out / ppo_run.BEST, {t: b["settings"] for t, b in sorted(progress.best.items())})
            gain = "" if line_of_log["gain"] is None else f", gain {line_of_log['gain']:+.4f}"
            bar.update(line, completed=progress.iteration, description=f"{progress.gradings} gradings{gain}")
            if progress.iteration % s.save_every == 0:
                saved = progress.iteration
                ppo_run.save_checkpoint(algorithm, about, progress, out)
        if saved != progress.iteration:
            ppo_run.save_checkpoint(algorithm, about, progress, out)


def _train(algorithm: Any) -> None:
    """Do one iteration. RLlib wraps an env's error in one of its own; raise the original."""
    try:
        algorithm.train()
    except RuntimeError as e:
        if isinstance(e.__cause__, KbxError):
            raise e.__cause__ from None
        raise


def _enough(p: Progress, s: PPOSettings) -> bool:
    return (0 < s.gradings <= p.gradings) or (0 < s.minutes <= p.seconds / 60)


def _greedy(agent: ScheduleAgent, s: PPOSettings, options: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Grade the policy's choices for its own tasks; most of them have been graded in training."""
    found = {}
    best = best_of(newest(out))
    env = ScheduleEnv(**{**options, "store": _store(s)})
    try:
        for task in (t.id for t in env.tasks):
            seen, _ = env.reset(options={"task": task})
            info = env.step(agent.act(seen))[4]
            found[task] = {k: info[k] for k in ("settings", "value")} | {
                "default": env.default(task),
                "best": best.get(task),
            }
    finally:
        env.close()
    ppo_run.write(out / ppo_run.GREEDY, found)
    return found


def table(found: Mapping[str, Mapping[str, Any]], out: Path) -> Any:
    """Return a table of the policy's choices beside the unchanged experts.

    Args:
        found: the result of ``train``.
        out: folder of the run, for the title.

    Returns:
        A ``rich`` table.
    """
    from rich.table import Table

    rows = Table("task", "expert", "policy", "best seen", "policy's numbers", title=f"rewards ({out})")
    for task, row in sorted(found.items()):
        best = row["best"]["value"] if row["best"] else None
        figures = ["-" if v is None else f"{v:.4f}" for v in (row["default"], row["value"], best)]
        rows.add_row(task, *figures, ", ".join(f"{k}={v}" for k, v in row["settings"].items()) or "as it is")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when done, 1 when nothing can be graded, 2 on bad usage, 130 when interrupted."""
    from rich.console import Console

    given = list(sys.argv[1:] if argv is None else argv)
    what = (__doc__ or "").partition("\n")[0]
    try:
        if given[:1] == ["export"]:
            says = "Write a policy's schedules for replay:FILE.jsonl."
            files = export(reading.read(ExportSettings, given[1:], says, install_hint("rllib")))
            print(f"{len(files[2])} schedules: {files[0]}\nas they are: {files[1]}")
            return 0
        settings = reading.read(PPOSettings, given, what, install_hint("rllib"))
        Console().print(table(train(settings), Path(settings.resume or settings.out)))
    except KbxError as e:
        print(f"ppo.py: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except KeyboardInterrupt:
        print("interrupted; go on with resume=DIR, the run's out= folder", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
