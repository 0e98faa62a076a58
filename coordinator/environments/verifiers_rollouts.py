"""`verifiers:PACKAGE` with several turns: tools, stops, and environments in which one agent converses with the package's own code.

verifiers 0.4 runs an agent as a program that speaks HTTP to a proxy of its own, and each tool server as another. In the jail there are
neither sockets nor processes, so what its plain chat harness (`null`) does is done here in process: ask the model, run the tools that it
calls, until it answers in text; tool servers are called directly. The package's tasks, tools, stops, environment and rewards are its own,
and so is the trace that they see. What needs more (containers, judges, a second model) is refused by its name.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from coordinator.environments.author_code import failed
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, PromptValue, Scores, bounded, check_index, scored
from coordinator.environments.messages import Item, Plain
from coordinator.environments.replay import Client, LimitReached
from coordinator.environments.verifiers_tasks import load_package, module, needs_runtime

TOOL_CHARS = 100_000  # of a tool's result
TRUNCATED = "max_turns"  # the stop condition that verifiers' own limits leave on a trace


class VerifiersRollouts:
    """The tasks of one package, each played by the one agent that the policy is."""

    def __init__(self, package: str, *, options: Mapping[str, Any]) -> None:
        self._package = package
        self._vf, self._taskset, self._tasks = load_package(package, options)
        self._environment = self._load_environment()
        self._check(self._tasks[0])

    def size(self, split: str) -> int | None:
        return len(self._tasks) if split == "train" else 0

    def prompt(self, split: str, index: int) -> PromptValue:
        check_index(split, index, self.size(split))
        return str(self._tasks[index].data.prompt_text)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        raise AssertionError(f"it is played, not scored: {split} {index} {len(completions)}")

    async def play(self, split: str, index: int, client: Client) -> Scores:
        """One episode of the package's environment, and what its rewards say."""
        check_index(split, index, self.size(split))
        task = self._tasks[index]
        agent = _Agent(self._vf, self._taskset, client)
        agents = importlib.import_module("verifiers.v1.agent").Agents(self._environment.config, lambda _name, _spec: agent)
        await self._environment.setup(agents)
        await self._environment.run(task, agents)
        if len(agent.traces) != 1:
            return Scores([failed(f"the environment of {self._package!r} ran its agent {len(agent.traces)} times: once is served")])
        trace = agent.traces[0]
        await self._finalize(task, trace)
        return _scores(trace)

    async def _finalize(self, task: Any, trace: Any) -> None:
        episodes = importlib.import_module("verifiers.v1.episode")
        tracing = importlib.import_module("verifiers.v1.trace")
        subject = tracing.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = episodes.Episode(env=episodes.EnvInfo(id=self._environment.config.env_id), task=subject)
        episode.traces.append(trace)
        await self._environment.finalize(task, episode)

    def _load_environment(self) -> Any:
        loaders = module("verifiers.v1.utils.loaders")
        try:
            kind = loaders.environment_class(self._package)
            config = loaders.env_config_type(self._package)(taskset=self._taskset.config)
            return kind(config)
        except Exception as error:  # the package's own code
            raise EnvironmentBroken(
                f"the environment of verifiers package {self._package!r} could not be made: {bounded(f'{type(error).__name__}: {error}')}"
            ) from error

    def _check(self, task: Any) -> None:
        """Refuse what a conversation in process cannot serve."""
        base, decorators = (
            importlib.import_module("verifiers.v1.task").Task,
            importlib.import_module("verifiers.v1.utils.decorators"),
        )
        agents = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(self._environment.config)
        kind = type(task)
        hooks = [task.setup, task.finalize]
        stops = importlib.import_module("verifiers.v1.session")
        needs = {
            f"{len(agents)} agents ({', '.join(agents)})": len(agents) != 1,
            "a harness of its own": module("verifiers.v1.utils.loaders").default_harness_id(self._package) not in ("bash", "null"),
            "a container": kind.NEEDS_CONTAINER,
            "a judge": bool(task.config.judges),
            "a runtime for its set-up": any(
                getattr(base, hook.__name__) is not getattr(kind, hook.__name__) and needs_runtime(hook) for hook in hooks
            ),
            "a runtime for its rewards": any(needs_runtime(hook) for name in ("reward", "metric") for hook in task.hooks(name)),
            "interception of requests": bool(decorators.discover_decorated(task, "intercept")),
            "stops that look at requests": any(
                stops.hook_boundary(stop, allow_trace=True) is not self._vf.Trace for stop in task.hooks("stop")
            ),
        }
        lacking = [name for name, is_needed in needs.items() if is_needed]
        if lacking:
            raise EnvironmentBroken(
                f"verifiers package {self._package!r} needs {', '.join(lacking)}: one agent is served, with tools, scored from its trace"
            )


