"""GRPO of a model with the shape of a 7B or 1.5B on one GPU: memory, tokens a second, seconds of generating, grading and updating.

    python benchmarks/train_shapes.py shape=7b out=runs/shapes/7b
    python benchmarks/train_shapes.py shape=1.5b lora=false out=runs/shapes/1.5b
    CUDA_VISIBLE_DEVICES=0 python benchmarks/train_shapes.py shape=1.5b lora=false grade_gpus=[1] out=runs/shapes/two-gpus
    CUDA_VISIBLE_DEVICES=0 python benchmarks/train_shapes.py shape=1.5b lora=false grade_gpus=[1] mean=128 overlap=alternate \
        out=runs/shapes/overlap
    python benchmarks/train_shapes.py shape=tiny backend=cpu steps=2 tokens=16 out=runs/shapes/tiny     # on a CPU, in a minute

The model has the architecture of Qwen2.5-Coder with random weights (from its config; nothing is downloaded) and a tokenizer
trained on our sources. Such a model never ends an answer, so every answer has ``tokens`` tokens: the most that a step can cost.
With ``mean`` answers end at random instead: one of ``mean`` tokens of the vocabulary ends an answer, which so has about ``mean``.
Its answers are no kernels. So that gradings cost what they do in training, each is graded as another source: the expert kernel of
its task, or the expert with one fault, which may be in code that its task does not use. Gradings are timed on the same GPU, or on
those of ``grade_gpus``; there they begin as soon as an answer ends (``overlap``).

A first process makes all steps but the last, and a second one resumes from its checkpoint. ``out/result.json`` has one entry a
step and the totals; every number is measured in this process, seconds with the GPU synchronised. ``grading_seconds`` is what a
step waits for gradings after its last answer has ended.

Packages beside torch, Triton and transformers: trl, peft, accelerate, datasets (with dill, multiprocess, xxhash, pyarrow, pandas),
omegaconf (with antlr4-python3-runtime), gymnasium (with farama-notifications).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train import grpo, models, mutation
from kbx_env.train import grpo_setup as setup
from kbx_env.train.answer_watch import AnswerWatch
from kbx_env.train.runs import checkpoint_of
from kbx_env.train.settings import MISSING, command, read

from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, load_tasks

SHAPES: dict[str, dict[str, Any]] = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True},
}  # fmt: skip
"""Sizes of the config of Qwen2.5-Coder-7B and -1.5B, and of a model for a test of this script."""
COMMON = {"max_position_embeddings": 32768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""What their configs share."""
TOKENS = 4096
"""Tokens of the tokenizer, or as many as the model has; the rest of the vocabulary is never in a prompt."""
RESULT = "result.json"
"""File of the result, in ``out``."""
ENGINES = ("continuous", "generate")
"""Ways of transformers to generate: continuous batching, or one padded batch."""
OVERLAPS = ("auto", "true", "false", "alternate")
"""Whether gradings begin as answers end: as in train/grpo.py, or in every other step, to compare."""


@dataclass
class Settings:
    """Settings of this script."""

    out: str = MISSING
    """Folder for the model, the run and result.json."""
    shape: str = "7b"
    """7b, 1.5b or tiny."""
    lora: bool = True
    """Train a LoRA adapter of rank 32 on weights in bfloat16; false: train all weights, in float32."""
    steps: int = 5
    """Updates in all; the last one is made by the process that resumes."""
    prompts: int = 8
    """Tasks of a step."""
    answers: int = 8
    """Answers to each task."""
    tokens: int = 1024
    """Tokens of every answer; with ``mean``, of an answer at most."""
    mean: int | None = None
    """Tokens of an answer on average; by default no answer ends by itself."""
    overlap: str = "auto"
    """Begin to grade answers as they end: auto, true, false or alternate (every other step)."""
    batch: int = 2
    """Answers of a forward and backward pass."""
    backend: str = "cuda"
    """Where kernels are graded: cuda or cpu."""
    engine: str = "continuous"
    """continuous or generate."""
    cache: float = 0.5
    """Share of the free GPU memory that the cache of continuous batching takes; the rest is left to kernels."""
    grade_gpus: list[int] | None = None
    """GPUs that only grade, as train/grpo.py takes them; without them gradings share the GPU of the model."""
    timing: bool = True
    """Time correct kernels, on a GPU."""
    final: bool = False
    """Write the trained model at the end of each part, as train/grpo.py does; of a 7B that takes minutes."""
    part: str = "all"
    """all; or begin and resume, which this script calls itself."""


