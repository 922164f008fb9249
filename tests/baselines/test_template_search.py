"""The search that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from kbx_env.baselines.policy import Episodic, make_policy, policies
from kbx_env.baselines.search.compile_report import Compiler, CompileReport
from kbx_env.baselines.search.knobs import knobs_of
from kbx_env.baselines.template_search import TemplateSearch, build

from kbx_env.envs.episode import Episode
from kbx_env.errors import UsageError
from kbx_env.outcome import Build, Cases, Evidence, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task
from kbx_env.spec.task import Task

TASK = load_task("math/softmax")
SOURCE = expert_source("math/softmax") or ""


def values(source: str) -> dict[str, int]:
    return {k.name: k.value for k in knobs_of(source)}


class Fake:
    """A grader for which smaller numbers mean fewer bytes, and a compiler that likes everything."""

    def __init__(self, broken: str = "never") -> None:
        self.sources: list[str] = []
        self.asked: list[str] = []
        self.broken = broken

    def submit(self, sources: Sequence[str]) -> list[Outcome]:
        return [self.one(s) for s in sources]

    def one(self, source: str) -> Outcome:
        self.sources.append(source)
        if self.broken in source:
            return Outcome(TASK.id, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "c: off", Cases(0, 1))
        size = sum(values(source).values())
        return Outcome(TASK.id, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1),
                       evidence=Evidence(1, sector_bytes=size, moved_bytes=size))  # fmt: skip

    def compile(self, task: Task, source: str) -> CompileReport:
        self.asked.append(source)
        return CompileReport((Build("k", "sm_90", True, registers=32, spills=0, shared=0),), launches=1)


def search(fake: Fake, sample: int = 0, **options: Any) -> Any:
    policy = TemplateSearch(**{"compiler": fake.compile} | options)
    return policy.run(TASK, Episode(TASK, "cpu", fake.submit, sample=sample))


def test_it_is_found_by_name() -> None:
    assert "template-search" in policies() and "expert" in policies()
    policy: Any = make_policy("template-search")
    assert isinstance(policy, Episodic) and policy.needs.grader_feedback and not policy.needs.own_tests
    policy = make_policy("template-search:random,evals=3,seed=7")
    assert (policy.method, policy.evals, policy.seed) == ("random", 3, 7)


@pytest.mark.parametrize(
    "argument", ["greedy", "evals=0", "evals=x", "evals=", "halving,random", "seed=-1", "evals=2,evals=3", "depth=2", "eta=1", ","]
)
def test_a_bad_argument_names_the_accepted_ones(argument: str) -> None:
    with pytest.raises(UsageError, match="random or halving, evals=N"):
        build(argument)


@pytest.mark.parametrize("method", ["random", "halving"])
def test_the_budget_and_what_comes_first(method: str) -> None:
    fake = Fake()
    made = search(fake, method=method, evals=9)
    assert fake.sources[0] == SOURCE and len(fake.sources) == 9 == len(made.turns) == made.notes["evals"]
    assert len(set(fake.sources)) == 9
    assert made.turns[0].label == "as it is" and [t.round for t in made.turns] == sorted(t.round for t in made.turns)


@pytest.mark.parametrize("method", ["random", "halving"])
def test_the_best_is_handed_in_and_explained(method: str) -> None:
    fake = Fake()
    made = search(fake, method=method, evals=9)
    least = min(sum(values(s).values()) for s in fake.sources)
    assert sum(values(made.source).values()) <= 1.02 * least
    assert "MB in sectors" in made.notes["rank"] and made.notes["seconds"] >= 0
    assert made.notes["knobs"] == {n: v for n, v in values(made.source).items() if v != values(SOURCE)[n]}


@pytest.mark.parametrize("method", ["random", "halving"])
def test_seeds_decide(method: str) -> None:
    def drawn(**more: Any) -> list[str]:
        fake = Fake()
        search(fake, method=method, evals=8, **more)
        return fake.sources

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2) and drawn(seed=1) != drawn(seed=1, sample=1)


@pytest.mark.parametrize("method", ["random", "halving"])
def test_it_stops_when_all_settings_are_used_up(method: str) -> None:
    fake, task = Fake(), load_task("activation/gelu_int8")
    policy = TemplateSearch(method, evals=10_000, compiler=fake.compile)
    made = policy.run(task, Episode(task, "cpu", fake.submit))
    assert len(fake.sources) == len(set(fake.sources)) == made.notes["settings"] == 25


def test_halving_asks_the_compiler_and_sends_nothing_that_does_not_fit() -> None:
    fake = Fake()

    def compile(task: Task, source: str) -> CompileReport:
        report = fake.compile(task, source)
        bad = values(source)["softmax.BI@58"] > 32
        return replace(report, builds=(replace(report.builds[0], ok=False, error="shared memory"),)) if bad else report

    made = search(fake, evals=12, compiler=compile)
    assert len(fake.asked) > len(fake.sources) and made.notes["dropped"] > 0
    assert all(values(s)["softmax.BI@58"] <= 32 for s in fake.sources)


def test_halving_grades_no_program_twice_and_forgets_idle_numbers() -> None:
    fake = Fake()

    def blocks(source: str) -> str:
        return str([v for n, v in values(source).items() if ".B" in n])

    def compile(task: Task, source: str) -> CompileReport:
        return replace(fake.compile(task, source), launch_hash=blocks(source))

    made = search(fake, evals=12, compiler=compile)
    assert len({blocks(s) for s in fake.sources}) == len(fake.sources)
    assert set(made.notes["idle"]) <= {"_softmax.num_warps@61", "_softmax.num_warps@61.2"} and made.notes["idle"]


def test_a_wrong_setting_never_wins() -> None:
    fake = Fake(broken="BI = min(16")
    assert fake.broken not in (search(fake, method="random", evals=60).source or "")


def test_nothing_right_is_handed_in_as_it_is() -> None:
    made = search(Fake(broken="def softmax"), evals=5)
    assert made.source is not None and made.notes["rank"].startswith("incorrect")


def test_a_kernel_without_numbers_is_graded_once() -> None:
    task = load_task("fusion/fused_svd_reconstruct")
    outcome = Outcome(task.id, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))
    made = TemplateSearch(compiler=Fake().compile).run(task, Episode(task, "cpu", lambda s: [outcome] * len(s)))
    assert made.source == expert_source(task.id) and len(made.turns) == 1


def test_the_compiler_tells_what_no_small_case_shows() -> None:
    compiler = Compiler()
    try:
        plain = compiler(TASK, SOURCE)
        assert plain.fits and plain.failure is None and plain.programs == {"_softmax": 16384} and plain.launch_hash
        assert {b.kernel for b in plain.builds} == {"_softmax"} and all(b.registers for b in plain.builds)
        # Blanks in the kernel move the places that its code remembers, and mean nothing.
        assert compiler(TASK, SOURCE.replace("tl.max(v, 0)", "tl.max( v, 0 )")).launch_hash == plain.launch_hash
        broken = compiler(TASK, SOURCE.replace("tl.max(v, 0)", "tl.max(v, 7)"))
        assert not broken.fits and broken.failure
        assert not compiler(TASK, "import os\n").fits
    finally:
        compiler.close()


def test_a_real_search(grader: Any) -> None:
    def submit(sources: Sequence[str]) -> list[Outcome]:
        return [grader.grade(TASK.id, s, backend="cpu", targets=["sm_90"], split="train") for s in sources]

    policy: Any = make_policy("template-search:halving,evals=4,eta=2")
    try:
        made = policy.run(TASK, Episode(TASK, "cpu", submit))
    finally:
        policy.close()
    assert len(made.turns) == 4 and made.turns[0].correct and made.notes["screened"] >= 4
    assert made.source is not None and made.notes["rank"].startswith("correct")
