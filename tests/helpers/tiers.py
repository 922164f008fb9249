"""Two tiers of tests: ``make test`` runs the default tier, ``make test-all`` (``pytest --all``) runs everything.

A test is left to ``make test-all`` when one of these holds:

- It runs for one of at least ``MANY`` tasks, and the task is not the representative of its category. The
  representative is the first task of the category, by id, whose difficulty is 2 or more and that is not in ``DEAR``, or
  the first task where there is none. A test needs no list of its own for this: it is parametrised over ``task_ids()``.
- It belongs to a function in ``SAMPLED``, which grades or draws much for every task, and its task is not among the third
  of the representatives that the function keeps. Different functions keep different thirds.
- It carries the marker ``full``. ``tests/integration/test_zoo.py`` marks all specimens but one attack for each layer
  of defence and a few honest kernels.
- It carries the marker ``serve``: it needs a real server of language models, which takes seconds to start. The
  clients of such servers are tested against a scripted one (``tests/baselines/llm/test_scripted.py``).
- ``SLOW`` names it. Such a test takes seconds, and the default tier has a cheaper test of the same module or keeps
  some of the test's parameters (docs/measurements/2026-11-26-test-durations.md).
- ``SLOW_FIXTURES`` names a fixture that it uses. Tests that are quick themselves are left out too, because otherwise
  the first of them would take the time of the fixture.

Three rules put a test back into the default tier:

- It was named: by a file, a node id, ``-k`` or ``-m`` on the command line. A folder is not enough.
- Its task or its specimen changed: a file in ``tasks/``, ``baselines/experts/`` (also a part of the expert) or
  ``tests/zoo/`` that belongs to it.
- Its file changed, or the file mirrors a module that changed: ``tests/grading/timing/test_paired*.py`` mirrors
  ``kbx_env/grading/timing/paired.py``, and ``tests/train/test_ppo*.py`` mirrors ``train/ppo.py``. A test of an
  experiment, ``tests/experiments/test_evidence*.py``, mirrors ``experiments/<any study>/evidence.py`` and all modules
  of a study ``experiments/evidence/``. A test that runs for one task after the other keeps to the representatives: for
  176 tasks it can take minutes.

A change is a difference between the working tree and the merge base with ``main``, or a part of the last commit.
Without git nothing counts as changed. A large change would turn the default tier into the full one, so at most
``MOST_TASKS`` changed tasks and specimens and ``MOST_FILES`` changed test files count. The end of the output lists them.
"""

from __future__ import annotations

import fnmatch
import functools
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from kbx_env.spec.catalog import PARTS, load_task, task_ids

ROOT = Path(__file__).resolve().parents[2]
MANY = 50
"""Test functions with this many tasks or more run for the representatives only."""
DEAR = frozenset({"quantization/attention_w8a8", "spatialops/grid_sample"})
"""Tasks that take several times as long as others of their category: they represent no category."""
MOST_TASKS = 10
"""Changed tasks and specimens that run in full: each adds about two seconds."""
MOST_FILES = 4
"""Changed test files that run in full: each adds up to half a minute."""
MAIN = ("main", "origin/main")
"""Names of the branch that changes are compared with; the first that exists counts."""

SAMPLED = (
    "tests/integration/test_experts.py::test_no_work_no_pay",
    "tests/eval/test_broken_promises.py::test_every_argument_with_an_effect_is_needed_by_a_case",
    "tests/tasks/test_promises.py::test_every_promise_has_a_case_and_is_listed",
)
"""Test functions of all tasks that take a second for many a task: they run for a third of the representatives."""

