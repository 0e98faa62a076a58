"""A real checkpoint: SmolLM2-135M-Instruct on GSM8K questions, three whole steps with two workers (make test-all)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

HERE = Path(__file__).parent
GSM8K = HERE.parent / "data" / "gsm8k" / "test.jsonl"


def job(model: Path, train: Path) -> dict[str, object]:
    """4 prompts x 4 samples of 48 new tokens; the share of digits in the answer has variance."""
    return {
        "name": "smollm2-gsm8k",
        "model": str(model),
        "environment": {
            "type": f"python:{HERE / 'rewards.py'}:digit_share",
            "train": str(train),
            "prompt_column": "question",
            "use_chat_template": True,
            "grade_timeout_s": 60,
        },
        "algorithm": {"group_size": 4, "groups_per_step": 4, "learning_rate": 1e-6, "truncated": "keep"},
        "staleness": {"max": 1},
        "sampling": {"max_new_tokens": 48},
        "checkpoints": {"every_steps": 3, "eval_every_steps": 100, "eval_prompts": 0},
        "budget": {"steps": 3},
    }


@pytest.mark.long
def test_three_steps_of_a_real_model(tmp_path: Path) -> None:
    """Log-probs of the published bits agree between learner and workers (fp32, 1e-4); each version is bit-exact on each worker."""
    from tests.models.smollm2 import directory as smollm2_directory

    train = tmp_path / "questions.jsonl"
    train.write_text("".join(line + "\n" for line in GSM8K.read_text().splitlines()[:64]))
    with Cluster(tmp_path, variables={"ECHO2_HEARTBEAT_S": "5"}) as cluster:
        cluster.start_coordinator()
        job_id = cluster.submit(job(smollm2_directory(), train))
        for name in ("one", "two"):
            cluster.start_worker(name, engine="torch", options=("--slots", "16"))
        ended = cluster.until_ended(job_id, within_s=1500, restart=False)
        assert (ended["state"], ended["committed_steps"]) == ("completed", 3), ended["reason"]
        assert cluster.audit(job_id)["ok"]
        held = cluster.rows(
            "SELECT h.worker_id, h.version, h.digest, p.digest, h.canary_logprobs, p.canary_logprobs FROM holdings h "
            "JOIN publications p ON p.job_id = h.job_id AND p.version = h.version WHERE h.job_id = ?",
            job_id,
        )
        assert len({worker for worker, *_ in held}) == 2
        gaps = []
        for _, _, held_digest, published_digest, sent, expected in held:
            assert held_digest == published_digest
            gaps.append(max(abs(a - b) for a, b in zip(json.loads(sent), json.loads(expected), strict=True)))
        print(f"\n{len(held)} confirmed versions, greatest log-prob gap {max(gaps):.2e}")
        assert max(gaps) <= 1e-4
        trained = cluster.rows(
            "SELECT DISTINCT worker_id FROM rollouts r JOIN groups g ON g.id = r.group_id WHERE g.state = 'trained'"
        )
        assert len(trained) == 2
