"""The jailed process: `python -m coordinator.environments.child --link FD --parent PID`.

Reads one `start` request, jails itself, builds the environment, then answers `prompts`, `grade` and `decode` one at a time until
the link closes. Each answer repeats the request's id, a random word that author code cannot know in advance.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.environments.base import Completion, Environment, EnvironmentBroken, EnvironmentSpec, Scores, bounded, spec_from
from coordinator.environments.jail import JailLimits, JailPlan, JailReport, allow_cpu, apply
from coordinator.environments.link import ChildLink, LinkBroken
from coordinator.service.ports import PlayedTurn
from coordinator.wire.turns import turns_refused

if TYPE_CHECKING:  # what an environment needs loads only in the jail
    from coordinator.environments.episodes import Episodic
    from coordinator.environments.replay import Asked

KEPT_VARIABLES = ("LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "ARROW_DEFAULT_MEMORY_POOL")
Request = dict[str, Any]


class Desk:
    """Answers requests with the environment and the renderer it was started with."""

    def __init__(self, environment: Environment, spec: EnvironmentSpec) -> None:
        from coordinator.environments.rendering import Renderer

        self._environment = environment
        self._spec = spec
        self._renderer = Renderer(
            Path(spec.tokenizer_dir),
            system_prompt=spec.system_prompt,
            use_chat_template=spec.use_chat_template,
            dated=spec.dated,
        )
        _check_turns(environment, spec)
        for split in ("train", "eval"):
            if environment.size(split) != 0:
                self._prompt(split, 0)

    def info(self) -> dict[str, object]:
        return {
            "train_prompts": self._environment.size("train"),
            "eval_prompts": self._environment.size("eval"),
            "vocab_size": self._renderer.vocab_size,
            "stop_token_ids": list(self._renderer.stop_token_ids),
        }

    def answer(self, request: Request) -> dict[str, object]:
        """The answer to a request other than `start`; what is wrong with the request is an `error` in words."""
        try:
            match request["do"]:
                case "prompts":
                    return {"prompts": [self._prompt(request["split"], index) for index in request["indices"]]}
                case "grade":
                    return self._grade(request)
                case "play":
                    return self._play(request)
                case "decode":
                    return {"texts": [self._renderer.decode(ids) for ids in request["completions"]]}
                case other:
                    return {"error": f"unknown request {other!r}"}
        except (EnvironmentBroken, LookupError, OverflowError, MemoryError) as error:
            return {"error": bounded(f"{type(error).__name__}: {error}")}

    def _prompt(self, split: str, index: int) -> list[object]:
        from coordinator.environments.episodes import is_episodic, leaf

        part, inner = leaf(self._environment, split, index)
        if not is_episodic(part):
            ids, text = self._renderer.render(part.prompt(split, inner))
            return [index, ids, text]
        opening = self._look(part, split, inner, [], None)
        if isinstance(opening, Scores):
            words = opening.outcomes[0].detail or "the function returned without asking the model"
            raise EnvironmentBroken(f"rollout {index} of split {split!r} has no first request: {words}")
        return [index, list(opening.token_ids), opening.text]

    def _play(self, request: Request) -> dict[str, object]:
        """What the environment makes of one record: its answer's tokens, or the outcome."""
        from coordinator.environments.episodes import is_episodic, leaf

        split, turns = request["split"], [PlayedTurn(tuple(ids), stop, tuple(placed)) for ids, stop, placed in request["turns"]]
        part, inner = leaf(self._environment, split, request["index"])
        if not is_episodic(part):
            return self._grade({**request, "completions": [turns[0].token_ids]})
        said = self._look(part, split, inner, turns, request["prompt_ids"])
        if not isinstance(said, Scores):
            return {"placed": list(said.token_ids)}
        text = self._renderer.decode([token for turn in turns for token in (*turn.token_ids, *turn.placed)], specials=True)
        graded = [[one.kind, one.reward, text, one.detail] for one in said.outcomes]
        return {"graded": graded, "metrics": dict(said.metrics), "spent": said.is_spent}

    def _look(
        self, part: Episodic, split: str, index: int, turns: list[PlayedTurn], prompt_ids: list[int] | None
    ) -> Asked | Scores:
        from coordinator.environments.episodes import look
        from coordinator.environments.replay import PlayLimits, Replay

        spec = self._spec
        limits = PlayLimits(spec.max_turns, spec.new_tokens)
        replay = Replay(self._renderer, turns, limits, tool_parser=spec.tool_parser, prompt_ids=prompt_ids)
        return look(part, split, index, replay, seed=spec.seed, limit_s=spec.grade_timeout_s)

    def _grade(self, request: Request) -> dict[str, object]:
        from coordinator.environments.code_tasks import Code, program_of
        from coordinator.environments.episodes import leaf

        done = [Completion(ids, self._renderer.decode(ids)) for ids in request["completions"]]
        part, inner = leaf(self._environment, request["split"], request["index"])
        if isinstance(part, Code):  # the parent runs them, each in a process of its own
            programs = [program_of(one.text) for one in done]
            return {"programs": programs, "tests": part.tests(request["split"], inner), "texts": [one.text for one in done]}
        scores: Scores = self._environment.score(request["split"], request["index"], done)
        graded = [[one.kind, one.reward, text.text, one.detail] for one, text in zip(scores.outcomes, done, strict=True)]
        return {"graded": graded, "metrics": dict(scores.metrics), "spent": scores.is_spent}


