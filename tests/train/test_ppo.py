"""train/ppo.py: learning on a fake grader, checkpoints, resumption, inference without Ray, export, errors."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kbx_env.eval import report
from kbx_env.train import ppo, ppo_run
from kbx_env.train.schedule_export import ExportSettings, export
from kbx_env.train.schedule_policy import About, ScheduleAgent, ScheduleNet, newest, save_policy

from kbx_env.envs import schedule_features as features
from kbx_env.envs.schedule import SLOTS, template
from kbx_env.envs.schedule_env import ScheduleEnv
from kbx_env.errors import SandboxError, UsageError
from kbx_env.executor.pools import ray_session
from kbx_env.extras import install_hint
from kbx_env.outcome import Cases, Estimate, Evidence, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source

pytest.importorskip("omegaconf")
ROOT = Path(__file__).resolve().parents[2]
TASKS = "math/add,math/exp_sqrt"
WARPS = SLOTS.index("warps")


def fake_grade(task: str, source: str, **options) -> Outcome:
    """Eight warps are best, one is lost by the machine, sixteen are wrong."""
    common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": options["grading"]}
    if "num_warps=1)" in source:
        return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, **common)
    if "num_warps=16)" in source:
        return Outcome(
            verdict=Verdict.INCORRECT, fault=Fault.POLICY, cases=Cases(1, 4, (), 1, 4), evidence=Evidence(1), **common
        )
    share = 0.9 if "num_warps=8)" in source else 0.4
    made = Estimate("h200", 1.0, share, (), "")
    return Outcome(verdict=Verdict.CORRECT, cases=Cases(4, 4, (), 4, 4), evidence=Evidence(1), estimate=made, **common)


def slow_grade(task: str, source: str, **options) -> Outcome:
    time.sleep(0.02)
    return fake_grade(task, source, **options)


def _settings(out: Path, **more) -> ppo.PPOSettings:
    given = {
        "tasks": TASKS,
        "split": "all",
        "backend": "cpu",
        "batch": 32,
        "hiddens": [16],
        "lr": 1e-2,
        "save_every": 2,
    }
    return ppo.PPOSettings(out=str(out), **{**given, **more})


@pytest.fixture(scope="module")
def ray() -> Iterator[object]:
    pytest.importorskip("ray.rllib")
    module, mine = ray_session.connect("local", 2)
    yield module
    if mine:
        ray_session.disconnect()


@pytest.fixture(scope="module")
def run(ray: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    ppo.train(_settings(out, iterations=11), fake_grade)
    return out


def _log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / ppo_run.LOG).read_text().splitlines()]


def test_it_learns_what_is_rewarded(run: Path) -> None:
    log = _log(run)
    assert [r["iteration"] for r in log] == list(range(1, 12)) and log[-1]["steps"] >= 11 * 32
    assert log[-1]["gain"] > log[0]["gain"] and 0 <= log[0]["correct"] < 1 and any(r["masked"] for r in log)
    assert {"gradings", "reward", "default", "seconds"} <= set(log[0]) and log[-1]["gradings"] < log[-1]["steps"] / 2
    agent = ScheduleAgent.load(run)
    for task in TASKS.split(","):
        assert 8 in agent.settings(task).values() and "num_warps=8)" in agent.source(task)
    best = json.loads((run / ppo_run.BEST).read_text())
    warps = template("math/add").slots[WARPS][0].name
    assert best["math/add"][warps] == 8
    greedy = json.loads((run / ppo_run.GREEDY).read_text())
    assert greedy["math/add"]["value"] > greedy["math/add"]["default"]


def test_rays_module_and_the_agent_agree(run: Path) -> None:
    from ray.rllib.core.rl_module.rl_module import RLModule

    module = RLModule.from_checkpoint(str(newest(run) / "rllib/learner_group/learner/rl_module/default_policy"))
    agent = ScheduleAgent.load(run)
    seen = torch.from_numpy(np.stack([agent.observe(t) for t in ("math/add", "matrixmultiply/matmul")]))
    theirs = module.forward_inference({"obs": seen})["action_dist_inputs"]
    torch.testing.assert_close(theirs, agent.net.logits(seen))


def test_resumption_goes_on_where_the_checkpoint_was(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ppo.train(_settings(out, iterations=3, save_every=2), fake_grade)
    before = _log(out)
    # As if it had been killed after the third iteration, before its checkpoint.
    subprocess.run(["rm", "-r", str(newest(out))], check=True)
    half = out / "checkpoints" / "000009.part"
    half.mkdir()
    (half / "policy.json").write_text("{}")
    weights = ScheduleAgent.load(out).net.state_dict()
    ppo.train(ppo.PPOSettings(resume=str(out), iterations=4), fake_grade)
    after = _log(out)
    assert [r["iteration"] for r in after] == [1, 2, 3, 4] and after[:2] == before[:2]
    assert after[2]["gradings"] >= after[1]["gradings"] and after[3]["seconds"] > after[1]["seconds"]
    assert any((weights[k] != v).any() for k, v in ScheduleAgent.load(out).net.state_dict().items())


def test_a_killed_run_keeps_its_gradings(tmp_path: Path) -> None:
    pytest.importorskip("ray.rllib")
    out = tmp_path / "run"
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "import test_ppo as t; from pathlib import Path; from kbx_env.train import ppo\n"
        f"ppo.train(t._settings(Path({str(out)!r}), iterations=10**6, save_every=1), t.slow_grade)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (out / "checkpoints" / "000002").exists():
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    at = int(newest(out).name)
    asked = []

    def counting(task: str, source: str, **options) -> Outcome:
        asked.append(source)
        return fake_grade(task, source, **options)

    known = {r["task"] + str(sorted(r["settings"].items())) for r in _steps(out) if not r["masked"]}
    ppo.train(ppo.PPOSettings(resume=str(out), iterations=at + 1), counting)
    assert [r["iteration"] for r in _log(out)] == list(range(1, at + 2))
    new = {r["task"] + str(sorted(r["settings"].items())) for r in _steps(out) if not r["masked"]} - known
    lost = sum("num_warps=1)" in s for s in asked)
    assert len(asked) - lost <= len(new) + len(TASKS.split(","))


def _steps(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / ppo_run.STEPS).read_text().splitlines() if line.endswith("}")]


def _policy(folder: Path, **more) -> Path:
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    about = About(**{"hiddens": (8,), "backend": "cpu", "device": "h200", "max_turns": 1, **more})
    save_policy(folder, ScheduleNet(about.hiddens, about.reach).state_dict(), about)
    return folder


def test_runs_that_share_a_store_grade_nothing_twice(ray: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def schedules(seed: int, store: str) -> dict[tuple[str, str], int]:
        """By task and schedule the gradings of all its steps."""
        out, found = tmp_path / f"run{seed}", collections.Counter[tuple[str, str]]()
        ppo.train(_settings(out, iterations=1, seed=seed, store=store), fake_grade)
        for row in map(json.loads, (out / ppo_run.STEPS).read_text().splitlines()):
            found[row["task"], json.dumps(row["settings"])] += 0 if row["masked"] else row["gradings"]
        assert not (out / ppo_run.STORE).exists()
        return dict(found)

    # Named from a folder; a resumed run finds it from another one, and may share another.
    monkeypatch.chdir(tmp_path)
    first, second = schedules(0, "shared.sqlite"), schedules(1, str(tmp_path / "shared.sqlite"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ppo.train(ppo.PPOSettings(resume=str(tmp_path / "run0"), iterations=2), fake_grade)
    assert not list((tmp_path / "elsewhere").iterdir())
    ppo.train(ppo.PPOSettings(resume=str(tmp_path / "run0"), iterations=3, store="other.sqlite"), fake_grade)
    assert [p.name for p in (tmp_path / "elsewhere").iterdir() if p.suffix == ".sqlite"] == ["other.sqlite"]
    with pytest.raises(UsageError, match="holds a run already"):
        ppo.train(_settings(tmp_path / "run0", store="left.sqlite"), fake_grade)
    assert not (tmp_path / "elsewhere/left.sqlite").exists()
    known = first.keys() & second.keys()
    assert len(known) > 3 and sum(first.values()) > 0 and not any(second[k] for k in known)


def test_an_agent_needs_no_ray(tmp_path: Path) -> None:
    folder = _policy(tmp_path / "p")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['ray'] = None\n"
        "from kbx_env.train.schedule_policy import ScheduleAgent\n"
        f"print(ScheduleAgent.load({str(folder)!r}).source('math/add'))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == ScheduleAgent.load(folder).source("math/add").strip() and "def add" in told


def test_moves_that_change_nothing_are_never_chosen(tmp_path: Path) -> None:
    agent = ScheduleAgent.load(_policy(tmp_path / "p"))
    for task in ("math/add", "matrixmultiply/matmul", "linearalgebra/qr"):
        seen = agent.observe(task)
        assert seen.shape == (len(features.NAMES),)
        for slot, move in enumerate(agent.act(seen)):
            assert agent.template(task).legal(slot)[move]


def test_an_agent_is_asked_about_sizes_as_an_env_shows_them(tmp_path: Path) -> None:
    agent = ScheduleAgent.load(_policy(tmp_path / "p"))
    for shapes, sizes in (("train", "published"), ("eval", "held-out")):
        env = ScheduleEnv(task="math/add", backend="cpu", shapes=shapes, grade=fake_grade)
        assert (env.reset()[0] == agent.observe("math/add", sizes)).all()
    assert (agent.observe("math/add") != agent.observe("math/add", "held-out")).any()
    with pytest.raises(UsageError, match="held-out, published"):
        export(ExportSettings(str(tmp_path / "p"), "math/add", "all", str(tmp_path / "s.jsonl"), sizes="all"))
    export(ExportSettings(str(tmp_path / "p"), "math/add", "all", str(tmp_path / "s.jsonl"), sizes="held-out"))
    assert json.loads((tmp_path / "s.jsonl").read_text())["settings"] == agent.settings("math/add", "held-out")


def test_an_agent_of_short_reach_acts_as_an_env_of_the_same(tmp_path: Path) -> None:
    agent = ScheduleAgent.load(_policy(tmp_path / "p", reach=1))
    env = ScheduleEnv(task="math/add", backend="cpu", reach=1, grade=fake_grade)
    seen = env.reset()[0]
    assert (seen == agent.observe("math/add")).all() and agent.about.reach == 1
    info = env.step(agent.act(seen))[4]
    assert info["settings"] == agent.settings("math/add") and info["source"] == agent.source("math/add")
    with torch.no_grad():  # one step further in every slot that has knobs, and never two
        agent.net.policy[-1].bias.view(len(SLOTS), 3)[:, 2] = 50.0
    knobs = [slot[0] for slot in agent.template("math/add").slots if slot]
    wanted = {k.name: k.choices[k.choices.index(k.value) + 1] for k in knobs}
    assert agent.settings("math/add") == wanted
    assert export(ExportSettings(str(tmp_path / "p"), "math/add", "all", str(tmp_path / "s.jsonl")))[2][0]["task"] == "math/add"


def test_a_policy_that_tells_no_reach_has_two(tmp_path: Path) -> None:
    folder = _policy(tmp_path / "p")
    about = json.loads((folder / "policy.json").read_text())
    assert about.pop("reach") == 2
    before = ScheduleAgent.load(folder).settings("math/add")
    (folder / "policy.json").write_text(json.dumps(about))
    assert ScheduleAgent.load(folder).about.reach == 2 and ScheduleAgent.load(folder).settings("math/add") == before


@pytest.mark.parametrize("reach", [1, 2])
def test_still_is_the_odds_of_not_moving(reach: int) -> None:
    torch.manual_seed(0)
    net = ScheduleNet([16], reach, 2.0)
    env = ScheduleEnv(task="matrixmultiply/matmul", backend="cpu", reach=reach, grade=fake_grade)
    logits = net.logits(torch.from_numpy(env.reset()[0])[None])[0].reshape(len(SLOTS), -1).detach()
    assert logits.shape[1] == 2 * reach + 1
    legal = np.array([env.template("matrixmultiply/matmul").legal(slot) for slot in range(len(SLOTS))])
    within = torch.from_numpy(legal[:, 2 - reach : 3 + reach])
    odds = (logits[:, reach : reach + 1] - logits).exp()
    others = within.clone()
    others[:, reach] = False
    assert others.any() and torch.allclose(odds[others], torch.tensor(2.0).exp(), rtol=0.2)
    assert (odds[~within] > 1e6).all()


def test_idle_knobs_stay_out(tmp_path: Path) -> None:
    names = tuple(k.name for slot in template("math/add").slots for k in slot)
    agent = ScheduleAgent.load(_policy(tmp_path / "p", idle={"math/add": names}))
    assert agent.settings("math/add") == {} and agent.source("math/add") == expert_source("math/add")


def test_export_of_choices_of_the_best_and_of_the_experts(run: Path, tmp_path: Path) -> None:
    out, beside, rows = export(ExportSettings(str(run), "math/*", "all", str(tmp_path / "a/s.jsonl")))
    plain = [json.loads(line) for line in beside.read_text().splitlines()]
    assert [r["task"] for r in rows] == [r["task"] for r in plain] and len(rows) > 10
    assert all(r["predict"] == expert_source(r["task"]) for r in plain) and {r["how"] for r in rows} == {"policy"}
    assert "num_warps=8)" in next(r for r in rows if r["task"] == "math/add")["predict"]
    rows = export(ExportSettings(str(run), "math/add,math/log", "all", str(out), best=True))[2]
    assert [r["how"] for r in rows] == ["best of training", "policy"]
    from kbx_env.baselines.replay import Replay

    assert set(Replay(str(out)).sources) == {"math/add", "math/log"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["tasks=mtah/add", "backend=cpu"], "math/add"),
        (["tasks=math/add", "backend=cpu", "split=all", "reward=estimate"], "estimated"),
        (["batch=0"], "at least 1"),
        (["workers=0"], "at least 1"),
        (["batch=67"], "a multiple of 8"),
        (["lr=0"], "above 0"),
        (["still=-1"], "0 or more"),
        (["still=.nan"], "0 or more"),
        (["reach=0", "tasks=math/add", "backend=cpu", "split=all"], "accepted: 1, 2"),
        (["store=/nowhere/gradings.sqlite", "tasks=math/add", "backend=cpu", "split=all"], "no folder '/nowhere'"),
        (["resume=/nowhere"], "no run"),
        (["export"], "checkpoint=DIR"),
        (["export", "checkpoint=/nowhere"], "no checkpoint"),
    ],
)
def test_bad_usage_is_one_line(argv: list[str], says: str, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ppo.main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("ppo.py: ") and says in told and told.count("\n") == 1 and "Traceback" not in told


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = _policy(tmp_path / "p")
    about = json.loads((folder / "policy.json").read_text())
    for bad in ({**about, "features": 0}, {**about, "hiddens": [9]}, {**about, "reach": 1}, {**about, "reach": 0}, {"a": 1}, [1]):
        (folder / "policy.json").write_text(json.dumps(bad))
        with pytest.raises(UsageError):
            ScheduleAgent.load(folder)
    (folder / "policy.json").write_text(json.dumps(about))
    (folder / "policy.npz").write_bytes(b"junk")
    with pytest.raises(UsageError):
        ScheduleAgent.load(folder)
    with pytest.raises(UsageError):
        export(ExportSettings(str(_policy(tmp_path / "q")), best=True, out=str(tmp_path / "x.jsonl")))


def test_masked_episodes_teach_nothing(ray: object) -> None:
    from kbx_env.train.ppo_rllib import WithoutMasked

    class Seen:
        def __init__(self, *masked: bool) -> None:
            self.infos = [{"masked": m} for m in masked]

        def get_infos(self) -> list[dict]:
            return self.infos

    good, bad = Seen(False, False), Seen(False, True)
    episodes = [bad, good, bad]
    WithoutMasked()(batch={}, episodes=episodes)
    assert episodes == [good]
    episodes = [bad, bad]
    WithoutMasked()(batch={}, episodes=episodes)
    assert episodes == [bad]


def test_several_gradings_an_episode(ray: object, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="a multiple of that"):
        ppo.train(_settings(out, max_turns=3), fake_grade)
    ppo.train(_settings(out, iterations=2, batch=24, max_turns=3, relative=False), fake_grade)
    # Whole episodes: each step of an iteration is a grading, the envs' resets between episodes are none.
    assert [r["steps"] for r in _log(out)] == [24, 48] and ScheduleAgent.load(out).about.max_turns == 3


def _lost(task: str, source: str, **options) -> Outcome:
    return Outcome(task, Verdict.INFRA_FAULT, Stage.CORRECT, "cpu", "contract", Fault.INFRA, "no memory left")


def _refused(task: str, source: str, **options) -> Outcome:
    raise UsageError("the grader refuses this")


@pytest.mark.parametrize(("grade", "error", "says"), [(_lost, SandboxError, "no memory left"), (_refused, UsageError, "refuses")])
def test_a_run_that_cannot_grade_ends_and_says_why(ray: object, grade, error, says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        ppo.train(_settings(tmp_path / "run", iterations=10, batch=4), grade)
    assert len(_log(tmp_path / "run")) < ppo.PATIENCE if (tmp_path / "run/log.jsonl").exists() else grade is _refused


def test_a_run_of_an_earlier_version_goes_on(ray: object, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ppo.train(_settings(out, iterations=1, batch=8), fake_grade)
    about = json.loads((out / ppo_run.RUN).read_text())
    (out / ppo_run.RUN).write_text(json.dumps(about | {"workers": 0}))  # they graded in the main process
    ppo.train(ppo.PPOSettings(resume=str(out), iterations=2), fake_grade)
    assert [r["iteration"] for r in _log(out)] == [1, 2]


def test_a_run_begins_near_the_expert_and_a_resumed_one_adds_nothing(ray: object, tmp_path: Path) -> None:
    from ray.rllib.core.rl_module.rl_module import RLModule

    out = tmp_path / "run"
    ppo.train(_settings(out, iterations=1, lr=1e-9, reach=1, still=6.0), fake_grade)
    steps = _steps(out)
    assert len(steps) >= 32 and sum(not r["settings"] for r in steps) > 0.9 * len(steps)
    module = RLModule.from_checkpoint(str(newest(out) / "rllib/learner_group/learner/rl_module/default_policy"))
    kept = [module.net.policy[-1].bias, ScheduleAgent.load(out).net.policy[-1].bias]
    for asked, says in (({"reach": 1, "still": 3.0}, "keeps its still"), ({"still": 6.0, "split": "eval"}, "keeps its split")):
        with pytest.raises(UsageError, match=says):
            ppo.train(ppo.PPOSettings(resume=str(out), **asked), fake_grade)
    ppo.train(ppo.PPOSettings(resume=str(out), iterations=2), fake_grade)
    assert len(_log(out)) == 2 and sum(not r["settings"] for r in _steps(out)) > 0.9 * len(_steps(out))
    kept.append(ScheduleAgent.load(out).net.policy[-1].bias)
    wanted = torch.tensor([0.0, 6.0, 0.0]).repeat(len(SLOTS))
    for bias in kept:
        torch.testing.assert_close(bias.detach(), wanted, atol=1e-3, rtol=0)
    assert ScheduleAgent.load(out).about.reach == 1


def test_the_compiler_says_which_numbers_take_a_slot(ray: object, tmp_path: Path, monkeypatch) -> None:
    from kbx_env.baselines.search import compile_report

    class Compiler:
        def __call__(self, task: object, source: str) -> compile_report.CompileReport:
            warps = source.partition("num_warps")[2][:4]  # no block size makes a difference
            return compile_report.CompileReport(launch_hash=warps)

        def close(self) -> None:
            pass

    monkeypatch.setattr(compile_report, "Compiler", Compiler)
    out = tmp_path / "run"
    ppo.train(_settings(out, iterations=1, screen=True), fake_grade)
    block = template("math/add").slots[0][0].name
    assert json.loads((out / "idle.json").read_text())["math/add"] == [block]
    assert all(set(r["settings"]) <= {template(r["task"]).slots[WARPS][0].name} for r in _steps(out))
    agent = ScheduleAgent.load(out)
    assert agent.template("math/add").slots[0] == () and block not in agent.settings("math/add")


def test_a_folder_in_use_and_other_settings_are_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="resume="):
        ppo.train(_settings(run), fake_grade)
    with pytest.raises(UsageError, match="keeps its lr"):
        ppo.train(ppo.PPOSettings(resume=str(run), lr=0.5), fake_grade)
    with pytest.raises(UsageError, match="keeps its reach"):
        ppo.train(ppo.PPOSettings(resume=str(run), reach=1), fake_grade)


def test_without_rllib_it_says_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    import kbx_env.train as package

    monkeypatch.delattr(package, "ppo_rllib", raising=False)
    monkeypatch.setitem(sys.modules, "kbx_env.train.ppo_rllib", None)
    assert ppo.main(["tasks=math/add", "split=all", "backend=cpu", f"out={tmp_path}/o"]) == 2
    assert install_hint("rllib") in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("argv", [["tasks=math/add"], ["export", "checkpoint=x"]])
def test_without_omegaconf_it_names_the_extra_of_ppo(argv: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert ppo.main(argv) == 2
    said = capsys.readouterr().err
    assert "omegaconf" in said and install_hint("rllib") in said and install_hint("trl") not in said


def test_the_whole_way_on_the_cpu(tmp_path: Path) -> None:
    """Two iterations with the real grader, then export and an ordinary report on the export."""
    pytest.importorskip("ray.rllib")
    out, file = tmp_path / "run", tmp_path / "s.jsonl"
    command = [sys.executable, "train/ppo.py", "train/configs/tiny-ppo.yaml", f"out={out}"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    log = _log(out)
    assert [r["iteration"] for r in log] == [1, 2] and log[-1]["correct"] == 1.0 and log[-1]["default"] > 1.5
    assert ppo.main(["export", f"checkpoint={out}", "tasks=math/add,math/exp_sqrt", f"out={file}"]) == 0
    policies = [f"--policy=replay:{file}", f"--policy=replay:{tmp_path}/s.default.jsonl"]
    asked = ["--backend=cpu", "--split=all", "--workers=1", f"--tasks={TASKS}", f"--out={tmp_path}/report"]
    assert report.main([*policies, *asked]) == 0
    told = json.loads((tmp_path / "report/report.json").read_text())["policies"]
    assert [sorted(row["task"] for row in p["tasks"]) for p in told] == [TASKS.split(",")] * 2