def build(s: Settings) -> Path:
    """Write the checkpoint, where it is not there yet.

    Args:
        s: the settings.

    Returns:
        Its folder.

    Raises:
        UnknownName: no such shape, engine or overlap.
        UsageError: ``mean`` is out of its range.
    """
    for kind, value, known in (("shape", s.shape, SHAPES), ("engine", s.engine, ENGINES), ("overlap", s.overlap, OVERLAPS)):
        if value not in known:
            raise UnknownName(kind, value, known)
    if s.mean is not None and s.mean < 2:
        raise UsageError(f"mean is {s.mean}; at least 2 tokens, or leave it out for answers that do not end")
    folder = Path(s.out) / ("model" if s.mean is None else f"model-{s.mean}")
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**COMMON, **SHAPES[s.shape]}
    core = models._words_core(min(TOKENS, sizes["vocab_size"]) - len(models.ADDED_TOKENS))
    tokenizer = models.wrapped(core, models.template_of("qwen3_instruct_2507"), sizes["max_position_embeddings"])
    config = Qwen2Config(**sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if s.mean is not None:  # random weights draw all tokens with about the same probability
        others = range(sizes["vocab_size"] - sizes["vocab_size"] // s.mean, sizes["vocab_size"])
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *others]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class ExpertAnswers:
    """A grader that grades experts, whole or with a fault, in place of what a random model says."""

    def __init__(self, grader: Any) -> None:
        """Wrap a grader.

        Args:
            grader: a ``BatchGrader``.
        """
        self._grader = grader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grader, name)

    def __call__(self, answers: Sequence[tuple[str, str]]) -> Any:
        """Grade the sources that stand for these answers."""
        return self._grader([(task, self.kernel(task, text)) for task, text in answers])

    def begin(self, task: str, text: str) -> None:
        """Begin to grade the source that stands for an answer."""
        self._grader.begin(task, self.kernel(task, text))

    @staticmethod
    @functools.lru_cache(4096)
    def kernel(task: str, text: str) -> str:
        """Return the source that stands for an answer: the same for equal answers, and another for each different one."""
        number = int.from_bytes(hashlib.sha256(f"{task}\n{text}".encode("utf-8", "surrogatepass")).digest()[:6])
        expert = expert_source(task) or ""
        faulty = [] if number % 2 == 0 else mutation.broken(expert, 1, number)
        return f"{faulty[0][1] if faulty else expert}\n# answer {number}\n"


