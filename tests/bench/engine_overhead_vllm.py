# The bare engine of engine_overhead.py, run by vLLM's own Python: a request in JSON on standard input, then `go` for each run.
import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.stdin.readline())
    llm = LLM(
        request["model"],
        dtype="float32",
        max_num_seqs=request["slots"],
        max_model_len=1024,
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    prompts, params, seed = [], [], 1000
    for ids in request["prompts"]:
        for _ in range(request["group"]):
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    max_tokens=request["tokens"], ignore_eos=True, seed=seed, logprobs=0, temperature=1.0, detokenize=False
                )
            )
            seed += 1
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.monotonic()
        made = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        print(json.dumps({"seconds": seconds, "tokens": sum(len(one.outputs[0].token_ids) for one in made)}), flush=True)


if __name__ == "__main__":
    main()
