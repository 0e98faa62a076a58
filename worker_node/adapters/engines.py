"""Makes the engine that the settings name; heavy imports happen here, in the engine's own thread, and nowhere else."""

from __future__ import annotations

from worker_node.adapters.engine import EngineCore
from worker_node.adapters.engine_scripted import ScriptedEngine, ScriptedOptions
from worker_node.config import EngineSettings
from worker_node.errors import EngineError


def make_engine(settings: EngineSettings) -> EngineCore:
    """The engine, without weights. Raises EngineError when its libraries are not installed."""
    if settings.kind == "scripted":
        return ScriptedEngine(ScriptedOptions(settings.slots, settings.tokens_per_s, settings.faults))
    if settings.kind == "vllm":
        from worker_node.adapters.engine_vllm import VllmEngine

        return VllmEngine(settings.vllm, slots=settings.slots, dtype=settings.dtype)
    try:
        from worker_node.adapters.engine_torch import TorchEngine, TorchOptions
    except ImportError as error:
        raise EngineError(f"the torch engine cannot be imported ({error}): install it with `pip install 'echo2[torch]'`") from error
    return TorchEngine(TorchOptions(settings.slots, settings.dtype, settings.device))
