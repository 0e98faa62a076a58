"""`echo2-worker`: join a coordinator, and look after the worker. Nothing heavy is imported before it is needed.

Exit codes: 0 done; 1 an error, told in one line; 2 wrong usage; 3 the engine failed; 4 fenced by a newer session with the same key.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from worker_node import config
from worker_node.errors import ConfigError, WorkerError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generate rollouts for an ECHO-2 coordinator and be paid for it.",
)
identity_app = typer.Typer(no_args_is_help=True, help="The worker's key: its account and its history.")
app.add_typer(identity_app, name="identity")

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Key, weights and status. Default ~/.local/state/echo2-worker.")]
InviteOption = Annotated[str | None, typer.Option("--invite", help="The invite, as the operator sent it (or ECHO2_INVITE).")]
InviteFile = Annotated[Path | None, typer.Option("--invite-file", help="A file that holds the invite.")]
Insecure = Annotated[bool, typer.Option("--insecure-http", help="Allow plain http beyond loopback. Labs only.")]
EngineOption = Annotated[str, typer.Option("--engine", help="torch, vllm, or scripted (tests).")]
VllmPython = Annotated[Path | None, typer.Option("--vllm-python", help="vllm: the python that has it. Default: this one.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel", min=1, max=64, help="vllm: cards that share the model.")]
GpuMemory = Annotated[float, typer.Option("--gpu-memory", help="vllm: share of a card's memory (on a CPU: of the free memory).")]
KvCache = Annotated[float, typer.Option("--kv-cache-gib", help="vllm: KV cache of a card; 0: what is left (on a CPU: 1).")]
MaxModelLen = Annotated[
    int, typer.Option("--max-model-len", min=0, help="vllm: most tokens of prompt and completion; 0: what fits.")
]
Eager = Annotated[bool, typer.Option("--eager", help="vllm: no CUDA graphs; starts sooner, decodes slower.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
NO_VLLM = config.VllmSettings()


def main() -> None:
    """The console script."""
    app()


def _vllm_options(
    vllm_python: VllmPython = None,
    tensor_parallel: TensorParallel = 1,
    gpu_memory: GpuMemory = 0.9,
    kv_cache_gib: KvCache = 0.0,
    max_model_len: MaxModelLen = 0,
    eager: Eager = False,
) -> config.VllmSettings:
    """What a command that runs an engine takes for vLLM alone. Raises ConfigError."""
    return config.vllm_settings(
        vllm_python,
        tensor_parallel=tensor_parallel,
        gpu_memory=gpu_memory,
        kv_cache_gib=kv_cache_gib,
        max_model_len=max_model_len,
        eager=eager,
    )


def _takes_vllm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_vllm_options` in place of its parameter `vllm`; it gets what they say."""
    own = inspect.signature(_vllm_options, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter for given in signature.parameters.values() for parameter in (own.values() if given.name == "vllm" else (given,))
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        with _one_line():
            vllm = _vllm_options(**{name: given.pop(name) for name in own})
        command(**given, vllm=vllm)

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    return wrapped


@contextmanager
def _one_line() -> Iterator[None]:
    """Errors become one clear line and exit code 1."""
    try:
        yield
    except WorkerError as error:
        typer.echo(f"echo2-worker: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
@_takes_vllm_options
def join(
    url: Annotated[str, typer.Argument(help="The coordinator, https://...")],
    invite: InviteOption = None,
    invite_file: InviteFile = None,
    price: Annotated[float, typer.Option(help="USD per hour of active time.")] = 0.0,
    name: Annotated[str | None, typer.Option(help="How the operator sees this worker. Default: the host's name.")] = None,
    engine: EngineOption = "torch",
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Completions generated at once.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    vllm: config.VllmSettings = NO_VLLM,
    state_dir: StateDir = None,
    peer_host: Annotated[str, typer.Option(help="The address literal under which other workers reach this one.")] = "127.0.0.1",
    peer_port: Annotated[int, typer.Option(help="Serve pieces to other workers on this port; 0: do not.")] = 0,
    control_port: Annotated[
        int, typer.Option(help="Take control messages over libp2p on this port; 0: through the coordinator.")
    ] = 0,
    libp2p: Annotated[
        bool, typer.Option("--libp2p/--no-libp2p", help="Control messages over libp2p, where it is installed.")
    ] = True,
    up_mbit: Annotated[float, typer.Option(help="Most that weights may take of the uplink, Mbit/s; 0: no limit.")] = 0.0,
    down_mbit: Annotated[float, typer.Option(help="Most that weights may take of the downlink, Mbit/s; 0: no limit.")] = 0.0,
    up_gb_per_month: Annotated[float, typer.Option(help="Uploads stop after so many GB in a month; 0: no limit.")] = 0.0,
    tokens_per_s: Annotated[float, typer.Option(min=0, help="scripted: tokens per second; 0: unpaced.")] = 0.0,
    throttle: Annotated[float, typer.Option(min=0, help="Most tokens per second, to leave the card to others; 0: no limit.")] = 0.0,
    drain_s: Annotated[float, typer.Option(min=0, help="How long a drain waits for the leases in hand.")] = 120.0,
    give_up_after_min: Annotated[
        float, typer.Option(help="End after so many minutes without the coordinator (rented machines); 0: wait for ever.")
    ] = 0.0,
    insecure_http: Insecure = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    crash_at: Annotated[str | None, typer.Option(hidden=True)] = None,
    fault: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Join a coordinator and work until stopped. SIGTERM or Ctrl-C drains; a second one leaves at once."""
    from worker_node import logs
    from worker_node.adapters.engine_scripted import FAULTS
    from worker_node.app import CRASH_POINTS

    config.limit_threads()
    with _one_line():
        directory = state_dir or config.default_state_dir()
        found = config.find_invite(invite, invite_file)
        settings = config.WorkerSettings(
            url=url,
            coordinator_key=found.coordinator_key if found is not None else config.read_coordinator(directory, url),
            invite_code=found.code if found is not None else None,
            name=_name(name),
            price_uusd_per_hour=config.parse_price(price),
            state_dir=directory,
            engine=config.engine_settings(
                engine,
                slots=slots,
                dtype=dtype,
                device=device,
                tokens_per_s=tokens_per_s,
                faults=config.parse_counts(fault or [], "--fault", FAULTS),
                throttle=throttle,
                vllm=replace(vllm, log=directory.absolute() / "vllm.log"),
            ),
            peer=config.peer_settings(peer_host, peer_port, control_port),
            libp2p=libp2p,
            link=config.link_settings(up_mbit, down_mbit, up_gb_per_month),
            insecure_http=insecure_http,
            drain_s=drain_s,
            give_up_s=config.give_up_s(give_up_after_min),
            crash_at=next(iter(config.parse_counts([crash_at], "--crash-at", CRASH_POINTS).items())) if crash_at else None,
        )
        logs.set_up(verbose=verbose)
        code = _work(settings)
    raise typer.Exit(code)


def _work(settings: config.WorkerSettings) -> int:
    from worker_node.app import run_worker

    stop = asyncio.run(run_worker(settings, announce=_announce, tell=_tell))
    typer.echo(f"echo2-worker: stopped: {stop.reason}", err=True)
    return stop.exit_code


def _tell(line: str) -> None:
    typer.echo(f"echo2-worker: {line}", err=True)


def _announce(path: Path) -> None:
    """Say once where the key is, and that it is worth a backup."""
    here = "" if path.parent == config.default_state_dir() else f" --state-dir {shlex.quote(str(path.parent))}"
    typer.echo(
        f"A new identity lies in {path}. It is this worker's account: back it up with `echo2-worker identity export FILE{here}`.",
        err=True,
    )


def _name(given: str | None) -> str:
    name = given if given is not None else re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"--name {name!r} must start with a letter or digit; letters, digits, '.', '_' and '-', at most 64")
    return name


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="Also check this coordinator.")] = None,
    invite: InviteOption = None,
    invite_file: InviteFile = None,
    engine: EngineOption = "torch",
    vllm_python: VllmPython = None,
    state_dir: StateDir = None,
    insecure_http: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and a coordinator if given. Exits 1 when something would keep the worker from working."""
    from worker_node.adapters import probe

    with _one_line():
        settings = config.engine_settings(engine, vllm=config.vllm_settings(vllm_python))
        findings = list(probe.check_machine(settings, state_dir or config.default_state_dir()))
        if url is not None:
            found = config.find_invite(invite, invite_file)
            findings += _run(probe.check_coordinator(url, found, insecure_http=insecure_http))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            fix = f"\n      fix: {finding.fix}" if finding.fix else ""
            typer.echo(f"{finding.level:<5} {finding.what}: {finding.detail}{fix}")
    raise typer.Exit(1 if probe.worst(findings) == "FAIL" else 0)


@app.command()
def status(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Whether the worker works, why not, what it earned, and what was refused. Exits 1 when no worker runs."""
    from worker_node.adapters.status_file import is_running, read_status

    with _one_line():
        directory = state_dir or config.default_state_dir()
        seen = read_status(directory)
        running = is_running(directory)
        if seen is None:
            raise ConfigError(f"no worker ever ran on --state-dir {directory}: start one with `echo2-worker join`")
    if as_json:
        typer.echo(json.dumps({**asdict(seen), "running": running, "working": seen.working and running}))
    else:
        from worker_node.status_view import lines

        for line in lines(seen, running=running, now=time.time()):
            typer.echo(line)
    raise typer.Exit(0 if running else 1)


@app.command()
def drain(state_dir: StateDir = None, wait: Annotated[bool, typer.Option(help="Wait until it is gone.")] = True) -> None:
    """Let the running worker finish its leases and stop."""
    from worker_node.adapters.status_file import holder, is_running

    with _one_line():
        directory = state_dir or config.default_state_dir()
        process = holder(directory)
        if process is None:
            raise ConfigError(f"no worker runs on --state-dir {directory}")
        os.kill(process, signal.SIGTERM)
    typer.echo(f"the worker (process {process}) drains")
    while wait and is_running(directory):
        time.sleep(0.2)


@app.command()
def price(
    usd_per_hour: Annotated[float, typer.Argument(help="USD per hour of active time, from the next heartbeat on.")],
    state_dir: StateDir = None,
) -> None:
    """Ask the coordinator for another price, without a new start. `status` shows the price in force, and why one is refused."""
    from worker_node.adapters import price_file
    from worker_node.adapters.status_file import is_running

    with _one_line():
        directory = state_dir or config.default_state_dir()
        asked = config.parse_price(usd_per_hour)
        if not is_running(directory):
            raise ConfigError(
                f"no worker runs on --state-dir {directory}: start one with `echo2-worker join --price {usd_per_hour:g}`"
            )
        price_file.ask(directory, asked)
    typer.echo(f"the worker asks {usd_per_hour:g} USD an hour from its next heartbeat on")


@app.command()
@_takes_vllm_options
def bench(
    model: Annotated[Path, typer.Argument(help="A Hugging Face directory.")],
    engine: EngineOption = "torch",
    slots: Annotated[int, typer.Option(min=1, max=4096)] = 32,
    dtype: Annotated[str, typer.Option()] = "float32",
    device: Annotated[str, typer.Option()] = "auto",
    vllm: config.VllmSettings = NO_VLLM,
    seconds: Annotated[float, typer.Option(min=0.1)] = 10.0,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine decodes with a model."""
    config.limit_threads()
    from worker_node.adapters.bench import decode_rate
    from worker_node.adapters.engine import Weights
    from worker_node.adapters.engines import make_engine

    with _one_line():
        if not (model / "config.json").is_file():
            raise ConfigError(f"{model} is no Hugging Face directory: it holds no config.json")
        core = make_engine(config.engine_settings(engine, slots=slots, dtype=dtype, device=device, vllm=vllm))
        try:
            core.load(Weights(model, 0, "0" * 64))
            decode_rate(core, slots=slots, new_tokens=2, limit_s=seconds)  # warm up
            rate = decode_rate(core, slots=slots, new_tokens=new_tokens, limit_s=seconds)
            if rate == 0:  # an engine that runs by itself tells tokens when a completion ends
                raise ConfigError(
                    f"no completion of {new_tokens} tokens ended in {seconds:g} s: raise --seconds or lower --new-tokens"
                )
            info = core.info
        finally:
            core.close()
    result = {"tokens_per_s": round(rate, 1), "slots": slots, "new_tokens": new_tokens, **info.model_dump()}
    typer.echo(
        json.dumps(result) if as_json else f"{rate:.1f} tokens/s with {slots} slots ({info.version}, {info.dtype}, {info.device})"
    )


@identity_app.command("show")
def identity_show(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """The public key, the worker id, and where the key lies."""
    from coordinator.wire.signing import public_hex, worker_id
    from worker_node.adapters import identity

    with _one_line():
        directory = state_dir or config.default_state_dir()
        public = public_hex(identity.load(directory))
    shown = {"worker_id": worker_id(public), "public_key": public, "file": str(identity.identity_path(directory))}
    typer.echo(json.dumps(shown) if as_json else "\n".join(f"{name}: {value}" for name, value in shown.items()))


@identity_app.command("export")
def identity_export(file: Path, state_dir: StateDir = None) -> None:
    """Write the key, encrypted with a passphrase (asked for, or ECHO2_IDENTITY_PASSPHRASE)."""
    from worker_node.adapters import identity

    with _one_line():
        words = config.passphrase() or typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
        identity.export_identity(state_dir or config.default_state_dir(), file, words)
    typer.echo(f"{file} holds the identity, encrypted; keep it and the passphrase apart")


@identity_app.command("import")
def identity_import(
    file: Path,
    state_dir: StateDir = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the key here.")] = False,
) -> None:
    """Bring an exported key here."""
    from coordinator.wire.signing import public_hex, worker_id
    from worker_node.adapters import identity

    with _one_line():
        words = config.passphrase() or typer.prompt("Passphrase", hide_input=True, err=True)
        key = identity.import_identity(state_dir or config.default_state_dir(), file, words, replace=replace)
    typer.echo(f"this is worker {worker_id(public_hex(key))} now")


@app.command("install-service", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install_service(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="The coordinator; options after it are passed to join.")],
    invite: InviteOption = None,
    invite_file: InviteFile = None,
    state_dir: StateDir = None,
    unit_dir: Annotated[Path | None, typer.Option(help="Where to write. Default ~/.config/systemd/user.")] = None,
    gpu: Annotated[bool, typer.Option(help="Let the service reach the GPU's devices.")] = True,
    drain_s: Annotated[float, typer.Option(min=0)] = 120.0,
) -> None:
    """Write a hardened systemd unit that joins at boot. The invite goes into a 0600 file, not into the unit."""
    from worker_node.service_files import write_service

    with _one_line():
        directory = (state_dir or config.default_state_dir()).absolute()
        _check_join_options(context.args)
        command = [str(Path(sys.argv[0]).absolute()), "join", url, "--state-dir", str(directory), "--drain-s", str(drain_s)]
        path = write_service(
            [*command, *context.args],
            state_dir=directory,
            unit_dir=unit_dir or config.default_unit_dir(),
            invite=config.find_invite(invite, invite_file),
            drain_s=drain_s,
            gpu=gpu,
        )
    typer.echo(f"{path} written. Start it with: systemctl --user daemon-reload && systemctl --user enable --now {path.name}")


def _check_join_options(arguments: Sequence[str]) -> None:
    """A misspelt option would only be found at boot. Raises ConfigError."""
    join_command = typer.main.get_command(app).commands["join"]  # type: ignore[attr-defined]  # a group
    known = {name for parameter in join_command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise ConfigError(
                f"{name} is no option of `echo2-worker join`, to which it would be passed; see `echo2-worker join --help`"
            )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)
