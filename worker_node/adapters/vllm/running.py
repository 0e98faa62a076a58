"""A vLLM server that has weights: started and looked over, asked, updated in place, ended.

Every method that talks to it raises Gone (no answer) or Refused (an error). After either in `replace` its weights may be a mixture.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from worker_node.adapters.vllm.client import GENERATE, HEALTH, Client, Gone, Refused
from worker_node.adapters.vllm.server import Server, server_command
from worker_node.config import VllmSettings
from worker_node.domain import vllm_api
from worker_node.domain.vllm_fit import Fit
from worker_node.errors import EngineError

START_S = 840.0  # with the first token, for which kernels may be compiled; a session gives a weight update 900 s
CONTROL_S = 60.0
HEALTH_S = 20.0  # on a loaded machine an answer takes seconds
UPDATE_S = 300.0  # from pause to resume
CANARY_S = 120.0
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How servers of this engine are started, whatever their weights."""

    settings: VllmSettings
    release: str
    slots: int
    dtype: str
    on_cpu: bool


class Running:
    """One server, healthy when made; `context` is how many tokens a prompt and its completion may have."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        label: str,
        fit: Fit,
        *,
        within_s: float = START_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the weights of `directory`, named `label`. Raises EngineError, and then nothing is left of it."""
        command = server_command(plan.settings.python, directory.absolute(), _options(plan, fit))
        self._clock = clock
        self._log = structlog.get_logger("vllm")
        self._asked = 0
        try:
            self._server = Server(command, _variables(plan), plan.settings.log)
        except OSError as error:
            raise EngineError(f"vLLM cannot be started: {error}") from error
        try:
            self.client = Client(self._server.socket)
        except (Gone, OSError, RuntimeError) as error:  # RuntimeError: no more threads
            self._server.kill()
            raise EngineError(f"vLLM cannot be talked to: {error}") from error
        try:
            self.context = self._get_ready(plan, label, clock() + within_s)
        except (Gone, Refused, EngineError, ValueError, LookupError, TypeError) as error:  # the last three: an odd answer
            words = self._server.last_words()
            self.close()
            raise EngineError(f"vLLM does not start: {error}; its last words: {words}") from error

    @property
    def is_alive(self) -> bool:
        """Whether its process runs; it may be in a bad way even so."""
        return self._server.is_alive

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self._server.last_words()

    def is_healthy(self) -> bool:
        """Whether it runs and says that its engine does."""
        try:
            self._check_health()
        except (Gone, Refused, EngineError):
            return False
        return True

    def tokens_made(self) -> float | None:
        """Since its start; None when it does not say."""
        return vllm_api.generated_tokens(self.client.call("GET", "/metrics"))

    def progress(self) -> tuple[float, float] | None:
        """What changes while it works; None when it does not say."""
        return vllm_api.progress(self.client.call("GET", "/metrics"))

    def logprobs(self, ids: Sequence[int], *, limit_s: float = CANARY_S) -> tuple[float, ...]:
        """Of `ids[1:]` at temperature 1; NaN where the server is well and yet has no number. Raises Gone."""
        self._asked += 1
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "seed": 0, "detokenize": False}
        body = {"request_id": f"canary-{self._asked}", "token_ids": list(ids), "sampling_params": sampling}
        try:
            rows = json.loads(self.client.call("POST", GENERATE, body=body, timeout_s=limit_s))["prompt_logprobs"]
            return tuple(float(rows[at][str(token)]["logprob"]) for at, token in enumerate(ids) if at)
        except (Refused, ValueError, KeyError, TypeError, IndexError) as error:
            if not self.is_healthy():
                raise Gone(f"no log-probs, and it is not healthy: {error}") from error
            self._log.warning("no log-probs", reason=str(error))
            return (math.nan,) * (len(ids) - 1)

    def replace(self, files: Sequence[Path], label: str, mode: Literal["keep", "abort"]) -> None:
        """Put the files' weights into the model; running completions wait (keep) or end (abort) meanwhile.

        The order is vLLM's: between start and finish the layers have no weights, and a decode step would end the engine. What waits
        keeps its cache: by default a pause drops it (in 0.32, whatever its help says), and all of it would be computed anew.
        """
        end = self._clock() + UPDATE_S
        pause = {"mode": mode, "clear_cache": str(mode == "abort").lower()}
        self.client.call("POST", "/pause", query=pause, timeout_s=CONTROL_S)
        self._call("/start_weight_update")
        update = {"update_info": {"files": [str(path.absolute()) for path in files]}}
        self._call("/update_weights", update, limit_s=self._left(end))
        self._call("/finish_weight_update", {"weight_version": label}, limit_s=self._left(end))
        emptied = json.loads(self._call("/reset_prefix_cache")).get("success")
        if mode == "abort" and not emptied:  # running completions keep their blocks; the requests' salt keeps others off them
            raise Refused(200, "the prefix cache was not emptied though nothing runs")
        self._call("/resume")

    def close(self) -> None:
        """End it, with every process it started."""
        self.client.close()
        self._server.close()

    def _get_ready(self, plan: Plan, label: str, end: float) -> int:
        """Wait for it, look it over, have it make a token; its context."""
        self._wait_healthy(end)
        context = self._look_over(plan)
        self._call("/init_weight_transfer_engine", {"init_info": {}})
        self._call("/update_weight_version", {"new_version": label})
        self.logprobs((0, 0), limit_s=self._left(end))
        self._check_health()
        self._server.note_shared_memory()
        return context

    def _left(self, end: float) -> float:
        return max(end - self._clock(), _LEAST_S)

    def _call(self, path: str, body: dict[str, Any] | None = None, *, limit_s: float = CONTROL_S) -> str:
        return self.client.call("POST", path, body=body, timeout_s=limit_s)

    def _check_health(self) -> None:
        if not self._server.is_alive:
            raise EngineError("its process ended")
        self.client.call("GET", HEALTH, timeout_s=HEALTH_S)

    def _wait_healthy(self, end: float) -> None:
        started = self._clock()
        while self._clock() < end:
            if not self._server.is_alive:
                raise EngineError("its process ended at the start")
            if self._server.socket.exists() and self.is_healthy():
                return
            time.sleep(0.05)
        raise EngineError(f"it was not healthy after {self._clock() - started:.0f} s")

    def _look_over(self, plan: Plan) -> int:
        """Refuse a server that lacks something or runs in another precision; its context."""
        text = self.client.call("GET", "/openapi.json", timeout_s=CONTROL_S)
        if missing := vllm_api.lacking(json.loads(text), text):
            raise EngineError(f"{plan.release} lacks {', '.join(missing)}: install vLLM 0.32.0")
        facts = json.loads(self._call("/collective_rpc", {"method": "echo2_facts"}))["results"]
        if any(fact["dtype"] != plan.dtype for fact in facts):
            raise EngineError(f"--dtype {plan.dtype} was asked for, it runs in {facts[0]['dtype']}")
        return int(json.loads(self.client.call("GET", "/v1/models"))["data"][0]["max_model_len"])