SLOW: dict[str, dict[str, tuple[str, ...]]] = {
    "baselines/llm/test_for_real.py": {"test_what_each_method_makes_of_it": ("claude*",)},
    "baselines/llm/test_runs.py": {"test_killed_in_the_middle_and_resumed_no_call_is_repeated": ()},
    "backends/ttir/test_ttir_lockstep.py": {"test_more_programs_than_a_gpu_has_room_for_take_turns": ()},
    "baselines/test_knobs.py": {"test_any_choice_comes_back": ()},
    "baselines/test_template_search.py": {
        "test_a_real_search": (), "test_the_compiler_tells_what_no_small_case_shows": ()
    },
    "envs/test_kernel_env.py": {"test_an_async_env_made_after_torch_has_run_does_not_hang": ()},
    "eval/test_browser.py": {"test_the_page_fits_and_says_no_error": ("390-False", "1440-True")},
    "eval/test_plots.py": {"test_equal_data_equal_bytes": (), "test_any_number_of_policies": ("1",)},
    "eval/test_report.py": {
        "test_other_settings_are_never_answered_by_what_is_stored": ("more3",),
        "test_another_device_or_version_is_graded_anew": ("torch", "grader"),
        "test_a_run_killed_with_sigkill_goes_on": (),
    },
    "eval/test_broken_promises.py": {
        "test_a_kernel_with_one_promise_broken_is_refused": ("activation/relu-*",)
    },
    "spec/test_packs.py": {"test_workers_that_started_earlier_find_the_pack": ()},
    "eval/test_task_pages.py": {"test_a_whole_run_of_four_policies_costs_little_more_than_highlighting_its_sources": ()},
    "integration/test_fuzz.py": {"test_a_small_sample_is_graded": ()},
    "eval/test_throughput.py": {
        "test_what_was_lost_is_no_kernel": (), "test_each_kernel_several_times_and_runs_beside_each_other": ()
    },
    "executor/pools/test_ray_pool.py": {
        "test_a_node_that_goes_and_one_that_comes": (),
        "test_a_local_ray_is_started_quiet_and_ended": (),
        "test_a_report_over_ray_judges_an_expert_as_a_process_does": (),
        "test_a_gpu_that_torch_does_not_find_is_refused": (),
        "test_an_actor_that_cannot_start_says_why": (),
        "test_no_room_is_said_and_not_waited_for_forever": (),
    },
    "examples/test_examples.py": {"test_an_example_prints_what_the_page_says": ("grade_one.py",)},
    "grading/evidence/test_stage_credit.py": {
        "test_each_stage_is_seen_for_itself": ("truncation", "a product of floats"),
        "test_an_outlier_hides_no_stage": ("truncation-7",),
    },
    "grading/judge/test_close.py": {"test_no_seed_rejects_a_fair_bf16_product": ("seeds0",)},
    "grading/judge/test_statistical.py": {
        "test_honest_masks": ("0.1-plain", "0.5-relu"),
        "test_honest_samples": ("6", "300", "5000"),
        "test_masks_behind_a_product": ("0.1-product",),
    },
    "grading/runtime/test_policy_script.py": {
        "test_a_watcher_that_hangs": ("namespaces",), "test_the_wall_limit": ("namespaces-*", "none-grandchild")
    },
    "grading/static/test_lint.py": {
        "test_pyflakes_knows_every_name_that_is_reported": (),
        "test_long_sources_take_no_longer_than_their_length": ("source0", "source2", "source4"),
    },
    "grading/test_compulsory_work.py": {
        "test_no_floor_is_above_what_results_depend_on": (
            "activation", "convolution", "normalization", "optimizer", "pooling", "random"
        ),
        "test_the_probe_finds_a_floor_that_reads_everything": ("index/index_fill_", "spatialops/grid_sample"),
    },
    "grading/timing/test_estimate.py": {"test_a_seed_is_no_result": ()},
    "grading/timing/test_compiled.py": {"test_the_worker_is_heard_and_a_late_one_killed": ()},
    "integration/test_experts.py": {
        "test_a_coarse_product_is_no_fp32_product": (
            "activation/combined_activation", "fusion/fused_transformer_block"
        ),
        "test_every_target_builds": ("sm_90", "gfx942"),
    },
    "integration/test_faults.py": {
        "test_no_memory_for_one_more_process": (),
        "test_a_process_killed_from_outside_is_replaced": ("engine",),
        "test_a_worker_whose_gpu_is_dead_is_replaced": (),
        "test_an_error_of_the_grader_itself": ("*-RuntimeError", "True-OutOfMemoryError"),
        "test_a_zygote_that_does_not_answer_is_given_up": (),
    },
    "integration/test_kernels_that_break_a_promise.py": {
        "test_a_kernel_that_breaks_a_promise_is_refused": (
            "out= with gaps", "integers*", "an fp16*", "a vector with gaps", "int64*"
        ),
    },
    "integration/test_sanitizer_findings.py": {
        "test_faults_planted_in_an_expert_are_found": (
            "activation/gelu_fp16", "index/masked_select", "matrixmultiply/matmul_bf16", "random/rand", "reduce/argmax"
        ),
    },
    "integration/test_torch_ops.py": {"test_experts_are_paid_under_both": ("math/softmax", "index/scatter")},
    "integration/test_zoo.py": {
        "test_what_a_layer_is_worth": ("cases-*", "screen-d_forged_ttir-*", "firewall-*", "lockdown-*", "constant-*")
    },
    "sandbox/test_host_safety.py": {
        "test_harm": (
            "endless loop*", "recursion*", "segmentation*", "memory-*", "fork-*", "shell*", "write outside*", "socket-*"
        ),
    },
    "sandbox/test_zygote.py": {
        "test_all_forks_end_with_the_zygote": (), "test_a_module_without_bytecode_is_imported_and_nothing_is_written": ()
    },
    "sandbox/test_runner.py": {"test_one_line_bodies": ("*-rejected-*", "*-runtime_error-*")},
    "tasks/test_varied.py": {
        "test_a_correction_is_below_the_number_of_reduced_elements": ("reduce/std",),
        "test_arguments_fit_what_is_drawn": ("loss/nll_loss", "math/ifftshift"),
        "test_every_grading_reduces_many_columns_that_are_adjacent_in_memory": ("reduce/mean", "fusion/fused_sum_std"),
    },
    "test_main.py": {"test_an_answer_in_markdown_is_graded_by_its_block": ()},
    "experiments/test_learning_curve.py": {"test_a_very_small_run_from_random_weights_to_the_picture": ()},
    "experiments/test_answer_prefix.py": {
        "test_all_tasks_are_begun_as_compact_demonstrations_begin": (),
        "test_other_templates_and_other_questions_are_not_begun": (),
    },
    "experiments/test_copying.py": {"test_compact_keeps_what_is_called": ()},
    "experiments/test_timed_rewards.py": {"test_training_and_comparison_on_a_made_up_table": ()},
    "experiments/test_true_reward.py": {
        "test_the_naive_grader_pays_every_cheat_and_every_honest_kernel": (),
        "test_our_grader_refuses_the_cheats": (),
        "test_demonstrations_are_drawn_from_the_known_answers": (),
    },
    "train/test_compare_rewards.py": {
        "test_a_stopped_experiment_goes_on": (), "test_a_killed_one_leaves_the_folder_to_its_learner": (),
        "test_finished_runs_are_not_repeated_and_more_seeds_can_follow": (),
    },
    "train/test_data.py": {
        "test_the_command_writes_what_it_reads": ("jsonl", "arrow"),
        "test_no_text_defines_a_function_of_the_eval_split": (),
    },
    "experiments/test_evidence.py": {
        "test_commands_end_in_time": (), "test_sigterm_ends_the_script_with_its_evidence": ()
    },
    "train/test_answer_watch.py": {"test_in_a_run": ("single",)},
    "train/test_rollout.py": {"test_how_a_model_was_asked_is_kept": ()},
    "train/test_grpo.py": {
        "test_a_killed_run_goes_on_and_loses_nothing": (),
        "test_continuous_batching_leaves_the_weights_as_they_are": (),
        "test_lora_is_merged_and_resumed": (),
        "test_the_log_is_right_when_steps_and_generations_differ": (),
    },
    "train/test_ppo.py": {
        "test_the_whole_way_on_the_cpu": (),
        "test_a_killed_run_keeps_its_gradings": (),
        "test_runs_that_share_a_store_grade_nothing_twice": (),
        "test_a_run_begins_near_the_expert_and_a_resumed_one_adds_nothing": (),
        "test_a_run_of_an_earlier_version_goes_on": (),
    },
    "train/test_renaming.py": {"test_renamed_kernels_are_graded_correct": ("optimizer*",)},
    "train/test_sft.py": {
        "test_a_killed_run_goes_on_and_loses_nothing": (), "test_wandb_is_a_mirror_that_needs_no_account": ()
    },
    "experiments/test_line_tokens.py": {
        "test_the_full_prompt_stays_where_it_is_not_shortened": (),
    },
}  # fmt: skip
"""Slow tests: test file below tests/, function, and patterns of the parameter ids that the default tier keeps."""
SLOW_FIXTURES: dict[str, frozenset[str]] = {
    "experiments/test_answer_prefix.py": frozenset({"folder"}),
    "experiments/test_line_tokens.py": frozenset({"tokenizer"}),
    "train/test_ppo.py": frozenset({"run"}),
}
"""Slow fixtures, which train a tokenizer or an agent: test file below tests/, and names of the fixtures."""