class _Agent:
    """What an environment calls its agent: `run(task)`, or `interaction(task)` and its turns. `traces`: of what it ran."""

    def __init__(self, vf: Any, taskset: Any, client: Client) -> None:
        self._vf = vf
        self._taskset = taskset
        self._client = client
        self.traces: list[Any] = []
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        """One segment on the task's own prompt."""
        conversation = await self._open(task)
        await conversation.turn()
        return await conversation.close()

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Conversation]:
        """The caller is the user: each `turn(message)` is one segment."""
        conversation = await self._open(task)
        yield conversation
        conversation.trace.stop("user_closed")  # not reached when the look ends at a request: there is nothing to score yet
        await conversation.close()

    async def _open(self, task: Any) -> _Conversation:
        tools = await _Tools.open(task, self._taskset)
        conversation = _Conversation(self._vf, task, tools, self._client)
        self.traces.append(conversation.trace)
        await _invoke(task.setup, conversation.trace)
        return conversation


class _Conversation:
    """One rollout as its trace and its messages."""

    def __init__(self, vf: Any, task: Any, tools: _Tools, client: Client) -> None:
        self._types, self._graph = (importlib.import_module(f"verifiers.v1.{name}") for name in ("types", "graph"))
        states, tracing = (importlib.import_module(f"verifiers.v1.{name}") for name in ("state", "trace"))
        self._task = task
        self._tools = tools
        self._client = client
        self._messages: list[Any] = []
        self._is_begun = False
        self._is_closed = False
        self.trace = vf.Trace(
            task=tracing.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=states.state_cls(type(task))(),
            agent=tracing.AgentInfo(config=vf.AgentConfig()),
        )
        tools.state = self.trace.state

    async def turn(self, message: Any = None) -> Any:
        """One segment: the model's turns and tools until it answers in text; `terminated` when it may not go on."""
        segment = importlib.import_module("verifiers.v1.agent").Segment
        for one in self._opening() + self._spoken(message):
            self._add(one)
        said = len(self.trace.nodes)
        await self._segment()
        nodes = self.trace.nodes[said:]
        return segment(messages=[node.message for node in nodes], terminated=not any(node.sampled for node in nodes))

    async def close(self) -> Any:
        """The finished trace, scored."""
        if not self._is_closed:
            self._is_closed = True
            self.trace.is_completed = self.trace.ok = True
            await _invoke(self._task.finalize, self.trace)
            await self._task.score(self.trace)
        return self.trace

    def _opening(self) -> list[Any]:
        if self._is_begun:
            return []
        self._is_begun = True
        data, types = self._task.data, self._types
        opening = [types.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        prompt = [types.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
        return [*opening, *prompt]

    def _spoken(self, message: Any) -> list[Any]:
        if message is None:
            return []
        if isinstance(message, str):
            return [self._types.UserMessage(content=message)]
        return [
            importlib.import_module("verifiers.v1.dialects.chat").parse_message(m) if isinstance(m, dict) else m for m in message
        ]

    async def _segment(self) -> None:
        while not await self._is_stopped():
            try:
                reply = await self._client.chat.completions.create(messages=self._messages, tools=self._tools.schemas or None)
            except LimitReached:
                self.trace.stop(TRUNCATED)
                return
            said = reply.choices[0].message
            self._answered(said)
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                result = await self._tools.call(call.function.name, call.function.arguments)
                self._add(self._types.ToolMessage(tool_call_id=call.id, content=result, name=call.function.name))

    async def _is_stopped(self) -> bool:
        """Whether one of the task's `@stop` methods ends the rollout before another turn."""
        if self.trace.stop_condition is not None:
            return True
        for stop in self._task.hooks("stop"):
            result = importlib.import_module("verifiers.v1.utils.decorators").invoke(stop, {type(self.trace): self.trace})
            if await result if inspect.isawaitable(result) else result:
                self.trace.stop(stop.__name__)
                return True
        return False

    def _answered(self, said: Item) -> None:
        calls = [
            self._types.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in said.tool_calls or []
        ]
        message = self._types.AssistantMessage(content=said.content, tool_calls=calls or None)
        self._add(message, plain=said, sampled=True)

    def _add(self, message: Any, *, plain: Any = None, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(self._graph.MessageNode(parent=parent, message=message, sampled=sampled))
        self._messages.append(message.model_dump(exclude_none=True) if plain is None else plain)


class _Tools:
    """The tool servers of a task and its taskset, called directly. `state` is the rollout's."""

    def __init__(self) -> None:
        self.schemas: list[Plain] = []
        self.state: Any = None
        self._servers: dict[str, tuple[Any, str]] = {}  # tool -> its server, and its name there

    @classmethod
    async def open(cls, task: Any, taskset: Any) -> _Tools:
        """Set up as verifiers does: shared servers know no task."""
        tools = cls()
        for server in taskset.toolsets(taskset.config):
            await tools._add(server, None)
        for server in task.toolsets(task.config):
            await tools._add(server, task.data)
        return tools

    async def _add(self, toolset: Any, data: Any) -> None:
        servers = importlib.import_module("mcp.server.mcpserver")

        async def pull() -> Any:
            return self.state

        async def push(_before: bytes) -> None:
            """The state is the rollout's own object."""

        toolset._pull_state, toolset._push_state = pull, push
        await toolset.setup()
        if data is not None:
            await toolset.setup_task(data)
        server = servers.MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            if name in self._servers:
                raise EnvironmentBroken(f"two tools are named {name!r}: give their toolsets prefixes of their own")
            self._servers[name] = (server, tool.name)
            about = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            self.schemas.append({"type": "function", "function": about})

    async def call(self, name: str, arguments: str) -> str:
        """A tool's result as text; what goes wrong is told to the model, as verifiers' own harness does."""
        if name not in self._servers:
            return f"error: unknown tool {name!r}"
        server, inner = self._servers[name]
        try:
            result = await server.call_tool(inner, json.loads(arguments))
        except Exception as error:
            return bounded(f"error: {error}", TOOL_CHARS)
        words = importlib.import_module("verifiers.v1.harnesses.utils.mcp").mcp_content_to_chat_content(result.content)
        return bounded(words if isinstance(words, str) else json.dumps(words), TOOL_CHARS)


async def _invoke(hook: Any, trace: Any) -> None:
    """A task's hook, unless it wants a runtime (then it is the base's, which does nothing)."""
    if not needs_runtime(hook):
        await importlib.import_module("verifiers.v1.utils.decorators").invoke(hook, {"trace": trace})


def _scores(trace: Any) -> Scores:
    """The sum of a finished trace's rewards, by their weights; metrics and rewards as figures."""
    given = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    figures = {**{name: value for name, value in trace.metrics.items() if value is not None}, **given}
    metrics = {bounded(str(name), 100): float(value) for name, value in figures.items()} | {"turns": float(trace.num_turns)}
    if not given:
        return Scores([Outcome("unscored")], metrics)
    total = scored(float(trace.reward))
    return Scores(
        [Outcome(total.kind, total.reward, total.detail or bounded("; ".join(f"{k}={v:g}" for k, v in given.items())))], metrics
    )
