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
from pathlib import Path
from typing import Any

from coordinator.environments.base import Completion, Environment, EnvironmentBroken, EnvironmentSpec, Scores, bounded, spec_from
from coordinator.environments.jail import JailLimits, JailPlan, JailReport, allow_cpu, apply
from coordinator.environments.link import ChildLink, LinkBroken

KEPT_VARIABLES = ("LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "ARROW_DEFAULT_MEMORY_POOL")
Request = dict[str, Any]


class Desk:
    """Answers requests with the environment and the renderer it was started with."""

    def __init__(self, environment: Environment, spec: EnvironmentSpec) -> None:
        from coordinator.environments.rendering import Renderer

        self._environment = environment
        self._renderer = Renderer(
            Path(spec.tokenizer_dir), system_prompt=spec.system_prompt, use_chat_template=spec.use_chat_template
        )
        for split in ("train", "eval"):
            if environment.size(split) != 0:
                self._renderer.render(environment.prompt(split, 0))

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
                case "decode":
                    return {"texts": [self._renderer.decode(ids) for ids in request["completions"]]}
                case other:
                    return {"error": f"unknown request {other!r}"}
        except (EnvironmentBroken, LookupError, OverflowError, MemoryError) as error:
            return {"error": bounded(f"{type(error).__name__}: {error}")}

    def _prompt(self, split: str, index: int) -> list[object]:
        ids, text = self._renderer.render(self._environment.prompt(split, index))
        return [index, ids, text]

    def _grade(self, request: Request) -> dict[str, object]:
        done = [Completion(ids, self._renderer.decode(ids)) for ids in request["completions"]]
        scores: Scores = self._environment.score(request["split"], request["index"], done)
        graded = [[one.kind, one.reward, text.text, one.detail] for one, text in zip(scores.outcomes, done, strict=True)]
        return {"graded": graded, "metrics": dict(scores.metrics), "spent": scores.is_spent}


def main() -> None:
    """Serve until the parent closes the link."""
    parser = argparse.ArgumentParser(description="jailed environment process; started by the coordinator only")
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.link)
    connection.set_inheritable(False)
    link = ChildLink(connection)
    request = link.receive()
    if request is None:
        return
    desk = _start(link, request, arguments.parent, arguments.link)
    if desk is not None:
        _end_with(connection)
        _serve(link, desk)


def _start(link: ChildLink, request: Request, parent: int, link_fd: int) -> Desk | None:
    """Jail, build, report. None when the environment is broken (and the words were sent)."""
    spec = spec_from(request["spec"])
    _close_others(link_fd)
    os.environ.clear()
    os.environ.update({name: request["variables"][name] for name in KEPT_VARIABLES if name in request["variables"]})
    report = apply(_plan(request, spec, parent))
    try:
        if spec.runs_author_code and not report.confines_author_code:
            raise EnvironmentBroken(_refusal(report))
        allow_cpu(request["cpu_s"])
        desk = Desk(build_environment_in_jail(spec), spec)
        link.send({"id": request["id"], "info": desk.info(), "jail": report.to_json()})
    except (EnvironmentBroken, LookupError, MemoryError) as error:
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
        "the environment runs Python that came with the job, and this host can neither cut its network off nor filter its system "
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


def _close_others(link_fd: int) -> None:
    """Keep standard streams and the link alone."""
    os.closerange(3, link_fd)
    os.closerange(link_fd + 1, os.sysconf("SC_OPEN_MAX"))


def _end_with(connection: socket.socket) -> None:
    """End the process as soon as the parent's end closes, whatever author code is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLHUP | select.POLLERR)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="link-watch", daemon=True).start()


if __name__ == "__main__":
    main()