def sample(function: str) -> frozenset[str]:
    """Return the tasks that a function of all tasks runs for in the default tier."""
    tasks = sorted(representatives())
    return frozenset(tasks[SAMPLED.index(function) % 3 :: 3] if function in SAMPLED else tasks)


@functools.cache
def representatives() -> frozenset[str]:
    """One task of each category: the first by id with a difficulty of at least 2, or the first."""
    by_category: dict[str, list[str]] = defaultdict(list)
    for task in sorted(task_ids()):
        by_category[task.split("/")[0]].append(task)
    return frozenset(
        next((t for t in tasks if load_task(t).difficulty >= 2 and t not in DEAR), tasks[0])
        for tasks in by_category.values()
    )


def changed_files(root: Path = ROOT) -> frozenset[str]:
    """Paths, relative to ``root``, that differ from the merge base with main or belong to the last commit."""

    def git(*args: str) -> list[str]:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []

    bases = [base for name in MAIN for base in git("merge-base", "HEAD", name)][:1]
    listed = [path for base in (*bases, "HEAD~1") for path in git("diff", "--name-only", "--relative", base)]
    return frozenset(listed + git("ls-files", "--others", "--exclude-standard"))


def changed_names(files: Iterable[str]) -> list[str]:
    """Ids of the tasks and names of the specimens that these files belong to; tasks with a changed part come last."""
    own, pieces = set(), set()
    for path in map(Path, files):
        parts = path.with_suffix("").parts
        if path.suffix != ".py":
            continue
        if parts[0] == "tasks" and len(parts) == 3:
            own.add("/".join(parts[1:]))
        if parts[:2] == ("baselines", "experts") and len(parts) == 4:
            own.add("/".join(parts[2:]))
        if parts[:3] == ("baselines", "experts", "_parts"):
            pieces.add(parts[3])
        if parts[:2] == ("tests", "zoo") and len(parts) == 4:
            own.add(parts[3])
    own &= {*task_ids(), *(p.stem for p in ROOT.glob("tests/zoo/*/*.py"))}
    made = {task for task in task_ids() if pieces and pieces & _parts(task)}
    return sorted(own) + sorted(made - own)


