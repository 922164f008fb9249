"""What one of two processes of a distributed run does in ``test_distributed.py``; run by itself, with gloo on the CPU.

    RANK=0 WORLD_SIZE=2 ... python two_processes.py WHAT OUT ARGUMENTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

from accelerate import Accelerator  # noqa: E402
from kbx_env.baselines.llm.conversation import Conversation  # noqa: E402
from kbx_env.train import grpo, grpo_trainer, models, rollout  # noqa: E402
from kbx_env.train.batch_grader import BatchGrader  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402
from kbx_env.train.step_metrics import StepMetrics  # noqa: E402
from service_stand_in import by_word  # noqa: E402
from test_batch_grader import TASK  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402


class Server:
    """Stands for a vLLM server: answers each prompt with the name in it, GOOD where the name says that it is due, else BAD."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.sizes = tokenizer, list[int]()

    def generate(self, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
        """Return answers as ``trl.generation.vllm_client.VLLMClient.generate``."""
        self.sizes.append(len(prompts))
        answers = []
        for prompt in prompts:
            text = self._tokenizer.decode(prompt)
            name = text.split("episode ")[1].split()[0]
            word = "GOOD" if text.count("Verdict:") >= int(name.split("-")[1]) else "BAD"
            ids = self._tokenizer(f"```python\n{word} {name}\n```", add_special_tokens=False)["input_ids"]
            answers.append([*ids, self._tokenizer.eos_token_id])
        logprobs = [[[-float(i)] for i in range(len(a))] for a in answers]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": logprobs}


def server(out: Path, model: str) -> None:
    """Play episodes of different lengths against one server; writes what each episode was answered."""
    accelerator, tokenizer = Accelerator(cpu=True), models.tokenizer_for(model)
    vllm = VLLMGeneration.__new__(VLLMGeneration)
    client = Server(tokenizer)
    vars(vllm).update(
        mode="server", accelerator=accelerator, vllm_client=client, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
        repetition_penalty=1.0, max_completion_length=9, logprobs=0, structured_outputs_regex=None, generation_kwargs={},
        tensor_parallel_size=1,
    )  # fmt: skip

    def single_turn(prompts: Any, *args: Any) -> Any:  # as GRPOTrainer's with vLLM
        _, ids, logprobs, _ = vllm.generate(prompts=prompts, images=None, num_generations=1)
        return ids, [[p[0] for p in row] for row in logprobs]

    trainer = SimpleNamespace(
        accelerator=accelerator, processing_class=tokenizer, state=SimpleNamespace(global_step=0), use_vllm=True,
        vllm_generation=vllm, _generate_single_turn=single_turn, eos_token_ids=[tokenizer.eos_token_id],
    )  # fmt: skip
    rank = accelerator.process_index
    # The episodes of the first process end in turns 1, 1 and 3, those of the second one in turns 2, 3, 3.
    names = [f"{rank}{k}-{needed}" for k, needed in enumerate([(0, 0, 2), (1, 2, 2)][rank])]
    with BatchGrader(backend="cpu", workers=1, grade=by_word) as grader:
        play = rollout.Rollout(grader, StepMetrics(out, grader), Conversation(tokenizer), grpo_trainer.generate, 4, 4000)
        made = play([[{"role": "user", "content": f"episode {n} .", "task": TASK}] for n in names], trainer)
    texts = [tokenizer.decode(ids) for ids in made["completion_ids"]]
    lengths = [len(a) == len(b) for a, b in zip(made["completion_ids"], made["logprobs"], strict=True)]
    found = {"names": names, "texts": texts, "rewards": made[rollout.REWARD], "lengths": lengths, "sizes": client.sizes}
    (out / f"{rank}.json").write_text(json.dumps(found))


def train(out: Path, *argv: str) -> None:
    """Run ``train/grpo.py``."""
    s = read(grpo.Settings, [*argv, f"out={out / 'run'}"])
    grpo.run(s, by_word)
    (out / f"{os.environ['RANK']}.json").write_text("{}")


if __name__ == "__main__":
    {"server": server, "train": train}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
