"""verl (0.9): an agent loop in which the model answers, reads the verdict and answers again."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

from kbx_env.integrations.episode import KernelEpisode
from kbx_env.integrations.verl import AGENT, numbers
from kbx_env.train.rollout import episode_reward
from kbx_env.train.step_metrics import best_of
from kbx_env.train.warm_grader import WarmGrader, shared


@register(AGENT)
class KernelAgentLoop(AgentLoopBase):
    """Plays one episode for a row of data. The reward is that of the best answer.

    An episode whose gradings were all masked has reward 0.0 and an empty response mask, so that nothing is learnt from it.
    """

    def __init__(
        self, *args: Any, max_turns: int = 3, preset: str = "default", backend: str = "auto", grader: WarmGrader | None = None,
        options: dict[str, Any] | None = None, url: str | None = None, token: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Make the loop of one row; verl passes the arguments of the base class.

        Args:
            *args: for the base class.
            max_turns: answers of an episode.
            preset: name of the reward preset.
            backend: ``cpu``, ``cuda`` or ``auto``.
            grader: replaces the grader that the other arguments describe.
            options: further options of the grader.
            url: address of a grading service.
            token: its bearer token.
            **kwargs: for the base class.
        """
        super().__init__(*args, **kwargs)
        place = {} if url is None else {"url": url, "token": token}
        self._grader = grader or shared(preset, backend, **place, **(options or {}))
        self._max_turns, self._room = max_turns, self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play an episode.

        Args:
            sampling_params: of the engine.
            **row: the row of data, with ``raw_prompt`` and ``extra_info`` or ``reward_model`` that name the task.

        Returns:
            Tokens, mask (1 on what the model generated), reward and numbers for the log.
        """
        messages = [dict(m) for m in row["raw_prompt"]]
        task = (row.get("extra_info") or {}).get("task") or row["reward_model"]["ground_truth"]
        episode, timed, number = KernelEpisode(self._grader, task, self._max_turns), dict[str, Any](), uuid4().hex
        ids = await self.ct_build_initial_tokens(messages)
        mask, logprobs, extra = list[int](), list[float](), dict[str, Any]()
        while not episode.done:
            with simple_timer("generate_sequences", timed):
                out = await self.server_manager.generate(request_id=number, prompt_ids=ids, sampling_params=sampling_params)
            extra = {**out.extra_fields, **extra}
            merged, mask, found = await self.ct_merge_assistant_token(
                ids, out.token_ids, mask, logprobs if logprobs or out.log_probs else None, assistant_logprobs=out.log_probs or None
            )
            ids, logprobs = merged.token_ids, found or []
            text = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
            with simple_timer("tool_calls", timed):
                last = await episode.astep(text)
            if last.done or len(mask) >= self._room:
                break
            before = [*messages, {"role": "assistant", "content": text}]
            messages = [*before, {"role": "user", "content": last.feedback}]
            merged, longer, found = await self.ct_merge_context_msg(before, messages, ids, mask, logprobs or None)
            if len(longer) >= self._room:  # no room for another answer
                break
            ids, mask, logprobs = merged.token_ids, longer, found or []
        turns = [s.graded for s in episode.submissions]
        paid = episode_reward(turns, "best", self._max_turns > 1)
        start = len(ids) - len(mask)
        return AgentLoopOutput(
            prompt_ids=ids[:start], response_ids=ids[start:][: self._room],
            response_mask=[0 if paid is None else m for m in mask[: self._room]],
            response_logprobs=logprobs[: self._room] if logprobs else None, num_turns=2 * len(episode.submissions),
            reward_score=0.0 if paid is None else paid, metrics=AgentLoopMetrics(**timed),
            extra_fields={**extra, "turn_scores": [], "tool_rewards": [], "reward_extra_info": numbers(best_of(turns))},
        )  # fmt: skip