def _parts(task: str) -> set[str]:
    """Names of the parts that a task's expert begins with."""
    path = ROOT / "baselines/experts" / f"{task}.py"
    first = path.read_text().partition("\n")[0] if path.is_file() else ""
    return {name.strip() for name in first.removeprefix(PARTS).split(",")} if first.startswith(PARTS) else set()


def mirrors(test_file: str, files: frozenset[str]) -> bool:
    """Whether a test file (relative to the root) changed, or mirrors a module that changed."""
    if test_file in files:
        return True
    test = Path(test_file)
    for path in map(Path, files):
        parts, names = path.parts[1:] if path.parts[0] == "kbx_env" else path.parts, [path.stem]
        if parts[0] == "experiments" and len(parts) == 3:  # the tests of all studies are in one folder
            parts, names = (parts[0], parts[2]), [path.stem, parts[1]]
        if path.suffix == ".py" and Path("tests", *parts).parent == test.parent:
            if any(test.stem == f"test_{name}" or test.stem.startswith(f"test_{name}_") for name in names):
                return True
    return False


class Tiers:
    """Splits collected tests into those that run and those that are left to ``make test-all``."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the command line of a pytest run, and what git says of the working tree."""
        option = config.option
        self.everything = bool(option.all or option.keyword or option.markexpr)
        self.named = [a for a in map(str, config.args) if "::" in a or a.endswith(".py")]
        self.files = frozenset() if self.everything else changed_files()
        self.names = changed_names(self.files)
        tests = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/test_*.py"))
        self.test_files = [path for path in tests if mirrors(path, self.files)]

    def summary(self) -> list[str]:
        """Return the lines for the end of pytest's output."""
        if self.everything:
            return ["tier: all tests that the options select"]
        lines = ["tier: default (--all runs everything)"]
        for what, changed, most in (
            ("tasks and specimens", self.names, MOST_TASKS), ("test files or their modules", self.test_files, MOST_FILES)
        ):  # fmt: skip
            if changed:
                shown = ", ".join(changed[:most]) + " (the others are left to --all)" * (len(changed) > most)
                lines.append(f"{len(changed)} changed {what}, run in full: {shown}")
        return lines

    def split(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the tests that run and the tests that are left out, both in the given order."""
        if self.everything:
            return items, []
        tasks: dict[str, set[str]] = defaultdict(set)
        for item in items:
            tasks[_function(item)] |= _values(item) & _all_tasks()
        whole, names = frozenset(self.test_files[:MOST_FILES]), frozenset(self.names[:MOST_TASKS])
        kept: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            over_tasks = len(tasks[_function(item)]) >= MANY and not _values(item) & sample(_function(item))
            marked = any(item.get_closest_marker(name) is not None for name in ("full", "serve"))
            slow = over_tasks or marked or _listed(item)
            named = any(item.nodeid.startswith(_normal(a)) for a in self.named)
            back = named or (_path(item) in whole and not over_tasks) or bool(_values(item) & names)
            (left if slow and not back else kept).append(item)
        return kept, left


@functools.cache
def _all_tasks() -> frozenset[str]:
    return frozenset(task_ids())


def _normal(argument: str) -> str:
    """A command line argument as the beginning of a node id."""
    path, separator, rest = argument.partition("::")
    file = Path(path).resolve()
    return (file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else path) + separator + rest


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _function(item: pytest.Item) -> str:
    return f"{_path(item)}::{getattr(item, 'originalname', item.name)}"


def _values(item: pytest.Item) -> frozenset[str]:
    """The texts among the parameters of a test, and the names of specimens."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    return frozenset(str(getattr(v, "name", v)) for v in values if isinstance(getattr(v, "name", v), str))


def _listed(item: pytest.Item) -> bool:
    """Whether ``SLOW`` names this test and keeps none of its parameters' ids, or ``SLOW_FIXTURES`` a fixture of it."""
    file = item.path.relative_to(ROOT / "tests").as_posix()
    if not SLOW_FIXTURES.get(file, frozenset()).isdisjoint(getattr(item, "fixturenames", ())):
        return True
    kept = SLOW.get(file, {}).get(getattr(item, "originalname", item.name))
    if kept is None:
        return False
    callspec = getattr(item, "callspec", None)
    return not any(callspec is not None and fnmatch.fnmatchcase(callspec.id, pattern) for pattern in kept)
