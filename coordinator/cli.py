"""`echo2`: the operator's and the job author's command. Each command has --json where a script would want it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.commands import jobs, pool, serving
from coordinator.commands import ledger as ledger_words
from coordinator.commands import market as market_words
from coordinator.commands.connection import find
from coordinator.commands.output import console, errors, show_json
from coordinator.config import Settings, read_settings
from coordinator.errors import CoordinatorError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with remote workers.",
)
job_app = typer.Typer(no_args_is_help=True, help="Submit and steer jobs.")
worker_app = typer.Typer(no_args_is_help=True, help="The pool of workers.")
invite_app = typer.Typer(no_args_is_help=True, help="Invites let workers join.")
token_app = typer.Typer(no_args_is_help=True, help="REST credentials.")
app.add_typer(job_app, name="job")
app.add_typer(worker_app, name="worker")
app.add_typer(invite_app, name="invite")
app.add_typer(token_app, name="token")
ledger_app = typer.Typer(invoke_without_command=True)
app.add_typer(ledger_app, name="ledger")
weights_app = typer.Typer(no_args_is_help=True, help="A version of a model as a small change to another.")
app.add_typer(weights_app, name="weights")

Url = Annotated[str | None, typer.Option(help="Coordinator; default: the one serving from --data-dir.", envvar="ECHO2_URL")]
Token = Annotated[str | None, typer.Option(help="REST token; default: the admin token in --data-dir.", envvar="ECHO2_TOKEN")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of a coordinator on this host.", envvar="ECHO2_DATA_DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of words.")]


def main() -> None:
    """Entry point: one clear line and exit code 1 for what the user can mend, 2 for wrong usage (typer's own)."""
    try:
        app()
    except CoordinatorError as error:
        errors.print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(1)


@app.command()
def serve(
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.")] = None,
    tls: Annotated[str | None, typer.Option(help="off | self-signed | files")] = None,
    tls_certificate: Annotated[Path | None, typer.Option()] = None,
    tls_key: Annotated[Path | None, typer.Option()] = None,
    behind_proxy: Annotated[bool | None, typer.Option(help="Plain HTTP on a public address: a proxy ends TLS.")] = None,
    root: Annotated[list[Path] | None, typer.Option(help="Folder that names in jobs may resolve into; repeatable.")] = None,
) -> None:
    """Run the coordinator: it migrates its store, starts learners, and serves REST and workers."""
    given = {
        "data_dir": data_dir,
        "host": host,
        "port": port,
        "tls": tls,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "behind_proxy": behind_proxy,
        "roots": tuple(root) if root else None,
    }
    serving.serve(_settings(given))


def _settings(given: dict[str, Any]) -> Settings:
    return read_settings(**{name: value for name, value in given.items() if value is not None})


@app.command()
def migrate(data_dir: DataDir = None) -> None:
    """Bring the store's tables up to date; `serve` does it too."""
    serving.migrate(_settings({"data_dir": data_dir}))


@app.command()
def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Check this host: Python, packages, learner and its device, jail, disk, store, port. Exit code 1 when one fails."""
    serving.doctor(_settings({"data_dir": data_dir}), as_json=as_json)


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="TOML file; docs/examples/scenarios holds some.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, summary.txt and plots.")] = None,
    as_json: AsJson = False,
) -> None:
    """What if: run a job and a fleet of a scenario file on a virtual clock. No coordinator is asked."""
    from coordinator.commands import simulate as command

    command.run(scenario, seed=seed, out=out, as_json=as_json)


@app.command()
def audit(job: str, url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Prove from the rows that every issued prompt is trained, rejected with a reason, or pending. Exit code 1 if not."""
    result = find(url, token, data_dir).run(lambda client: client.get(f"/jobs/{job}/audit"))
    jobs.show_audit(result, as_json=as_json)


@ledger_app.callback()
def ledger(
    context: typer.Context,
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    account: Annotated[str | None, typer.Option(help="Only entries that moved this account, such as spent/JOB.")] = None,
    balances: Annotated[bool, typer.Option("--balances", help="Accounts as they stand, instead of entries.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Money: every entry of the double-entry ledger, newest first, or what each account holds."""
    if context.invoked_subcommand is not None:
        return
    query = ledger_words.filters(job=job, worker=worker, account=account, limit=limit)
    read, show = (
        (ledger_words.balances, ledger_words.show_balances) if balances else (ledger_words.entries, ledger_words.show_entries)
    )
    _shown(find(url, token, data_dir).run(lambda client: read(client, query)), show, as_json)


@ledger_app.command("pay")
def pay(
    worker: Annotated[str, typer.Argument(help="Id of the worker.")],
    usd: Annotated[str, typer.Argument(help="What it was paid, USD.")],
    note: Annotated[str, typer.Option(help="Such as the number of the transfer; the worker reads it.")] = "",
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Put on record that you paid a worker, outside of ECHO-2; at most what it earned."""
    reply = find(url, token, data_dir).run(lambda client: ledger_words.pay(client, worker, usd, note))
    _shown(reply, ledger_words.show_payout, as_json)


@app.command()
def market(
    history: Annotated[bool, typer.Option("--history", help="Prices and quotes over time instead.")] = False,
    gains: Annotated[bool, typer.Option("--gains", help="Also what one more worker, S or Mbit/s would buy (simulated).")] = False,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Who works for which job at what price, and why; required and offered rate; the learner's idle time, predicted and measured."""
    path = "/market/history" if history else "/market"
    query = {} if history else {"gains": str(gains).lower()}
    reply = find(url, token, data_dir).run(lambda c: c.get(path, query))
    _shown(reply, market_words.show_history if history else market_words.show_market, as_json)


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    recipe: Annotated[
        str, typer.Option(help='Which toy is made and trained: "digit_sort" or "countdown" (longer).')
    ] = "digit_sort",
    steps: Annotated[int | None, typer.Option(min=1, max=100000, help="Learner steps; default: the recipe's, 150 or 200.")] = None,
    staleness: Annotated[int, typer.Option(min=0, max=64, help="S, the staleness bound.")] = 3,
    kill_a_worker: Annotated[bool, typer.Option(help="Kill one worker with SIGKILL at a third of the steps.")] = False,
    churn: Annotated[bool, typer.Option(help="Workers are killed and come back all the time, one after 30 versions.")] = False,
    market: Annotated[
        bool,
        typer.Option(
            help="Six throttled workers with prices and a paced learner: the cheapest that suffice work; one is killed, one raises its price."
        ),
    ] = False,
    link_mbit: Annotated[
        float, typer.Option(min=0, help="Each worker's link for weights, Mbit/s both ways; 0: not limited.")
    ] = 0.0,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; default: a toy made on the spot.")] = None,
    environment: Annotated[
        str | None, typer.Option(help='"digit_sort", "countdown", "math" or "python:FILE:FUNCTION"; default: the recipe\'s.')
    ] = None,
    train: Annotated[Path | None, typer.Option(help="Prompts for environments that need them (JSONL or Parquet).")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("echo2-demo"),
    as_json: AsJson = False,
) -> None:
    """Train a real policy on this machine: a coordinator, its learner and workers as processes, and a report at the end."""
    from coordinator.demo.job import DemoOptions, recipe_of
    from coordinator.demo.run import run_demo

    options = DemoOptions(
        workers=workers,
        steps=steps or recipe_of(recipe).steps,
        staleness=staleness,
        kill_a_worker=kill_a_worker,
        churn=churn,
        market=market,
        link_mbit=link_mbit,
        model=model,
        recipe=recipe,
        environment=environment or recipe,
        train=train,
        seed=seed,
        out=out,
        as_json=as_json,
    )
    run_demo(options)


@app.command("plan")
def plan_job(
    job: Annotated[Path, typer.Option(help="Job file (TOML).")],
    market: Annotated[Path, typer.Option(help="Offers: a JSON list, or [[offer]] tables in a .toml file.")],
    required_rate: Annotated[
        float | None, typer.Option(help="Completions per second; given, the capacity model is skipped.")
    ] = None,
    headroom: Annotated[float | None, typer.Option(help="Times the required rate; default: workers.headroom, 1.15.")] = None,
    train_s: Annotated[float | None, typer.Option(help="Seconds of one learner step (T_train), if you know it.")] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="name=value of another figure that is taken for true; repeatable.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value of the job; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """What fleet a job needs and costs, before it runs. Exit code 3 when no fleet does, 2 for bad input."""
    from coordinator.commands import plan

    plan.run(
        job,
        market,
        overrides or [],
        required_rate=required_rate,
        headroom=headroom,
        assumed=[*(assume or []), *([f"train_s={train_s}"] if train_s is not None else [])],
        as_json=as_json,
    )


@job_app.command("submit")
def job_submit(
    file: Path,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")] = None,
    upload: Annotated[bool, typer.Option(help="Upload the files named in the job that exist here.")] = True,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job file."""
    jobs.submit(find(url, token, data_dir), file, overrides or [], upload=upload, as_json=as_json)


@job_app.command("list")
def job_list(url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """All jobs, newest first."""
    _shown(find(url, token, data_dir).run(lambda c: c.get("/jobs")), jobs.show_list, as_json)


@job_app.command("show")
def job_show(job: str, url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """One job: state, reward, staleness, learner, work, cost."""
    _shown(find(url, token, data_dir).run(lambda c: c.get(f"/jobs/{job}")), jobs.show_job, as_json)


@job_app.command("set")
def job_set(
    job: str, changes: list[str], url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Change a running job: staleness_max=4, publish_every=2, budget.steps=400, budget.usd=20."""
    jobs.change(find(url, token, data_dir), job, changes, as_json=as_json)


def _steer(verb: str) -> Callable[..., None]:
    def command(
        job: str,
        reason: Annotated[str, typer.Option(help="Kept with the state.")] = "",
        url: Url = None,
        token: Token = None,
        data_dir: DataDir = None,
        as_json: AsJson = False,
    ) -> None:
        result = find(url, token, data_dir).run(lambda c: c.post(f"/jobs/{job}/{verb}", {"reason": reason}))
        _shown(result, jobs.show_state, as_json)

    command.__doc__ = f"{verb.capitalize()} a job."
    return command


for _verb in ("pause", "resume", "cancel"):
    job_app.command(_verb)(_steer(_verb))


@job_app.command("events")
def job_events(
    job: str,
    after: Annotated[int, typer.Option(help="Only events after this number.")] = 0,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job's events until it ends."""
    jobs.follow(find(url, token, data_dir), job, after, as_json=as_json)


@job_app.command("rollouts")
def job_rollouts(
    job: str,
    step: Annotated[int | None, typer.Option(help="Trained in this step; default: the newest.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 10,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Prompts, completions and rewards."""
    query = {"limit": limit} | ({} if step is None else {"step": step}) if as_json else jobs.rollouts_query(step, limit)
    reply = find(url, token, data_dir).run(lambda c: c.get(f"/jobs/{job}/rollouts", query))
    _shown(reply, lambda shown: jobs.show_rollouts(shown, limit), as_json)


@job_app.command("metrics")
def job_metrics(
    job: str,
    name: Annotated[str | None, typer.Argument(help="A metric; without it the names are listed.")] = None,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Time series."""
    query = {"name": name} if name else {}
    _shown(find(url, token, data_dir).run(lambda c: c.get(f"/jobs/{job}/metrics", query)), jobs.show_metrics, as_json)


@job_app.command("checkpoints")
def job_checkpoints(job: str, url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Versions that can be downloaded."""
    _shown(find(url, token, data_dir).run(lambda c: c.get(f"/jobs/{job}/checkpoints")), jobs.show_checkpoints, as_json)


@job_app.command("download")
def job_download(
    job: str,
    version: int,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write the Hugging Face files into.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapters alone, as peft loads them.")] = False,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
) -> None:
    """Download a version as a Hugging Face directory."""
    jobs.download(find(url, token, data_dir), job, version, out, part="adapter" if adapter else "files")


@worker_app.command("list")
def worker_list(url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The pool."""
    _shown(find(url, token, data_dir).run(lambda c: c.get("/workers")), pool.show_workers, as_json)


@worker_app.command("show")
def worker_show(worker: str, url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """One worker."""
    _shown(find(url, token, data_dir).run(lambda c: c.get(f"/workers/{worker}")), pool.show_worker, as_json)


def _order(verb: str) -> Callable[..., None]:
    def command(
        worker: str,
        reason: Annotated[str, typer.Option(help="Shown to the owner.")] = "",
        url: Url = None,
        token: Token = None,
        data_dir: DataDir = None,
        as_json: AsJson = False,
    ) -> None:
        result = find(url, token, data_dir).run(lambda c: c.post(f"/workers/{worker}/{verb}", {"reason": reason}))
        _shown(result, pool.show_state, as_json)

    command.__doc__ = f"{verb.capitalize()} a worker."
    return command


for _verb in ("drain", "quarantine", "release"):
    worker_app.command(_verb)(_order(_verb))


@invite_app.command("create")
def invite_create(
    uses: Annotated[int, typer.Option(min=1, max=10000, help="Workers that may join with it.")] = 1,
    owner: Annotated[str, typer.Option(help="Who owns the machines.")] = "operator",
    hours: Annotated[float, typer.Option(min=0.1, max=8760, help="Hours until it expires.")] = 168.0,
    price_ceiling: Annotated[float | None, typer.Option(help="Highest USD per hour a worker may ask.")] = None,
    job: Annotated[list[str] | None, typer.Option(help="Only these jobs; repeatable.")] = None,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make an invite; its code is shown once."""
    body = pool.invite_body(uses=uses, owner=owner, hours=hours, price_ceiling=price_ceiling, jobs=job or [])
    connection = find(url, token, data_dir)
    reply = connection.run(lambda client: pool.create_invite(client, body))
    _shown(reply, lambda invite: pool.show_invite_code(invite, connection.url), as_json)


@invite_app.command("list")
def invite_list(url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """All invites."""
    _shown(find(url, token, data_dir).run(lambda c: c.get("/invites")), pool.show_invites, as_json)


@invite_app.command("revoke")
def invite_revoke(invite: str, url: Url = None, token: Token = None, data_dir: DataDir = None) -> None:
    """Revoke an invite; workers that joined stay."""
    find(url, token, data_dir).run(lambda c: c.delete(f"/invites/{invite}"))
    console.print(f"invite {invite} is revoked")


@token_app.command("create")
def token_create(
    name: str,
    role: Annotated[str, typer.Option(help="admin | author | viewer")] = "author",
    code: Annotated[bool, typer.Option(help="May bring Python reward code.")] = False,
    spend_limit: Annotated[float | None, typer.Option(help="USD over all of its jobs.")] = None,
    url: Url = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a REST token; it is shown once."""
    body = pool.token_body(name=name, role=role, code=code, spend_limit=spend_limit)
    _shown(find(url, token, data_dir).run(lambda c: c.post("/tokens", body)), pool.show_token, as_json)


@token_app.command("list")
def token_list(url: Url = None, token: Token = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """All tokens, without their secrets."""
    _shown(find(url, token, data_dir).run(lambda c: c.get("/tokens")), pool.show_tokens, as_json)


@token_app.command("revoke")
def token_revoke(token_id: str, url: Url = None, token: Token = None, data_dir: DataDir = None) -> None:
    """Revoke a token."""
    find(url, token, data_dir).run(lambda c: c.delete(f"/tokens/{token_id}"))
    console.print(f"token {token_id} is revoked")


@weights_app.command("diff")
def weights_diff(
    base: Path,
    new: Path,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")],
    effort: Annotated[str, typer.Option(help="auto | fast | grouped | dense: more time, fewer bytes.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that encode.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Write what makes the weights in NEW out of those in BASE (Hugging Face directories with safetensors)."""
    from coordinator.commands import weights

    weights.diff(base, new, out, effort=effort, threads=threads, as_json=as_json)


@weights_app.command("apply")
def weights_apply(
    base: Path,
    file: Path,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    as_json: AsJson = False,
) -> None:
    """Make the directory that FILE was made from; its safetensors files are the same byte for byte."""
    from coordinator.commands import weights

    weights.apply(base, file, out, as_json=as_json)


@weights_app.command("inspect")
def weights_inspect(file: Path, as_json: AsJson = False) -> None:
    """What a file of `diff` holds: versions, changed share, modes, sizes."""
    from coordinator.commands import weights

    weights.inspect(file, as_json=as_json)


@weights_app.command("verify")
def weights_verify(paths: list[Path], as_json: AsJson = False) -> None:
    """Check files of `diff` and Hugging Face directories, and say which versions they are. Exit code 1 when one is broken."""
    from coordinator.commands import weights

    weights.verify(paths, as_json=as_json)


def _shown(value: Any, show: Callable[[Any], None], as_json: bool) -> None:
    if as_json:
        show_json(value)
    else:
        show(value)