def _variables(plan: Plan) -> dict[str, str]:
    """Beside those that every server gets. What is compiled is kept beside the log: a service may write nowhere else."""
    threads = {"OMP_NUM_THREADS": "1"} if plan.on_cpu else {}
    if plan.settings.log is None:
        return threads
    cache = plan.settings.log.parent / "vllm-cache"
    places = {
        "XDG_CACHE_HOME": "",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "FLASHINFER_WORKSPACE_BASE": "",
    }
    return threads | {name: str(cache / folder) for name, folder in places.items()}


def _options(plan: Plan, fit: Fit) -> dict[str, Any]:
    """Of the server's command line."""
    settings = plan.settings
    options: dict[str, Any] = {
        "served-model-name": "policy",
        "dtype": plan.dtype,
        "max-model-len": fit.max_model_len,
        "max-num-seqs": plan.slots + 1,  # one for the canary
        "tensor-parallel-size": settings.tensor_parallel,
        "load-format": "safetensors",
        "skip-tokenizer-init": True,  # tokens in, tokens out
        "generation-config": "vllm",  # no sampling defaults out of the model's directory
        "logprobs-mode": "processed_logprobs",  # at the sampling temperature
        "enable-scale-out": True,  # /inference/v1/generate
        "worker-extension-cls": "echo2_vllm_extension.Echo2Worker",
        "weight-transfer-config": '{"backend": "echo2_file"}',
        "disable-uvicorn-access-log": True,
        "seed": 0,
    }
    if fit.kv_bytes is not None:
        options["kv-cache-memory-bytes"] = fit.kv_bytes
    if not plan.on_cpu:
        options["gpu-memory-utilization"] = settings.gpu_memory
    if plan.on_cpu or settings.eager:
        options["enforce-eager"] = True
    return options