def _check_turns(environment: Environment, spec: EnvironmentSpec) -> None:
    """Raise EnvironmentBroken unless the job allows turns exactly when the environment takes them."""
    from coordinator.environments.episodes import has_episodes

    if (words := turns_refused(spec.type, plays=has_episodes(environment), max_turns=spec.max_turns)) is not None:
        raise EnvironmentBroken(words)


def main() -> None:
    """Serve until the parent closes the link."""
    line = connected("jailed environment process; started by the coordinator only")
    if line is None:
        return
    desk = _start(line)
    if desk is not None:
        end_with(line.connection)
        _serve(line.link, desk)


@dataclass(frozen=True, slots=True)
class Line:
    """What a child begins with: the socket to its parent, the first request that came, and the parent's process id."""

    connection: socket.socket
    link: ChildLink
    request: Request
    parent: int


def connected(description: str) -> Line | None:
    """The line that the command names. Nothing else is left open, and no variable but those that the request gives. None: it is closed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.link)
    connection.set_inheritable(False)
    link = ChildLink(connection)
    request = link.receive()
    if request is None:
        return None
    _close_others(arguments.link)
    _keep_variables(request["variables"])
    return Line(connection, link, request, arguments.parent)


def _start(line: Line) -> Desk | None:
    """Jail, build, report. None when the environment is broken (and the words were sent)."""
    link, request = line.link, line.request
    spec = spec_from(request["spec"])
    report = apply(_plan(request, spec, line.parent))
    try:
        if (spec.runs_author_code or spec.runs_programs) and not report.confines_author_code:
            raise EnvironmentBroken(_refusal(report))
        allow_cpu(request["cpu_s"])
        desk = Desk(build_environment_in_jail(spec), spec)
        link.send({"id": request["id"], "info": desk.info(), "jail": report.to_json()})
    except (EnvironmentBroken, LookupError, MemoryError, RecursionError) as error:
        link.send({"id": request["id"], "broken": bounded(f"{error}" or type(error).__name__, 1500), "jail": report.to_json()})
        return None
    return desk


def build_environment_in_jail(spec: EnvironmentSpec) -> Environment:
    """The environment; its libraries (Arrow, asyncio) load only now, when the process is jailed."""
    from coordinator.environments.build import build_environment

    return build_environment(spec)


def _plan(request: Request, spec: EnvironmentSpec, parent: int) -> JailPlan:
    return JailPlan(
        limits=JailLimits(**request["limits"]),
        scratch=Path(request["scratch"]),
        readable=tuple(Path(path) for path in spec.readable()),
        parent_pid=parent,
    )


def _refusal(report: JailReport) -> str:
    return (
        "the environment runs Python that came with the job, or that the model wrote, and this host can neither cut its network off nor filter its system "
        f"calls ({'; '.join(report.missing)}): allow unprivileged user namespaces or seccomp on the host, or use a built-in environment"
    )


def _serve(link: ChildLink, desk: Desk) -> None:
    while (request := link.receive()) is not None:
        allow_cpu(request["cpu_s"])
        answer = {"id": request["id"], **desk.answer(request)}
        try:
            link.send(answer)
        except LinkBroken as error:
            link.send({"id": request["id"], "error": str(error)})


def _keep_variables(given: dict[str, str]) -> None:
    """Of the environment, keep what libraries need and nothing else."""
    os.environ.clear()
    os.environ.update({name: given[name] for name in KEPT_VARIABLES if name in given})


def _close_others(link_fd: int) -> None:
    """Keep standard streams and the link alone."""
    os.closerange(3, link_fd)
    os.closerange(link_fd + 1, os.sysconf("SC_OPEN_MAX"))


def end_with(connection: socket.socket) -> None:
    """End the process as soon as the parent's end closes, whatever author code is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLHUP | select.POLLERR)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="link-watch", daemon=True).start()


if __name__ == "__main__":
    main()
