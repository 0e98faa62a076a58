"""Carries out the calls of `pricing.feeds.skypilot` with an installed `sky`, in threads. SkyPilot holds the clouds' keys itself.

Written from docs.skypilot.co (Python SDK: each call returns a request id, `sky.get` waits for its result), read on 2026-11-30; not run
against a cloud. Where `sky` is not installed every call is refused in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import threading
from typing import Any

from pricing.feeds.contract import Answer, Call

MOST_CALLS = 4
NOT_INSTALLED = "sky is not installed here: pip install skypilot, and set up its clouds with `sky check`"


class SkySender:
    """A `Send` for SkyPilot.

    A call that hangs cannot be stopped. So each has a thread of its own, which holds up neither the process's other threads nor its
    end, and beyond MOST_CALLS under way the next is refused.
    """

    def __init__(self) -> None:
        self._under_way = 0

    async def __call__(self, call: Call) -> Answer:
        if self._under_way >= MOST_CALLS:
            return _answer(503, {"detail": f"{self._under_way} calls to SkyPilot have not returned: is its API server well?"})
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()

        def end(answer: Answer) -> None:
            self._under_way -= 1
            if not answered.done():  # nobody may be waiting any more
                answered.set_result(answer)

        def work() -> None:
            answer = _carry_out(call)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, answer)

        self._under_way += 1
        threading.Thread(target=work, name="sky", daemon=True).start()
        return await answered


def _carry_out(call: Call) -> Answer:
    try:
        sky = importlib.import_module("sky")
    except ImportError:
        return _answer(501, {"detail": NOT_INSTALLED})
    try:
        match call.method, call.path:
            case "GET", "/accelerators":
                return _answer(200, _accelerators(sky, [value for _, value in call.query]))
            case "GET", "/status":
                return _answer(200, _status(sky, [value for _, value in call.query]))
            case "POST", "/launch":
                return _launch(sky, dict(call.body or {}))
            case _:
                sky.get(sky.down(call.query[0][1]))
                return _answer(200, {})
    except Exception as error:  # whatever a cloud's plug-in raises becomes an answer
        return _answer(_status_of(error), {"detail": f"{type(error).__name__}: {error}"})


def _status_of(error: Exception) -> int:
    return {"ClusterDoesNotExist": 404, "ResourcesUnavailableError": 409, "ResourcesMismatchError": 409}.get(
        type(error).__name__, 500
    )


def _accelerators(sky: Any, names: list[str]) -> list[dict[str, Any]]:
    found = sky.get(sky.list_accelerators(gpus_only=True, name_filter="|".join(names) or None))
    return [
        {
            "infra": str(one.cloud).lower(),
            "instance_type": one.instance_type or "",
            "accelerator": one.accelerator_name,
            "count": one.accelerator_count,
            "device_memory_gb": one.device_memory,
            "price": one.price,
            "region": one.region,
        }
        for some in found.values()
        for one in some
    ]


def _status(sky: Any, names: list[str]) -> list[dict[str, Any]]:
    """A cluster's status is one of INIT, UP, STOPPED; its price is what SkyPilot's own catalogue says."""
    found = sky.get(sky.status(cluster_names=names or None))
    return [
        {"name": one["name"], "status": getattr(one["status"], "value", str(one["status"])), "launched_at": one["launched_at"]}
        for one in found
    ]


def _launch(sky: Any, body: dict[str, Any]) -> Answer:
    task = sky.Task(run=body["run"], envs=body["envs"])
    resources = ("infra", "accelerators", "image_id", "disk_size", "max_hourly_cost")
    task.set_resources(sky.Resources(**{name: body[name] for name in resources}))
    sky.launch(
        task, cluster_name=body["cluster_name"], idle_minutes_to_autostop=body["idle_minutes_to_autostop"], down=body["down"]
    )
    return _answer(200, {})


def _answer(status: int, content: Any) -> Answer:
    return Answer(status, {}, json.dumps(content).encode())
