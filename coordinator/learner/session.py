"""The learner's side of the link: one request in, one answer out. Refusals change nothing and say why."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import torch

from coordinator.domain.seeds import derive
from coordinator.learner import batch_file, checkpoint, export, generate, model, sinks, step
from coordinator.learner.errors import LearnerError, RequestRefused
from coordinator.learner.team import Team
from coordinator.wire.learner_link import (
    Answer,
    Checkpoint,
    Checkpointed,
    Evaluate,
    Evaluated,
    Failed,
    Log,
    Logged,
    Ready,
    Request,
    Snapshot,
    Snapshotted,
    Start,
    Stop,
    Train,
    Trained,
)

Work = Train | Snapshot | Checkpoint | Evaluate | Log


class Session:
    """Holds the learner between requests. The fence is that of Start; any other is refused (law 11)."""

    def __init__(
        self,
        *,
        join: Callable[[int], Team] = lambda _: Team(),
        reached: Callable[[str], None] = lambda _: None,
        least_step_s: float = 0.0,
    ) -> None:
        """`join` meets the other ranks, given how many there are with this one.

        A training step takes at least `least_step_s`: a small model stands in for one that takes so long.
        """
        self._least_step_s = least_step_s
        self._join = join
        self._reached = reached
        self._start: Start | None = None
        self._learner: step.Learner | None = None
        self._sinks = sinks.Sinks({}, logged=0)

    @property
    def fence(self) -> int:
        """The fence this learner was started with; 0 before the start."""
        return 0 if self._start is None else self._start.fence

    def answer(self, request: Request) -> Answer | None:
        """Carry out a request. None: it was Stop. Never raises: what fails is a Failed, in words."""
        try:
            return self._answer(request)
        except LearnerError as error:
            fatal = error.fatal and self._learner is None
            return Failed(fence=request.fence, code=error.code, message=str(error), fatal=fatal)
        except OSError as error:  # the weights are as they were; the coordinator may make room and ask again
            message = f"{request.kind} failed: {error}; make room or repair the path, then ask again"
            return Failed(fence=request.fence, code="disk", message=message, fatal=self._learner is None)
        except Exception as error:
            traceback.print_exc()
            return Failed(fence=request.fence, code="internal", message=f"{type(error).__name__}: {error}", fatal=True)

    def _answer(self, request: Request) -> Answer | None:
        if self._start is not None and request.fence != self._start.fence:
            raise RequestRefused("wrong_fence", f"fence is {request.fence}, this learner was started with {self._start.fence}")
        match request:
            case Start():
                return self._begin(request)
            case Stop():
                self._sinks.close()
                return None
            case Train() | Snapshot() | Checkpoint() | Evaluate() | Log():
                if self._learner is None or self._start is None:
                    raise RequestRefused("not_started", f"{request.kind} came before start: send start first")
                return self._work(request, self._start, self._learner)
            case _:
                assert_never(request)

    def _work(self, request: Work, start: Start, learner: step.Learner) -> Answer:
        match request:
            case Train():
                return self._train(request, start, learner)
            case Snapshot():
                return self._snapshot(request, start, learner)
            case Checkpoint():
                return self._checkpoint(request, start, learner)
            case Evaluate():
                return self._evaluate(request, learner)
            case Log():
                self._sinks.write(request.step, request.at, request.metrics)
                return Logged(fence=request.fence, step=request.step)
            case _:
                assert_never(request)

    def _begin(self, request: Start) -> Answer:
        if self._start is not None:
            raise RequestRefused("already_started", f"this learner already serves job {self._start.job_id}: start another process")
        team = self._join(request.config.learner.ranks)
        policy = team.agreed(lambda: _policy(request, team))
        torch.manual_seed(derive(request.config.seed, "learner"))
        learner = step.start(policy, request.config, team=team)
        if (directory := request.checkpoint_dir) is not None:
            team.agreed(lambda: checkpoint.restore(learner, Path(directory), job_id=request.job_id))
        if team.is_lead:
            folder = Path(request.metrics_dir) if request.metrics_dir else None
            self._sinks = sinks.open_sinks(folder, request.job_id, request.config)
        self._start, self._learner = request, learner
        self._reached("learner.ready")
        return Ready(
            fence=request.fence,
            step=learner.step,
            parameters=learner.policy.parameters(),
            vocab_size=policy.vocab_size,
            stop_token_ids=policy.stop_token_ids,
            logged=self._sinks.logged,
        )

    def _train(self, request: Train, start: Start, learner: step.Learner) -> Answer:
        if request.step != learner.step:
            raise RequestRefused("wrong_step", f"step is {request.step}, the learner's next is {learner.step}: send that batch")
        begun = time.perf_counter()
        batch = learner.team.agreed(
            lambda: batch_file.read(
                Path(request.batch_path),
                digest=request.batch_digest,
                job_id=start.job_id,
                step=request.step,
                vocab_size=learner.policy.vocab_size,
            )
        )
        figures = step.take_step(learner, batch)
        time.sleep(max(self._least_step_s - (time.perf_counter() - begun), 0.0))
        seconds = time.perf_counter() - begun
        tokens = len(batch.prompt_ids) + len(batch.token_ids)
        figures |= {"time/step": seconds, "step_time": seconds, "perf/throughput": tokens / seconds}
        self._reached("learner.trained")
        return Trained(fence=request.fence, step=request.step, seconds=seconds, metrics=figures)

    def _snapshot(self, request: Snapshot, start: Start, learner: step.Learner) -> Answer:
        begun = time.perf_counter()
        logprobs = export.canary(learner.policy, request.canary_ids, device=learner.device)
        if learner.team.is_lead:
            export.write(learner.policy, Path(request.directory), base=start.config.model, reached=self._reached)
        else:
            export.follow(learner.policy)
        self._reached("learner.snapshot.done")
        return Snapshotted(
            fence=request.fence,
            version=learner.step,
            directory=request.directory,
            canary_logprobs=logprobs,
            seconds=time.perf_counter() - begun,
        )

    def _checkpoint(self, request: Checkpoint, start: Start, learner: step.Learner) -> Answer:
        if request.ledger_step != learner.step:
            raise RequestRefused("wrong_step", f"ledger_step is {request.ledger_step}, the learner has taken {learner.step} steps")
        directory = Path(request.directory)
        if learner.team.is_lead:
            checkpoint.write(learner, directory, job_id=start.job_id, ledger_step=request.ledger_step, reached=self._reached)
        else:
            checkpoint.follow(learner)
        self._reached("learner.checkpoint.done")
        return Checkpointed(fence=request.fence, step=learner.step, directory=request.directory)

    def _evaluate(self, request: Evaluate, learner: step.Learner) -> Answer:
        vocab = learner.policy.vocab_size
        if not all(prompt and all(0 <= token < vocab for token in prompt) for prompt in request.prompts):
            raise RequestRefused("bad_prompts", f"prompts must hold at least one id each, all in 0..{vocab - 1}")
        if len(request.max_new_tokens) != len(request.prompts):
            raise RequestRefused(
                "bad_limits",
                f"max_new_tokens has {len(request.max_new_tokens)} entries for {len(request.prompts)} prompts: give one each",
            )
        completions = generate.greedy(
            learner.policy,
            request.prompts,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            token_budget=learner.config.algorithm.micro_batch_tokens,
            team=learner.team,
        )
        return Evaluated(fence=request.fence, version=learner.step, completions=completions)


def _policy(start: Start, team: Team) -> model.Policy:
    """Version 0. Adapters take the precision of the weights that they are put on, so these are fp32 from the start."""
    directory = Path(start.model_dir)
    if team.size == 1:
        return model.load(directory, device=team.device)
    return model.load_mapped(directory) if start.config.lora is None else model.load(directory)
