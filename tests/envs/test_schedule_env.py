"""ScheduleEnv: the gymnasium contract, what actions mean, masks, the cache, and the slots of every template."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import kbx_env  # noqa: F401  registers the id
from kbx_env.envs import schedule_features as features
from kbx_env.envs.schedule import MIDDLE, MOVES, SLOTS, find_idle, moved, template
from kbx_env.envs.schedule_env import ScheduleEnv
from kbx_env.errors import UnknownName, UsageError
from kbx_env.grading.sizes import held_out
from kbx_env.outcome import Cases, Estimate, Evidence, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, task_ids

TASK = "math/add"  # two knobs: one block size, one number of warps
MANY = "matrixmultiply/matmul"


class Fake:
    """Estimates a source by its number of warps; knows a source that is lost."""

    def __init__(self, lost: str = "num_warps=1)") -> None:
        self.lost = lost
        self.asked: list[str] = []

    def __call__(self, task: str, source: str, **options) -> Outcome:
        self.asked.append(source)
        common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": options["grading"]}
        if self.lost in source:
            return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, **common)
        share = 0.5 if "num_warps=4)" in source else 0.9
        return Outcome(
            verdict=Verdict.CORRECT, cases=Cases(4, 4, (), 4, 4), evidence=Evidence(1),
            estimate=Estimate("h200", 1.0, share, (), ""), **common,
        )  # fmt: skip


def _env(**more) -> ScheduleEnv:
    return ScheduleEnv(**{"task": TASK, "backend": "cpu", "grade": Fake(), **more})


def _move(slot: int, move: int) -> np.ndarray:
    action = ScheduleEnv.DEFAULT.copy()
    action[slot] = MOVES.index(move)
    return action


WARPS = SLOTS.index("warps")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("more", [{}, {"max_turns": 3, "relative": True}, {"reach": 1}])
def test_check_env_is_clean(more: dict) -> None:
    env = _env(**more)
    for action in np.ndindex(*env.action_space.nvec[[0, WARPS]]):  # ``cached`` of the first grading is another than of the second
        env.reset()
        env.step([action[0] if slot == 0 else action[1] if slot == WARPS else 0 for slot in range(len(SLOTS))])
    check_env(env, skip_render_check=True)


def test_made_by_its_id_the_default_is_the_expert() -> None:
    env = gymnasium.make("kbx/Schedule-v0", task=TASK, backend="cpu", grade=Fake())
    seen, info = env.reset(seed=1)
    assert seen.shape == (len(features.NAMES),) and info["task"] == TASK
    _, reward, terminated, truncated, info = env.step(ScheduleEnv.DEFAULT)
    assert terminated and not truncated and info["settings"] == {} and info["source"] == expert_source(TASK)
    assert reward == pytest.approx(2 + np.log10(0.5) / 2)
    env.close()


def test_a_move_changes_one_number_and_the_ends_hold() -> None:
    env = _env()
    env.reset()
    info = env.step(_move(WARPS, 1))[4]
    assert list(info["settings"].values()) == [8] and "num_warps=8)" in info["source"]
    knob = template(TASK).slots[WARPS][0]
    assert [moved(knob, m) for m in (-9, -2, 0, 2, 9)] == [1, 1, 4, 16, 16]
    assert template(TASK).legal(WARPS) == (True,) * 5


def test_reach_one_has_three_moves_that_mean_the_same() -> None:
    env, near = _env(max_turns=2), _env(max_turns=2, reach=1)
    assert list(env.action_space.nvec) == [5] * len(SLOTS) and list(near.action_space.nvec) == [3] * len(SLOTS)
    far_seen, seen = env.reset()[0], near.reset()[0]
    marked = dict(zip(features.NAMES, seen, strict=True))
    assert [marked[f"legal.{WARPS}.warps{m:+d}"] for m in MOVES] == [0, 1, 1, 1, 0]
    changed = {n for n, a, b in zip(features.NAMES, far_seen, seen, strict=True) if a != b}
    assert changed and all(n.startswith("legal.") and n[-2:] in ("-2", "+2") for n in changed)
    assert near.template(TASK).legal(WARPS) == (False, True, True, True, False)
    for move in (-1, 0, 1):
        env.reset(), near.reset()
        action = near.DEFAULT.astype(np.uint8)  # none of its arithmetic may wrap
        action[WARPS] = 1 + move
        shown, _, _, _, info = near.step(action)
        far_shown, _, _, _, far = env.step(_move(WARPS, move))
        assert info["settings"] == far["settings"] and info["source"] == far["source"]
        assert (shown[features.LEGAL.stop :] == far_shown[features.LEGAL.stop :]).all()
    assert near.template(TASK).settings(near.DEFAULT) == {} == env.template(TASK).settings(env.DEFAULT)
    with pytest.raises(UsageError, match="from 0 to 2"):
        near.step([3] * len(SLOTS))


def test_relative_to_the_expert() -> None:
    env = _env(relative=True)
    env.reset()
    assert env.step(ScheduleEnv.DEFAULT)[1] == 0.0
    env.reset()
    _, reward, _, _, info = env.step(_move(WARPS, 1))
    assert reward == pytest.approx((np.log10(0.9) - np.log10(0.5)) / 2) and info["default"] < info["value"]


@pytest.mark.parametrize("relative", [False, True])
def test_an_infrastructure_fault_is_masked_and_asked_again(relative: bool) -> None:
    grade = Fake()
    env = _env(grade=grade, relative=relative)
    for _ in range(2):
        env.reset()
        _, reward, _, _, info = env.step(_move(WARPS, -2))
        assert info["masked"] and reward == 0.0 and info["value"] is None
    assert sum("num_warps=1)" in s for s in grade.asked) == 2


def test_a_lost_default_masks_what_is_relative_to_it() -> None:
    env = _env(grade=Fake("num_warps=4)"), relative=True)
    env.reset()
    _, reward, _, _, info = env.step(_move(WARPS, 1))
    assert info["masked"] and reward == 0.0 and info["default"] is None


def test_several_turns_show_the_last_grading() -> None:
    env = _env(max_turns=2)
    first, _ = env.reset()
    seen, _, terminated, _, _ = env.step(_move(WARPS, 2))
    shown = dict(zip(features.NAMES, seen, strict=True))
    assert not terminated and shown["correct"] == shown["graded"] == 1 and shown["turn"] == 0.5
    assert shown[f"move.{WARPS}.warps"] == 1 and dict(zip(features.NAMES, first, strict=True))["graded"] == 0
    assert env.step(ScheduleEnv.DEFAULT)[2]
    with pytest.raises(UsageError, match="over"):
        env.step(ScheduleEnv.DEFAULT)


def test_the_same_source_is_graded_once(tmp_path) -> None:
    grade = Fake()
    env = _env(grade=grade, store=tmp_path / "s.sqlite")
    for cached in (False, True):
        env.reset()
        assert env.step(_move(WARPS, 1))[4]["cached"] is cached
    env.close()
    other = _env(grade=grade, store=tmp_path / "s.sqlite")
    other.reset()
    assert other.step(_move(WARPS, 1))[4]["cached"] and len(grade.asked) == 1 and other.gradings == 0
    other.close()


def test_who_measured_first_is_believed_by_all_that_share_a_store(tmp_path) -> None:
    slow = Fake()
    other = _env(grade=Fake(), store=tmp_path / "s.sqlite")

    def meanwhile(task, source, **options):
        if not slow.asked:
            other.reset()
            other.step(_move(WARPS, 1))
        outcome = slow(task, source, **options)
        return dataclasses.replace(outcome, message="measured later")

    env = _env(grade=meanwhile, store=tmp_path / "s.sqlite")
    env.reset()
    first = env.step(_move(WARPS, 1))[4]
    env.reset()
    assert not first["cached"] and env.step(_move(WARPS, 1))[4]["cached"]
    assert {o.message for o in env._known.values()} == {o.message for o in other._known.values()} and len(env._known) > 0
    env.close()
    other.close()


def test_shapes_choose_the_graders_split_and_the_timed_sizes() -> None:
    asked, shown = {}, []

    def grade(task, source, **options):
        asked.update(options)
        return Fake()(task, source, **options)

    for shapes in ("train", "eval"):
        env = _env(grade=grade, shapes=shapes)
        shown.append(dict(zip(features.NAMES, env.reset()[0], strict=True)))
        env.step(ScheduleEnv.DEFAULT)
        assert asked["split"] == shapes and asked["estimate"] == "h200"
        assert asked["sizes"] == ("held-out" if shapes == "eval" else "published")
    changed = {n for n in features.NAMES if shown[0][n] != shown[1][n]}
    assert {n.split(".")[0] for n in changed} == {"bytes", "flops", "largest", "last"}, "the sizes, and nothing else"
    for of, k in (("least", 0), ("most", -1)):
        wanted = math.log2(held_out(load_task(TASK))[k].axes["*a"][0]) / 30
        assert shown[1][f"largest.{of}"] == pytest.approx(wanted)


@pytest.fixture(scope="module")
def every_task() -> Iterator[ScheduleEnv]:
    env = ScheduleEnv(split="all", backend="cpu", grade=Fake())
    yield env
    env.close()


@pytest.mark.parametrize("task", task_ids())
def test_every_template_fits_the_slots_and_the_bounds(every_task: ScheduleEnv, task: str) -> None:
    seen, _ = every_task.reset(options={"task": task})
    assert every_task.observation_space.contains(seen)
    made = every_task.template(task)
    for slot, (kind, knobs) in enumerate(zip(SLOTS, made.slots, strict=True)):
        assert all(k.kind == kind for k in knobs)
        assert made.legal(slot)[MIDDLE] and (knobs or sum(made.legal(slot)) == 1)
    assert made.render(ScheduleEnv.DEFAULT) == expert_source(task)
    made.render(np.zeros(len(SLOTS), int))


def test_more_knobs_than_slots_move_together_by_name() -> None:
    slots = template(MANY).slots
    assert sum(map(len, slots)) > len(SLOTS)
    names = {k.name.partition("@")[0].rpartition(".")[2] for k in slots[0]}
    assert len(names) == 1


def test_knobs_that_nothing_notices_take_no_slot() -> None:
    knob = template(TASK).slots[0][0].name
    idle = find_idle(TASK, lambda source: source.partition("num_warps")[2][:4])
    assert idle == (knob,)
    env = _env(idle={TASK: idle})
    env.reset()
    assert env.template(TASK).slots[0] == () and env.step(_move(0, 2))[4]["settings"] == {}
    assert find_idle(TASK, lambda source: None) == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "math/ad"}, "math/add"),
        ({"task": None, "tasks": "nothing*"}, "nothing"),
        ({"task": None, "category": "maths"}, "math"),
        ({"backend": "tpu"}, "cpu"),
        ({"reward": "estimate"}, "estimated"),
        ({"shapes": "held"}, "eval"),
        ({"max_turns": 0}, "at least 1"),
        ({"reach": 3}, "accepted: 1, 2"),
        ({"reach": True}, "accepted: 1, 2"),
        ({"wall": 0}, "more than 0"),
        ({"targets": ("sm_99",)}, "sm_90"),
        ({"grading_seed": "x"}, "whole number"),
        ({"render_mode": "ansi"}, "None"),
    ],
)
def test_bad_settings_name_what_is_accepted(settings: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _env(**settings)


def test_bad_steps_and_resets() -> None:
    env = _env()
    with pytest.raises(UsageError, match="before reset"):
        env.step(ScheduleEnv.DEFAULT)
    with pytest.raises(UsageError, match="task"):
        env.reset(options={"tsak": TASK})
    with pytest.raises(UnknownName):
        env.reset(options={"task": "nothing"})
    env.reset()
    for action in ([1, 2], [9] * len(SLOTS), [1.5] * len(SLOTS)):
        with pytest.raises(UsageError, match="action"):
            env.step(action)
