"""A real checkpoint on a real vLLM server: SmolLM2-135M in fp32 on GSM8K questions, with the server killed on the way (`--long`)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.models.vllm_python import NO_VLLM, vllm_python

HERE = Path(__file__).parent
GSM8K = HERE.parent / "data" / "gsm8k" / "test.jsonl"
STEPS = 3
SLOTS = 1  # the worker is then the slow one, and updates fall among its completions
LIMIT_S = 2700.0


def job(model: Path, train: Path) -> dict[str, object]:
    """2 prompts x 4 samples of up to 192 tokens; the reward has variance."""
    return {
        "name": "smollm2-vllm",
        "model": str(model),
        "environment": {
            "type": f"python:{HERE / 'rewards.py'}:digit_share",
            "train": str(train),
            "prompt_column": "question",
            "use_chat_template": True,
            "grade_timeout_s": 120,
        },
        "algorithm": {"group_size": 4, "groups_per_step": 2, "learning_rate": 1e-5, "truncated": "keep"},
        "staleness": {"max": 2},
        "sampling": {"max_new_tokens": 192},
        "checkpoints": {"every_steps": STEPS, "eval_every_steps": 100, "eval_prompts": 0},
        "workers": {"engines": ["vllm"]},
        "budget": {"steps": STEPS},
    }


def engine_cores(worker: int) -> list[int]:
    """The token-making processes of vLLM servers that this worker started (their guard is its child)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and b"EngineCore" in (entry / "cmdline").read_bytes():
                group = os.getpgid(int(entry.name))
                if int(Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[1]) == worker:
                    found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.long
def test_three_steps_on_vllm_with_its_engine_killed(tmp_path: Path) -> None:
    """Planned steps, audit clean, every confirmed version's log-probs within 1e-4 of the learner's for the published bits."""
    from tests.models.smollm2 import directory as smollm2_directory

    python = vllm_python()
    if python is None:
        pytest.skip(NO_VLLM)
    train = tmp_path / "questions.jsonl"
    train.write_text("".join(line + "\n" for line in GSM8K.read_text().splitlines()[:64]))
    with Cluster(tmp_path, variables={"ECHO2_HEARTBEAT_S": "5"}) as cluster:
        cluster.start_coordinator()
        job_id = cluster.submit(job(smollm2_directory(), train))
        options = ("--slots", str(SLOTS), "--vllm-python", str(python), "--kv-cache-gib", "1", "--max-model-len", "1024")
        cluster.start_worker("one", engine="vllm", options=options)
        worker = cluster.workers["one"].pid

        def leased() -> bool:
            return bool(cluster.rows("SELECT 1 FROM rollouts WHERE state = 'leased' LIMIT 1"))

        cluster.until(leased, "the first lease", within_s=LIMIT_S / 2)
        time.sleep(1.0)  # into the generation
        (victim,) = engine_cores(worker)
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        cluster.until(lambda: engine_cores(worker) not in ([], [victim]), "a new engine", within_s=LIMIT_S / 2)
        print(f"\nnew engine process after {time.monotonic() - killed_at:.1f} s")
        ended = cluster.until_ended(job_id, within_s=LIMIT_S, restart=False)
        assert (ended["state"], ended["committed_steps"]) == ("completed", STEPS), ended["reason"]
        assert cluster.workers["one"].poll() is None
        assert "started again" in (tmp_path / "one.log").read_text()
        audit = cluster.audit(job_id)
        assert audit["ok"], audit
        held = cluster.rows(
            "SELECT h.version, h.digest, p.digest, h.canary_logprobs, p.canary_logprobs, h.apply_s FROM holdings h "
            "JOIN publications p ON p.job_id = h.job_id AND p.version = h.version WHERE h.job_id = ? ORDER BY h.version",
            job_id,
        )
        assert len(held) >= 2  # version 0 loaded, later ones updated in place
        for version, held_digest, published_digest, sent, expected, apply_s in held:
            assert held_digest == published_digest
            gap = max(abs(a - b) for a, b in zip(json.loads(sent), json.loads(expected), strict=True))
            print(
                f"version {version}: greatest log-prob gap {gap:.2e}, {'load' if version == 0 else 'stall of the update'} {apply_s:.2f} s"
            )
            assert gap <= 1e-4
        ((settled, crossing),) = cluster.rows(
            "SELECT COUNT(*), SUM(oldest_version < newest_version) FROM rollouts WHERE newest_version IS NOT NULL"
        )
        print(f"{settled} completions, {crossing} of them across an update")
        assert crossing > 0
