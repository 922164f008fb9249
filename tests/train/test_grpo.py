"""GRPO: masked answers, logs, resuming, and that a report asks the model as it was trained."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome

pytest.importorskip("trl")
import torch  # noqa: E402
from kbx_env.baselines.llm.chat import ChatRequest  # noqa: E402
from kbx_env.baselines.llm.conversation import Conversation  # noqa: E402
from kbx_env.baselines.llm.local import LocalModel  # noqa: E402
from kbx_env.eval import report  # noqa: E402
from kbx_env.train import grpo, grpo_setup, grpo_trainer, logs, memory, models  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402
from service_stand_in import by_word, lost, right, wrong  # noqa: E402
from test_batch_grader import WRONG  # noqa: E402

KEYS = {
    "step", "seconds", "reward", "gradings", "compile_rate", "correct_rate", "solved_rate", "masked", "speedup",
    "grading_seconds", "turns", "terms/compiles", "terms/cases", "terms/correct",
}  # fmt: skip
QUICK = [
    "tasks=logspace,erfc_sqrt", "backend=cpu", "workers=1", "trainer.disable_tqdm=true", "trainer.num_generations=2",
    "trainer.per_device_train_batch_size=4", "trainer.max_completion_length=12", "trainer.mask_truncated_completions=false",
    "trainer.learning_rate=1e-3", "trainer.max_steps=1",
]  # fmt: skip


@pytest.fixture
def argv(model_folder: Path, tmp_path: Path) -> list[str]:
    return [f"model={model_folder}", f"out={tmp_path / 'out'}", *QUICK]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def run(argv: list[str], grade: Any = by_word) -> list[dict[str, Any]]:
    """Train; the lines of the log that tell of steps."""
    s = read(grpo.Settings, argv)
    grpo.run(s, grade)
    return steps(Path(s.out))


def steps(out: Path) -> list[dict[str, Any]]:
    return [x for x in logs.read(out) if "train_runtime" not in x]


class Counting:
    """Grades the n-th different source as the n-th verdict says, over and over."""

    def __init__(self, *verdicts: Any) -> None:
        self.verdicts, self.calls = verdicts, 0

    def __call__(self, task: str, source: bytes, **options: Any) -> Outcome:
        self.calls += 1
        found: Outcome = self.verdicts[(self.calls - 1) % len(self.verdicts)](task)
        return found


def test_a_masked_answer_teaches_nothing_and_is_no_zero(argv: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    whole = grpo_trainer.GRPOTrainer._generate_and_score_completions

    def spy(self: Any, inputs: Any) -> Any:
        seen.append(whole(self, inputs))
        return seen[-1]

    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "_generate_and_score_completions", spy)
    (line,) = run([*argv, "trainer.num_generations=4", "tasks=logspace"], Counting(lost, right, wrong, right))
    advantages = sorted(seen[0]["advantages"].tolist())
    mean = (1 + WRONG + 1) / 3  # of the three that were graded
    assert advantages == pytest.approx([WRONG - mean, 0.0, 1 - mean, 1 - mean], abs=1e-6)
    assert line["masked"] == 1 and line["reward"] == pytest.approx(mean) and line["correct_rate"] == pytest.approx(2 / 3)
    assert line.keys() >= KEYS and line["speedup"] is None and line["gradings"] == 4 and line["turns"] == 1
    shown = [json.loads(x) for x in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert [x["reward"] is None for x in shown] == [True, False, False, False] and shown[0]["verdict"] == "infra_fault"
    assert {"step", "task", "text"} <= shown[0].keys() and shown[0]["step"] == 1


def test_answers_that_all_earn_the_same_move_nothing(argv: list[str], model_folder: Path, tmp_path: Path) -> None:
    """Nine in ten groups of small models are so; Adam's momentum would go on."""
    from safetensors.torch import load_file

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}

    def trained(steps: int) -> dict[str, torch.Tensor]:
        """The first four answers differ, all others are wrong."""
        out = tmp_path / f"out-{steps}"
        run([*argv, f"out={out}", f"trainer.max_steps={steps}", "tasks=logspace", "trainer.lr_scheduler_type=constant"],
            Counting(right, wrong, right, wrong, *[wrong] * 96))  # fmt: skip
        return weights(out / "final")

    start, one, three = weights(model_folder), trained(1), trained(3)
    assert any(not torch.equal(start[k], one[k]) for k in start) and all(torch.equal(one[k], three[k]) for k in one)

    parameter = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.AdamW([parameter], lr=0.1)
    adam.register_step_pre_hook(grpo_trainer.SkipEmptySteps())
    for gradient in ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        parameter.grad = torch.tensor(gradient)
        adam.step()
    assert parameter.tolist() == pytest.approx([-0.1, 0.0, 0.0], abs=1e-6)


