#!/usr/bin/env bash
# Trains a small GPT on real text with the distributed optimizer. Needs Python 3.10 or newer and nothing else:
# what it installs goes to .venv in the root of the repository, what it makes to runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'USAGE'
usage: scripts/quickstart.sh [options]

  --launcher deepspeed|torchrun   who starts the ranks (deepspeed)
  --ranks N                       how many (2; with GPUs at most one on each)
  --precision fp32|bf16|fp16      of the model params; main params are fp32 (bf16 or fp32, what is measured to be faster)
  --iterations N                  how many (up to 480: as many as take three minutes by a measurement)
  --data FILE                     a text of your own (the source of Python's standard library)
  --seed N                        another start (1234)
  --compare                       train once more, as long again, with megatron-core's own distributed optimizer

PYTHON names the interpreter for the virtual environment (python3).
USAGE
}

launcher=deepspeed
ranks=
passed_on=(--use-distributed-optimizer)
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --compare) passed_on+=("$1"); shift; continue ;;
        --launcher | --ranks | --precision | --iterations | --data | --seed) ;;
        *) usage >&2; fail "Invalid option: $1. Must be one of those above." 2 ;;
    esac
    [ $# -ge 2 ] || fail "Invalid option: $1 without a value. Must have one." 2
    case "$1" in
        --launcher) launcher=$2 ;;
        --ranks) ranks=$2 ;;
        *) passed_on+=("$1" "$2") ;;
    esac
    shift 2
done
case "$launcher" in
    deepspeed | torchrun) ;;
    *) fail "Invalid launcher: $launcher. Must be deepspeed or torchrun." 2 ;;
esac

if [ -z "$ranks" ]; then
    ranks=$((gpus == 1 ? 1 : 2))
fi
case "$ranks" in
    '' | *[!0-9]* | 0) fail "Invalid ranks: $ranks. Must be a whole number from 1." 2 ;;
esac
if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then
    fail "Invalid ranks: $ranks. Must be at most $gpus, one on each GPU." 2
fi

prepare quickstart
QUICKSTART_BEGAN=$(date +%s) # the three minutes: imports and launcher count, installing does not
export QUICKSTART_BEGAN

# The port is free now: another job of the machine may hold the launchers' default one.
port=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
if [ "$gpus" -eq 0 ]; then
    export DS_ACCELERATOR=cpu
fi
if [ "$launcher" = deepspeed ]; then
    command=("$venv/bin/deepspeed" --quiet --num_accelerators "$ranks" --master_port "$port")
else
    command=("$venv/bin/torchrun" --nproc-per-node "$ranks" --master-port "$port")
fi
command+=("$root/examples/quickstart.py" "${passed_on[@]}")
echo "${command[*]}"
exec "${command[@]}"
