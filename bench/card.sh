#!/usr/bin/env bash
# What a card shows of Octet: one command, and one file to send.
#
#   bash bench/card.sh                        writes bench/results/cards/NAME-OF-THE-CARD.json, in 30 minutes at most
#   OCTET_CARD_MINUTES=10 bash bench/card.sh  as far as that goes
#   bash bench/card.sh --dry-run              prints the parts in their order, with the minutes that each may take
#
# It goes on where it stopped: a part that has succeeded is not run again, one that ran out of time resumes, and one that
# has failed twice is left. The order is by what a part is worth. No part but `8gb`, `equations`, `warmup` and
# `gsm8k` needs the internet once there is an environment, and these none if OCTET_GSM8K names a folder with GSM8K and
# OCTET_SMOLLM2 one with SmolLM2; docs/offline.md says how to make an environment without. Without nvidia-smi the energy
# is left out.
#
# OCTET_CARDS is a folder in place of bench/results/cards, and OCTET_CARD_TRIAL, the file of a short study, takes sizes
# that need no card, for tests/cuda/test_card.py.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
if [ "${1:-}" != --dry-run ] && [ -z "${OCTET_PYTHON:-}" ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    echo "octet: this machine has no NVIDIA card, so nothing was installed. --dry-run prints the parts." >&2
    exit 2
fi
use_environment "$root" dev
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

dry=""
[ "${1:-}" != --dry-run ] || dry=1
found="$(python -c 'import torch
if torch.cuda.is_available():
    print(torch.cuda.get_device_name().replace(" ", "-"), torch.cuda.get_device_properties(0).total_memory >> 30)')"
[ -n "$found$dry" ] || { echo "octet: torch finds no card here. octet doctor says why." >&2 && exit 2; }
read -r name gib <<<"${found:-NAME-OF-THE-CARD ${OCTET_CARD_GIB:-80}}" # without a card, OCTET_CARD_GIB says what to print
cards="$(realpath -m "${OCTET_CARDS:-$root/bench/results/cards}")"
parts="$cards/$name.parts"
seconds=$((${OCTET_CARD_MINUTES:-30} * 60))

# Runs a command for so many minutes at most, and keeps what it prints, its messages and its status.
part() {
    local name="$1" minutes="$2" left=$((seconds - SECONDS)) status=0
    shift 2
    [ -z "$dry" ] || { echo "$name, $minutes minutes: $*" && return 0; }
    [ "$(cat "$parts/$name.status" 2>/dev/null)" != 0 ] || return 0
    [ "$(wc -l <"$parts/$name.failed" 2>/dev/null || echo 0)" -lt 2 ] || return 0
    [ "$left" -gt 0 ] || { echo "octet: no time for $name; the same command goes on with it." && return 0; }
    [ "$left" -lt $((minutes * 60)) ] || left=$((minutes * 60))
    echo "octet: $name, $((left / 60)) minutes at most; messages in $parts/$name.log"
    timeout "$left" "$@" >"$parts/$name.out" 2>"$parts/$name.log" || status=$?
    echo "$status" >"$parts/$name.status"
    case "$status" in 0 | 124) ;; *) echo "$status" >>"$parts/$name.failed" ;; esac
}

if [ -n "$dry" ]; then
    echo "octet: on ${gib} GiB, in this order; all goes into $cards/$name.json"
else
    mkdir -p "$parts"
fi

# Adds up the energy, a line of watts for each second.
if [ -z "$dry" ]; then
    nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits --loop=1 >>"$parts/watts" 2>/dev/null &
    meter=$!
    trap 'kill "$meter" 2>/dev/null || true' EXIT
fi

# Runs of a study are in the folder where it starts. These commands may load from the hub.
octet() { part "$1" "$2" env -u HF_HUB_OFFLINE -C "$parts" python -m octet "${@:3}"; }
[ -z "${OCTET_GSM8K:-}" ] || OCTET_GSM8K="$(realpath -m "$OCTET_GSM8K")"
gsm8k=(${OCTET_GSM8K:+"task.data_dir=$OCTET_GSM8K"})
smollm2=(${OCTET_SMOLLM2:+"model.name=$(realpath -m "$OCTET_SMOLLM2")"})
study="${OCTET_CARD_TRIAL:-$root/bench/studies/gsm8k_card.yaml}"
if [ -n "${OCTET_CARD_TRIAL:-}" ]; then
    part doctor 1 python -m trainer.commands.main doctor --json --preset nano
    part tests 2 python -m pytest -q -m gpu tests/test_gpu.py --collect-only
    octet warmup 2 warmup --preset nano warmup.steps=1 eval.problems=2 run.merge=false run.dir="$parts/warm"
    octet gsm8k 5 study "$study" lora.start="$parts/warm/adapter"
    part rehearsal 2 python bench/memory_cuda_host.py --case tiny
    part decode 2 python bench/decode.py --model nano --device cuda --dtype bf16 --rows 8 \
        --repetitions 1 --out "$parts/decode.json" --json