def test_a_gradient_that_is_no_number_moves_nothing() -> None:
    parameter, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    adam, still = torch.optim.AdamW([parameter, other], lr=0.1), grpo_trainer.SkipEmptySteps()
    adam.register_step_pre_hook(still)

    def step(gradient: list[float]) -> None:
        parameter.grad, other.grad = torch.tensor(gradient), torch.ones(2)
        adam.step()

    step([1.0, 1.0])
    before = parameter.tolist(), other.tolist()
    for gradient in ([math.nan, 1.0], [1.0, math.inf]):
        step(gradient)
    assert (parameter.tolist(), other.tolist()) == before and still.skipped == 2
    for _ in range(grpo_trainer.BROKEN - 3):
        step([math.nan, 1.0])
    step([1.0, 1.0])  # one that is a number, and all is well again
    assert parameter.tolist() != before[0] and still.skipped == grpo_trainer.BROKEN - 1
    with pytest.raises(UsageError, match="10 updates in a row are no numbers"):
        for _ in range(grpo_trainer.BROKEN):
            step([math.nan, 1.0])


def test_one_broken_update_does_not_end_training(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = grpo_trainer.SkipEmptySteps.__call__
    number = iter(range(9))

    def broken(self: Any, optimizer: torch.optim.Optimizer, *more: Any) -> None:
        if next(number) == 1:
            optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)
        told(self, optimizer, *more)

    monkeypatch.setattr(grpo_trainer.SkipEmptySteps, "__call__", broken)
    lines = run([*argv, "trainer.max_steps=3"], Counting(right, wrong))
    assert [x["skipped_updates"] for x in lines] == [0, 1, 0] and all(x["loss"] is not None for x in lines)


def test_a_batch_of_faults_does_not_end_training(argv: list[str]) -> None:
    (line,) = run(argv, Counting(lost))
    assert line["masked"] == 4 and line["reward"] is None and line["correct_rate"] is None


def test_the_log_is_right_when_steps_and_generations_differ(argv: list[str]) -> None:
    # Two gradient steps an update, and answers for two updates at once: every second line learns from the line before's.
    more = ["trainer.max_steps=4", "trainer.gradient_accumulation_steps=2", "trainer.steps_per_generation=4",
            "trainer.per_device_train_batch_size=2"]  # fmt: skip
    lines = run([*argv, *more], Counting(right, wrong))
    assert [x["step"] for x in lines] == [1, 2, 3, 4] and all(x.keys() >= KEYS for x in lines)
    assert [x["gradings"] for x in lines] == [8, 8, 16, 16] and [x["correct_rate"] for x in lines] == [0.5] * 4
    assert lines[1]["grading_seconds"] == 0 and lines[1]["reward"] == lines[0]["reward"]


def test_several_generations_an_update_are_one_line(argv: list[str]) -> None:
    more = ["trainer.gradient_accumulation_steps=4", "trainer.steps_per_generation=1"]
    (line,) = run([*argv, *more], Counting(right, right, wrong, lost))
    assert line["gradings"] == 16 and line["masked"] == 4 and line["correct_rate"] == pytest.approx(8 / 12)
    assert line["reward"] == pytest.approx((8 + 4 * WRONG) / 12), "over samples, not over means of groups"


def test_the_report_asks_as_training_did(argv: list[str], model_folder: Path, stack: contextlib.ExitStack) -> None:
    trainer = grpo.trainer_of(read(grpo.Settings, argv), stack, by_word)
    prompts = [row["prompt"] for row in trainer.train_dataset]
    ids, _, _ = trainer._tokenize_prompts(prompts)
    model, conversation = LocalModel(str(model_folder), device="cpu"), Conversation(trainer.processing_class)
    for row, prompt, mine in zip(trainer.train_dataset, prompts, ids, strict=True):
        from kbx_env.baselines import hf

        from kbx_env.envs.prompt import instruction
        from kbx_env.spec.catalog import load_task

        asked = hf.render(instruction(load_task(row["task"]), "cpu"), "f")
        assert model.prompt_ids(ChatRequest(tuple(asked), 8)) == list(mine) == conversation.opening(prompt)


