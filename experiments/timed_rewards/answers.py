"""The finite set of answers of the study: the project's kernels of five train tasks, with other schedules and with faults."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from experiments.small_models.compact import compact
from experiments.true_reward.cheats import shape_of
from kbx_env.spec.catalog import expert_source, load_task

Schedule = tuple[int, ...]
"""Number of the option that is taken at each place."""
Change = tuple[tuple[str, str], ...]
"""Replacements of texts, each of which occurs once in the kernel."""


@dataclass(frozen=True)
class Space:
    """The answers for one task.

    Attributes:
        places: for each place of the kernel the options, the first of which is the project's own.
        faults: changes after which the kernel runs and is wrong.
    """

    places: tuple[tuple[Change, ...], ...]
    faults: tuple[Change, ...]

    def schedules(self) -> list[Schedule]:
        """Return all schedules; the first is the project's own."""
        return list(itertools.product(*(range(len(options)) for options in self.places)))


@dataclass(frozen=True)
class Answer:
    """A kernel with a schedule and some faults; bit k of ``faults`` says whether fault k is there."""

    task: str
    schedule: Schedule
    faults: int = 0

    @property
    def source(self) -> str:
        """The source, in compact form."""
        space, text = SPACES[self.task], _kernel(self.task)
        changes = [options[k] for options, k in zip(space.places, self.schedule, strict=True)]
        changes += [change for k, change in enumerate(space.faults) if self.faults >> k & 1]
        for old, new in itertools.chain(*changes):
            if text.count(old) != 1:
                raise ValueError(f"{self.task}: {old!r} occurs {text.count(old)} times in the kernel; adapt its places")
            text = text.replace(old, new)
        return text


@functools.cache
def _kernel(task: str) -> str:
    """Return the project's kernel of a task in compact form."""
    return compact(expert_source(task) or "", load_task(task).entry)


def _options(*olds: str, to: tuple[tuple[str, ...], ...]) -> tuple[Change, ...]:
    """Return the options of a place: its texts as they are, then each row of ``to`` in their stead."""
    return tuple(tuple(zip(olds, news, strict=True)) for news in (olds, *to))


def _blocks(grid: str, end: str, own: tuple[int, int]) -> tuple[Change, ...]:
    """Return block sizes and warps of a kernel for elements, whose grid and launch name the block size.

    Args:
        grid: text with the block size of the grid, with ``{block}``.
        end: text at the end of the launch as the project has it.
        own: the project's block size and warps.

    Returns:
        The options: 256, 1,024 or 4,096 elements a program with 2, 4 or 8 warps.
    """
    sizes = [own, *(s for s in itertools.product((256, 1024, 4096), (2, 4, 8)) if s != own)]
    return tuple(
        ((grid.format(block=own[0]), grid.format(block=block)), (end, f"BLOCK={block}, num_warps={warps})"))
        for block, warps in sizes
    )


_OTHERS = ((4, 2), (8, 2), (8, 3))
"""Warps and stages of the matrix product, beside the project's 4 and 3."""
SPACES: Mapping[str, Space] = {
    "optimizer/AdamW": Space(
        (_blocks("_adamw[triton.cdiv(n, {block}),]", "BLOCK=1024)", (1024, 4)),),
        ((("one_beta2 * grad * grad", "one_beta2 * grad"),),
         (("param = tl.load(p + o, mask=inside) * decay", "param = tl.load(p + o, mask=inside)"),)),
    ),
    "fusion/fused_cos_signbit": Space(
        (_blocks("_cos_signbit[triton.cdiv(n, {block}),]", "BLOCK=1024, num_warps=4)", (1024, 4)),),
        ((("tl.cos(", "tl.sin("),), (("c.to(tl.int32, bitcast=True) < 0", "c.to(tl.int32, bitcast=True) > 0"),)),
    ),
    "matrixmultiply/tril_mm_and_scale": Space(
        (_options("(128, 64, 32) if", to=(("(64, 64, 32) if",), ("(128, 128, 32) if",))),
         _options("num_warps=4, num_stages=3)", to=tuple((f"num_warps={w}, num_stages={s})",) for w, s in _OTHERS))),
        ((("k[None, :] <= m[:, None]", "k[None, :] < m[:, None]"),), (("acc * scale", "acc"),)),
    ),
    "loss/cross_entropy": Space(
        (_options("if BC < 512 else 4", to=(("if BC < 512 else 1",), ("if BC < 512 else 8",))),
         _options("BC=BC, num_warps=8)", to=(("BC=BC, num_warps=4)",),)),
         _options("MEAN=reduction == 'mean', BLOCK=1024)", to=(("MEAN=reduction == 'mean', BLOCK=4096)",),))),
        ((("(top - picked + tl.log(total))", "(picked - top + tl.log(total))"),),
         (("result / tl.sum(weights, 0)", "result / n"),)),
    ),
    "optimizer/Lion": Space(
        (_blocks("kernel[triton.cdiv(n, {block}),]", "BLOCK=1024, num_warps=4)", (1024, 4)),),
        ((("u = beta1 * first + one_beta1 * grad", "u = first + grad"),),
         (("beta2 * first + one_beta2 * grad, mask", "beta2 * first + grad, mask"),)),
    ),
}  # fmt: skip
"""The answers by task: train tasks whose kernels leave room for other schedules."""
HELD_OUT = ("optimizer/Lion",)
"""Tasks that SFT teaches and GRPO does not ask for."""
TRAINED = tuple(task for task in SPACES if task not in HELD_OUT)


def all_answers(task: str) -> Iterator[Answer]:
    """Yield every answer for a task: every schedule with every set of faults."""
    for schedule in SPACES[task].schedules():
        for faults in range(1 << len(SPACES[task].faults)):
            yield Answer(task, schedule, faults)


def by_shape(task: str) -> dict[str, Answer]:
    """Return the answers for a task by their syntax trees.

    Args:
        task: the task.

    Returns:
        The answers by ``shape_of`` their sources.

    Raises:
        ValueError: two answers are the same program.
    """
    found = dict[str, Answer]()
    for answer in all_answers(task):
        if found.setdefault(shape_of(answer.source) or "", answer) is not answer:
            raise ValueError(f"{task}: {answer} is the same program as {found[shape_of(answer.source) or '']}")
    return found