class Meter:
    """Measures the steps of a trainer."""

    def __init__(self, trainer: Any, grader: Any) -> None:
        """Wrap a trainer's generation, and measure from its first step on.

        Args:
            trainer: a ``KernelTrainer``.
            grader: counts the seconds of gradings.
        """
        self._trainer, self._grader, self.steps = trainer, grader, list[dict[str, Any]]()
        self._begun = 0
        self._generating, self._tokens, self._used, self._stop = 0.0, 0, 0, threading.Event()
        self._inner: Callable[..., Any] = trainer._generate_single_turn
        trainer._generate_single_turn = self._generate
        self._begin()

    def _begin(self) -> None:
        self._start, self._graded = _now(), self._grader.seconds
        self._generating, self._tokens = 0.0, 0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = _now()
        ids, logprobs = self._inner(*args, **kwargs)
        self._generating += _now() - start
        self._tokens += sum(map(len, ids))
        return ids, logprobs

    def step(self, number: int) -> None:
        """End a step: add its line to ``steps``."""
        seconds = _now() - self._start
        grading = self._grader.seconds - self._graded
        begun = 0 if self._trainer.watch is None else self._trainer.watch.begun - self._begun
        self._begun += begun
        self.steps.append({
            "step": number, "seconds": round(seconds, 3), "generation_seconds": round(self._generating, 3),
            "grading_seconds": round(grading, 3), "update_seconds": round(seconds - self._generating - grading, 3),
            "tokens": self._tokens, "tokens_per_second": round(self._tokens / self._generating, 1) if self._generating else None,
            "overlaps": self._trainer.watch is not None, "handed_in_early": begun, **_memory(),
        })  # fmt: skip
        self._begin()

    @contextlib.contextmanager
    def device_memory(self) -> Iterator[None]:
        """Watch how much memory of the GPU all processes together use: that of this one, and of the kernels that are graded."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        import torch

        while torch.cuda.is_available() and not self._stop.wait(0.5):
            free, total = torch.cuda.mem_get_info()
            self._used = max(self._used, total - free)

    @property
    def most_used(self) -> float | None:
        """GiB of the GPU that were in use at most; ``None`` without a GPU."""
        return round(self._used / 2**30, 2) if self._used else None


def _now() -> float:
    """Wait for the GPU, and return the time in seconds."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory() -> dict[str, float | None]:
    import torch

    if not torch.cuda.is_available():
        return {"allocated_gib": None, "reserved_gib": None}
    found = {"allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
             "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    return found


def run_settings(s: Settings, model: Path, resume: bool) -> grpo.Settings:
    """Return the settings of ``train/grpo.py`` for this run.

    Args:
        s: the settings.
        model: the checkpoint.
        resume: whether the run goes on.

    Returns:
        The settings.
    """
    tasks = [t.id for t in load_tasks(split="train") if expert_source(t.id) and t.category in ("activation", "math")][: s.prompts]
    cpu = s.backend == "cpu"
    section: dict[str, Any] = {
        "max_steps": s.steps if resume else s.steps - 1, "save_steps": s.steps - 1, "save_total_limit": 1,
        "num_generations": s.answers, "per_device_train_batch_size": s.batch,
        "gradient_accumulation_steps": s.prompts * s.answers // s.batch, "max_completion_length": s.tokens,
        "learning_rate": 2.0e-5 if s.lora else 1.0e-6, "lr_scheduler_type": "constant", "mask_truncated_completions": False,
        "disable_tqdm": True, "use_cpu": cpu, "bf16": not cpu, "generation_kwargs": {"min_new_tokens": s.tokens},
    }  # fmt: skip
    if s.mean is not None or s.engine == "continuous":
        del section["generation_kwargs"]
    if s.engine == "continuous":
        section |= {"use_transformers_continuous_batching": True,
                    "transformers_continuous_batching_config": {"max_memory_percent": s.cache}}  # fmt: skip
    made = read(grpo.Settings, [f"model={model}", f"out={Path(s.out) / 'run'}"])
    made.tasks, made.backend, made.targets, made.vllm = ",".join(tasks), s.backend, "none", "false"
    made.timing, made.grade_gpus = s.timing, s.grade_gpus
    made.overlap = "true" if s.overlap == "alternate" else s.overlap
    made.lora = {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"} if s.lora else None
    made.trainer, made.resume = section, "last" if resume else None
    return made


def measured_trainer(found: list[Meter], alternate: bool) -> Callable[..., Any]:
    """Return a function that makes a trainer as ``grpo.trainer_of`` does, whose answers are experts and whose steps are measured.

    Args:
        found: receives the meter.
        alternate: begin gradings early in every other step alone.

    Returns:
        The function.
    """

    def trainer_of(s: grpo.Settings, stack: contextlib.ExitStack, grade: Any = None) -> Any:
        from transformers import TrainerCallback

        setup.check(s)
        tasks, config, adapter = setup.tasks_of(s), setup.config_of_run(s), setup.adapter_of(s.lora)
        setup.check_model(s, config)
        grader: Any = ExpertAnswers(stack.enter_context(setup.grader_of(s, grade)))
        model, tokenizer = setup.load(s, config)
        data = setup.rows_of(s, tasks, grader.backend, config, model, tokenizer)
        trainer = setup.assemble(s, config, model, tokenizer, adapter, data, grader)
        watch = None
        if setup.overlaps(s, grader):
            watch = trainer.watch = AnswerWatch(grader, Conversation(tokenizer, trainer.eos_token_ids, setup.prompting_of(s)))
        meter = Meter(trainer, grader)
        found.append(meter)
        stack.enter_context(meter.device_memory())

        class Steps(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                meter.step(state.global_step)
                if alternate:
                    trainer.watch = watch if trainer.watch is None else None

        trainer.add_callback(Steps())
        return trainer

    return trainer_of


def part(s: Settings, resume: bool) -> None:
    """Train one part of the run, and write its numbers beside the result.

    Args:
        s: the settings.
        resume: whether it is the part that resumes.
    """
    model, meters = build(s), list[Meter]()
    start, settings = time.perf_counter(), run_settings(s, model, resume)
    trainer_of = measured_trainer(meters, s.overlap == "alternate")
    if s.final:
        grpo.run(settings, trainer_of=trainer_of)
    else:
        checkpoint = checkpoint_of(settings.out, settings.resume)
        with contextlib.ExitStack() as stack:
            trainer = trainer_of(settings, stack)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    found = {"steps": meters[0].steps, "seconds": round(time.perf_counter() - start, 1), "device_gib": meters[0].most_used}
    (Path(s.out) / f"{s.part}.json").write_text(json.dumps(found))


def run(s: Settings) -> None:
    """Train both parts, each in a process of its own, and write ``result.json``.

    Args:
        s: the settings.
    """
    if s.part in ("begin", "resume"):
        part(s, s.part == "resume")
        return
    build(s)
    given = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in vars(s).items() if k != "part"]
    parts = {}
    for name in ("begin", "resume"):
        subprocess.run([sys.executable, str(Path(__file__).resolve()), *given, f"part={name}"], check=True)
        parts[name] = json.loads((Path(s.out) / f"{name}.json").read_text())
    # The first step of a process warms up: kernels are compiled, memory is taken.
    warm = [x for p in parts.values() for x in p["steps"][1:]] or [x for p in parts.values() for x in p["steps"]]
    by_overlap = {name: _mean(steps) for name, on in (("with", True), ("without", False))
                  if (steps := [x for x in warm if x["overlaps"] is on])}  # fmt: skip
    result = {**vars(s), "about": _about(s), "parts": parts, "by_overlap": by_overlap}
    path = Path(s.out) / RESULT
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, means in by_overlap.items():
        print(f"{name} early gradings: {json.dumps(means)}")
    print(f"result: {path}")


def _mean(steps: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each number over some steps."""
    known = {k: [x[k] for x in steps if x[k] is not None] for k in steps[0] if k not in ("step", "overlaps")}
    return {k: round(sum(v) / len(v), 3) if v else None for k, v in known.items()}


def _about(s: Settings) -> dict[str, Any]:
    import torch
    import transformers
    import trl

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    sizes = SHAPES[s.shape]
    return {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__,
            "cores": os.cpu_count(), "sizes": sizes}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when done, 2 on bad usage, 130 when interrupted."""
    return command("train_shapes.py", Settings, __doc__ or "", run, argv)


if __name__ == "__main__":
    sys.exit(main())