else
    part doctor 1 python -m trainer.commands.main doctor --json --preset 8gb
    part learning 1 python -m octet train --preset nano run.merge=false run.dir="$parts/run"
    part tests 2 python -m pytest -q -m gpu tests/test_gpu.py
    if [ "$gib" -lt 30 ]; then
        octet 8gb 25 train --preset 8gb "${gsm8k[@]}" run.dir="$parts/8gb"
    else
        part equations 1 env -u HF_HUB_OFFLINE -C "$parts" \
            python "$root/bench/short_gsm8k.py" "${OCTET_GSM8K:-hub}" equations 99 equations
        octet warmup 9 warmup --preset smollm2-gsm8k "${smollm2[@]}" lora.r=8 lora.alpha=16 task.name=records \
            task.path=equations/train.jsonl task.test_path=equations/valid.jsonl "task.tools=[calculator]" \
            task.calls=inline prompt.style=chat prompt.answer=gsm8k rollout.max_new_tokens=96 warmup.steps=200 \
            warmup.lr=2e-3 warmup.every=null warmup.patience=null engine.ds_config=zero2 run.dir="$parts/warm"
        octet gsm8k 18 study "$study" --jobs 6 "${smollm2[@]}" lora.start="$parts/warm/adapter"
    fi
    for weights in same int8 fp8; do # a process each: their copies do not fit a small card together
        part "decode-$weights" 1 python bench/decode.py --model qwen2.5-1.5b-shape --device cuda --dtype bf16 --rows 32 \
            --weights "$weights" --repetitions 2 --out "$parts/decode.json" --json
    done
    part versus 9 python bench/versus.py --cells --out "$parts/versus.json" --json
    part decode 2 python bench/decode.py --model qwen2.5-1.5b-shape --device cuda --dtype bf16 --rows 32 \
        --repetitions 1 --out "$parts/decode.json" --json
    part rehearsal 1 python bench/memory_cuda_host.py --case 8gb
    part memory 2 python bench/gpu_memory.py --only "1.5b bf16 512" --json
fi
[ -z "$dry" ] || exit 0

python - "$parts" "$cards/$name.json" "$parts/runs/$(basename "$study" .yaml)/study.json" <<'EOF'
import json, sys
from pathlib import Path

sys.path.insert(0, "bench")
from machine import describe

parts, result, study = map(Path, sys.argv[1:])
found = {}
for file in sorted(parts.glob("*.status")):
    text = file.with_suffix(".out").read_text().strip()
    try:
        said = json.loads(text)
    except ValueError:  # the last line is JSON, or this part speaks to people
        last = text.splitlines()[-1] if text else ""
        said = json.loads(last) if last.startswith("{") else last
    found[file.stem] = {"status": int(file.read_text()), "result": said}
    if found[file.stem]["status"]:
        found[file.stem]["messages"] = file.with_suffix(".log").read_text()[-2000:]
accuracy = {"learning": parts / "run/eval.json", "8gb": parts / "8gb/eval.json", "warmup": parts / "warm/eval.json"}
for name, file in {**accuracy, "gsm8k": study}.items():
    if name in found and file.is_file():
        found[name]["result"] = json.loads(file.read_text())
curves = {}  # of the runs of the study, also of those that have not ended
for file in sorted(study.parent.glob("*/metrics.jsonl")):
    rows = map(json.loads, file.read_text().splitlines())
    curves[file.parent.name] = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
if "gsm8k" in found:
    found["gsm8k"]["curves"] = curves
watts = [float(line) for line in (parts / "watts").read_text().splitlines() if line.replace(".", "", 1).isdigit()]
energy = {"seconds": len(watts), "kwh": sum(watts) / 3.6e6}
result.write_text(json.dumps({"machine": describe(), "energy": energy, "parts": found}, indent=1) + "\n")
failed = [name for name, part in found.items() if part["status"]]
print(f"octet: {result} is written" + (f"; failed or out of time: {', '.join(failed)}" if failed else ""))
EOF