def test_an_empty_answer_is_an_end_token(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "_generate_single_turn", lambda self, ids, *a: ([[] for _ in ids], None))
    (line,) = run(argv)
    assert line["gradings"] == 4 and line["completions/mean_length"] == 1


def test_few_tasks_fill_a_batch_and_none_is_left_out(argv: list[str], stack: contextlib.ExitStack) -> None:
    trainer = grpo.trainer_of(read(grpo.Settings, [*argv, "trainer.per_device_train_batch_size=10", "tasks=Lion,erfc*,logspace"]),
                              stack, by_word)  # fmt: skip
    names = trainer.train_dataset["task"]
    assert len(names) == 5 * -(-len(set(names)) // 5) and len(trainer.get_train_dataloader()) == len(names) // 5


def test_a_curriculum_is_in_order(argv: list[str], stack: contextlib.ExitStack) -> None:
    more = ["curriculum=true", "categories=[math,activation]", "tasks=*elu*,erfc*,cos,logspace"]
    trainer = grpo.trainer_of(read(grpo.Settings, [*argv, *more]), stack, by_word)
    levels = [(r["category"] != "math", r["category"] != "activation", r["difficulty"]) for r in trainer.train_dataset]
    assert levels == sorted(levels) and len(set(levels)) > 1 and not trainer.shuffle_dataset


KILLED = """
import os, signal, sys
sys.path[:0] = {tests!r}
from service_stand_in import by_word
from kbx_env.train import grpo, logs
from kbx_env.train.settings import read
class Killed(logs.JsonlLog):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)  # after the log of step 3, before checkpoint 4
logs.JsonlLog = Killed
grpo.run(read(grpo.Settings, sys.argv[1:]), by_word)
"""


def test_a_killed_run_goes_on_and_loses_nothing(argv: list[str], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = [*argv, "trainer.max_steps=5", "trainer.save_steps=2", "tasks=tril_mm_and_scale,erfc_sqrt,logspace,Lion"]

    def grade(task: str, source: bytes, **options: Any) -> Outcome:  # any function of the text
        return by_word(task, source)

    first = run([*more, f"out={whole}"], grade)
    here = Path(__file__).parent
    script = KILLED.format(tests=[str(here), str(here.parent / "helpers")])
    ended = subprocess.run([sys.executable, "-c", script, *more, f"out={killed}"], env=dict(os.environ), timeout=120)
    assert ended.returncode == -signal.SIGKILL and not (killed / "final").exists()
    assert grpo.main([*more, f"out={killed}"]) == 2, "never into an earlier run by accident"
    second = run([str(killed / "settings.yaml"), "resume=last"], grade)
    assert [x["step"] for x in second] == [1, 2, 3, 4, 5] and [x["gradings"] for x in second] == [4, 8, 12, 16, 20]
    assert [x["reward"] for x in first] == [x["reward"] for x in second]
    kept = [json.loads(x)["step"] for x in (killed / "samples.jsonl").read_text().splitlines()]
    assert kept == [s for s in range(1, 6) for _ in range(4)]
    from safetensors.torch import load_file

    one, other = (load_file(f / "final/model.safetensors") for f in (whole, killed))
    assert all(one[k].equal(other[k]) for k in one)
    (killed / "final/model.safetensors").unlink()
    run([str(killed / "settings.yaml"), "resume=last"], grade)
    assert (killed / "final/model.safetensors").is_file() and steps(killed) == second, "at its end: only written anew"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("model=nowhere", "nowhere"), ("reward=defualt", "default"), ("tasks=nothing", "nothing"), ("split=eval", "eval"),
        ("trainer.num_generations=3", "num_generations"), ("trainer.num_generation=2", "num_generations"), ("mode=many", "multi"),
        ("trainer.max_completion_length=9000", "max_completion_length"), ("vllm=true", "GPU"), ("vllm=maybe", "auto"),
        ("per_turn_credit=true", "mode=multi"), ("turn_length=9", "mode=multi"), ("gamma=2", "gamma"),
        ("categories=[math]", "curriculum"), ("lora.rank=1", "rank"),
        ("resume=nowhere", "nowhere"), ("episode=mean", "best"), ("executor=threads", "process"), ("dtype=int8", "int8"),
        ("max_turns=0", "max_turns"), ("trainer.output_dir=x", "set by"), ("backend=cuda", "cuda"),
        ("quantize=4bit", "lora"), ("quantize=int4", "4bit"), ("trainer.model_init_kwargs.attn_implementation=flashy", "flashy"),
        ("trainer.model_init_kwargs.quantization_config=x", "quantize"), ("template=nowhere.jinja", "nowhere"),
        ("trainer.push_to_hub=true", "upload"), ("eval_tasks=nothing", "nothing"), ("eval_tasks=*", "none is left"),
        ("trainer.eval_strategy=steps", "eval_tasks"), ("reasoning=[a]", "two tags"), ("overlap=maybe", "auto"),
        ("turn_baseline=mean", "leave-one-out"), ("turn_baseline=leave-one-out", "per_turn_credit"),
        ("grade_gpus=[0]", "backend=cuda"), ("grader=http://127.0.0.1:1", "no grading service"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    more: str, says: str, argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbx_env.client._ASK", 0.3)  # seconds in which a service may still start
    if more == "backend=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert grpo.main([*argv, more]) == 2
    line = [x for x in capsys.readouterr().err.splitlines() if x.startswith("grpo.py: ")]
    assert len(line) == 1 and says in line[0] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("reason", [KeyboardInterrupt, UsageError])
def test_the_workers_start_before_the_model_is_read_and_end_where_that_fails(
    reason: type[BaseException], argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    made: list[Any] = []

    class Grader(grpo_setup.BatchGrader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def close(self) -> None:
            super().close()
            made.append("closed")

    def load(*args: Any) -> Any:
        assert len(made) == 1, "the grader is there"
        raise reason("no weights")

    monkeypatch.setattr(grpo_setup, "BatchGrader", Grader)
    with monkeypatch.context() as failing:
        failing.setattr(grpo_setup, "load", load)
        assert grpo.main(argv) == {KeyboardInterrupt: 130, UsageError: 2}[reason]
    assert made[1:] == ["closed"]
    assert run(argv), "the same command begins a run in the same folder"


@pytest.mark.parametrize(
    ("gpus", "launched", "section", "refused"),
    [(4, False, {}, True), (1, False, {}, False), (4, True, {}, False), (4, False, {"use_cpu": True}, False)],
)
def test_one_process_that_sees_several_gpus_is_told_what_to_do(
    gpus: int, launched: bool, section: dict[str, bool], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "4")
    said = pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=0") if refused else contextlib.nullcontext()
    with said:
        grpo_setup._check_one_gpu(grpo.Settings(trainer=section))


@pytest.mark.full
def test_a_step_that_a_service_grades(argv: list[str], tmp_path: Path) -> None:
    from grading_service import Grader, running

    grade = Grader()
    with running(tmp_path, grade) as server:
        chosen = [a for a in argv if not a.startswith("workers=")]
        (line,) = run([*chosen, f"grader={server.url}"], None)
    assert line["gradings"] == 4 and line["masked"] == 0 and {call[2]["split"] for call in grade.calls} == {"train"}


def test_a_model_that_does_not_fit_is_refused(model_folder: Path) -> None:
    count = memory.weights_of(model_folder)
    model, _ = models.load(model_folder)
    assert count == sum(p.numel() for p in model.parameters())
    assert memory.needed(10, "float32", False) == 160 and memory.needed(10, "bfloat16", True, True) == 40
    memory.check(model_folder, "float32", False, False, 16 * count)
    with pytest.raises(UsageError, match="lora"):
        memory.check(model_folder, "float32", False, False, 16 * count - 1)


def test_memory_knows_what_is_shared() -> None:
    zero = memory.Sharding("ZeRO-3", 8, True, True, True, True)
    assert memory.needed(8, "float32", False, sharding=zero) == 16, "2 + 2 + 12 bytes a weight, over 8 GPUs"
    assert memory.needed(8, "float32", False, sharding=dataclasses.replace(zero, offloads=True)) == 4
    fsdp = memory.Sharding("FSDP2", 8, True, True, True)
    assert memory.needed(8, "float32", False, sharding=fsdp) == 16 and memory.needed(8, "bfloat16", True, sharding=fsdp) == 2
    assert memory.needed(10, "float32", False, optimizer="adamw_bnb_8bit") == 100
    assert memory.needed(10, "float32", False, optimizer="sgd") == 80
    assert memory.needed(100, "bfloat16", True, quantize="4bit") == 55
    found = [
        memory.sharding_of(SimpleNamespace(), env | {"WORLD_SIZE": "8"})
        for env in ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
                    {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
                    {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"})
    ]  # fmt: skip
    assert [(x.name, x.moments) for x in found] == [("DDP", False), ("FSDP2", True), ("FSDP2", True), ("FSDP1", False)]
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    ds = memory.sharding_of(SimpleNamespace(deepspeed_plugin=plugin), {"WORLD_SIZE": "4"})
    assert (ds.name, ds.weights, ds.gradients, ds.master, ds.offloads) == ("ZeRO-2", False, True, True, True)


def test_no_advice_to_train_weights_that_do_not_move(model_folder: Path) -> None:
    """Of weights in bfloat16 at a rate of 1e-6, 2 % moved in 20 steps of Adam."""
    with pytest.raises(UsageError) as caught:
        memory.check(model_folder, "float32", False, True, 1)
    text = str(caught.value)
    assert "bfloat16" not in text and all(x in text for x in ("lora=", "8bit", "FSDP", "memory_check=false", "vLLM server"))
    assert "float32" in memory.still("bfloat16", False, 1e-6) and memory.still("bfloat16", False, 1e-4) == ""
    assert memory.still("bfloat16", True, 1e-6) == memory.still("float32", False, 1e-6) == ""
    assert memory.still("bfloat16", False, 1e-6, memory.Sharding(master=True)) == ""
    weights = torch.empty(4096, dtype=torch.bfloat16).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    moved = weights.clone().requires_grad_()
    adam = torch.optim.AdamW([moved], lr=1e-6, weight_decay=0.0)
    for _ in range(20):
        moved.grad = torch.ones_like(moved)
        adam.step()
    assert (moved != weights).float().mean() < 0.1, "as the warning says"


@pytest.mark.parametrize("how", ["attn_implementation", "use_cache"])
def test_arguments_for_the_model_are_used(how: str, argv: list[str], stack: contextlib.ExitStack) -> None:
    more = {"attn_implementation": "eager", "use_cache": False}[how]
    trainer = grpo.trainer_of(read(grpo.Settings, [*argv, f"trainer.model_init_kwargs.{how}={str(more).lower()}"]), stack, by_word)
    config = trainer.model.config
    assert (config._attn_implementation if how == "attn_implementation" else config.use_cache) == more


def test_evaluation_has_tasks_and_lines_of_its_own(argv: list[str], tmp_path: Path) -> None:
    more = ["trainer.max_steps=2", "trainer.eval_steps=1", "eval_tasks=erfc_sqrt"]

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        return right(task) if task.endswith("erfc_sqrt") else wrong(task)

    lines = run([*argv, *more], grade)
    trained, held = ([x for x in lines if ("eval_reward" in x) == which] for which in (False, True))
    assert [x["step"] for x in trained] == [x["step"] for x in held] == [1, 2]
    assert all(x["correct_rate"] == 0 and x["reward"] == pytest.approx(WRONG) for x in trained), "none of the other task"
    assert all(x["eval_correct_rate"] == 1 and x["eval_reward"] == pytest.approx(1.0) for x in held)
    assert [x["gradings"] for x in trained] == [4, 8] and [x["eval_gradings"] for x in held] == [1, 1]
    shown = [json.loads(x)["task"] for x in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert set(shown) == {"math/logspace"} or all("logspace" in t for t in shown)


def test_continuous_batching_leaves_the_weights_as_they_are(argv: list[str], stack: contextlib.ExitStack) -> None:
    """TRL casts the weights to half precision for it, and leaves them so."""
    more = ["trainer.use_transformers_continuous_batching=true", "trainer.bf16=true", "trainer.use_cpu=true",
            "trainer.max_completion_length=4"]  # fmt: skip
    trainer = grpo.trainer_of(read(grpo.Settings, [*argv, *more]), stack, Counting(right, wrong))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    attention = trainer.model.config._attn_implementation
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert {p.dtype for p in after.values()} == {torch.float32} and trainer.model.config._attn_implementation == attention
    assert any(not torch.equal(before[n], after[n].detach()) for n in before), "and they learnt"
    assert trainer._half.dtype == torch.bfloat16 and trainer.state.global_step == 1


def test_lora_is_merged_and_resumed(argv: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    more = [*argv, "lora.r=2", "lora.target_modules=all-linear", "trainer.max_steps=2", "trainer.save_steps=1"]
    run(more, Counting(right, wrong))
    out = tmp_path / "out"
    assert (out / "checkpoint-1/adapter_model.safetensors").is_file() and not (out / "final/adapter_config.json").exists()
    merged, _ = models.load(out / "final")
    from peft import PeftModel

    base, _ = models.load(argv[0].partition("=")[2])
    apart = PeftModel.from_pretrained(base, str(out / "adapter")).merge_and_unload()
    own = dict(merged.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in apart.named_parameters()), "the adapter is kept as well"
    assert grpo.main([str(out / "settings.yaml"), "resume=last"]) == 0, "at its end: merged anew"


def test_mirrors_see_the_same_numbers(argv: list[str], monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
    # Reporters that TRL adds come before our own callbacks; the metrics must come before them.
    trainer = grpo.trainer_of(read(grpo.Settings, argv), stack, by_word)
    names = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    assert names[0] == "StepMetrics" and names.count("StepMetrics") == 1 and "JsonlLog" in names


@pytest.mark.parametrize("name", ["grpo", "tiny-grpo", "tiny-grpo-multi"])
def test_the_shipped_configurations_are_accepted(name: str, tmp_path: Path) -> None:
    s = read(grpo.Settings, [str(Path(grpo.__file__).parent / f"configs/{name}.yaml"), "model=m", f"out={tmp_path}"])
    grpo_setup.check(s)
    assert grpo_setup.config_of_run(s).loss_type == "dr_grpo" and grpo_setup.tasks_of(s)


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ({}, ""), ({"min_p": 0.05, "top_k": 20}, "min_p=0.05, top_k=20"), ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_p": "null", "top_k": -1}, ""), ({"generation_kwargs.min_p": 0.1}, "min_p=0.1"),
        ({"top_p": 0.9, "generation_kwargs.top_p": 1.0}, ""),
    ],
)  # fmt: skip
def test_sampling_that_leaves_tokens_out_is_warned_of(
    cut: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"trainer.{name}={value}" for name, value in {"use_cpu": "true", **cut}.items()]
    config = grpo_setup.config_of_run(read(grpo.Settings, ["model=m", f"out={tmp_path}", *words]))
    told = capsys.readouterr().out
    assert grpo_setup.truncated(config) == says and (says in told if says else "warning" not in told)


@pytest.mark.usefixtures("no_figures")
def test_from_nothing_to_a_report(model_folder: Path, shown: Path, tmp_path: Path) -> None:
    """The real chain with the real grader: SFT, GRPO on one answer, GRPO over two, and a report over two turns."""
    from kbx_env.train import sft

    more = ["trainer.disable_tqdm=true"]
    assert sft.main([f"model={model_folder}", f"data={shown}", f"out={tmp_path / 'sft'}", "trainer.max_steps=3", *more]) == 0
    common = [*QUICK, *more, "targets=none", "trainer.max_steps=2"]
    assert grpo.main([f"model={tmp_path / 'sft/final'}", f"out={tmp_path / 'one'}", *common]) == 0
    turns = ["mode=multi", "max_turns=2", "per_turn_credit=true", "trainer.max_completion_length=200"]
    assert grpo.main([f"model={tmp_path / 'one/final'}", f"out={tmp_path / 'two'}", *common, *turns]) == 0
    for out in ("one", "two"):
        assert [x["step"] for x in steps(tmp_path / out)] == [1, 2] and all(x.keys() >= KEYS for x in steps(tmp_path / out))
    final = tmp_path / "two/final"
    asked = ["--backend", "cpu", "--split", "train", "--tasks", "logspace,erfc_sqrt", "--targets", "none", "--max-tokens", "8",
             "--device", "cpu", "--policy", f"hf:{final}", "--policy", f"hf:{final},turns=2"]  # fmt: skip
    assert report.main([*asked, "--out", str(tmp_path / "report")]) == 0
    found = json.loads((tmp_path / "report/report.json").read_text())["policies"]
    assert [p["summary"]["n"] for p in found] == [2, 2] and found[1]["about"]["turns"] == 2
    assert models.tokenizer_for(final).chat_template == models.tokenizer_for(model_folder).chat_template
