#!/usr/bin/env bash
# What a card shows of Octet: one command, half an hour at most, and one file to send.
#
#   bash bench/card.sh                        writes bench/results/cards/NAME-OF-THE-CARD.json
#   OCTET_CARD_MINUTES=10 bash bench/card.sh  as far as that goes
#
# It goes on where it stopped: a part that has succeeded is not run again. No part needs the internet once there is an
# environment; docs/offline.md says how to make one without. Without nvidia-smi the energy is left out.
#
# OCTET_CARDS is a folder in place of bench/results/cards, and OCTET_CARD_TRIAL=1 takes sizes that need no card, for
# tests/cuda/test_card.py.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
use_environment "$root" dev
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

name="$(python -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "")')"
[ -n "$name" ] || { echo "octet: torch finds no card here. octet doctor says why." >&2 && exit 2; }
cards="${OCTET_CARDS:-$root/bench/results/cards}"
parts="$cards/$name.parts"
seconds=$((${OCTET_CARD_MINUTES:-30} * 60))
mkdir -p "$parts"

# Runs a command and keeps what it prints, its messages and its status.
part() {
    local name="$1" left=$((seconds - SECONDS)) status=0
    shift
    [ "$(cat "$parts/$name.status" 2>/dev/null)" != 0 ] || return 0
    [ "$left" -gt 0 ] || { echo "octet: no time for $name; the same command goes on with it." && return 0; }
    echo "octet: $name, $((left / 60)) minutes left; messages in $parts/$name.log"
    timeout "$left" "$@" >"$parts/$name.out" 2>"$parts/$name.log" || status=$?
    echo "$status" >"$parts/$name.status"
}

# Adds up the energy, a line of watts for each second.
nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits --loop=1 >>"$parts/watts" 2>/dev/null &
meter=$!
trap 'kill "$meter" 2>/dev/null || true' EXIT

if [ -n "${OCTET_CARD_TRIAL:-}" ]; then
    part doctor python -m trainer.commands.main doctor --json --preset nano
    part tests python -m pytest -q -m gpu tests/test_gpu.py --collect-only
    part rehearsal python bench/memory_cuda_host.py --case tiny
    part decode python bench/decode.py --model nano --device cuda --dtype bf16 --rows 8 \
        --repetitions 1 --out "$parts/decode.json" --json
else
    part doctor python -m trainer.commands.main doctor --json --preset 8gb
    part rehearsal python bench/memory_cuda_host.py --case 8gb
    part memory python bench/gpu_memory.py --only "1.5b bf16 512" --json
    part versus python bench/versus.py --cells --only "1.5b bf16, 256" --out "$parts/versus.json" --json
    part learning python -m octet train --preset nano run.merge=false run.dir="$parts/run"
    part decode python bench/decode.py --model qwen2.5-1.5b-shape --device cuda --dtype bf16 --rows 32 \
        --repetitions 1 --out "$parts/decode.json" --json
    part tests python -m pytest -q -m gpu tests/test_gpu.py
fi

python - "$parts" "$cards/$name.json" <<'EOF'
import json, sys
from pathlib import Path

sys.path.insert(0, "bench")
from machine import describe

parts, result = map(Path, sys.argv[1:])
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
if (evaluation := parts / "run/eval.json").is_file():
    found["learning"]["result"] = json.loads(evaluation.read_text())
watts = [float(line) for line in (parts / "watts").read_text().splitlines() if line.replace(".", "", 1).isdigit()]
energy = {"seconds": len(watts), "kwh": sum(watts) / 3.6e6}
result.write_text(json.dumps({"machine": describe(), "energy": energy, "parts": found}, indent=1) + "\n")
failed = [name for name, part in found.items() if part["status"]]
print(f"octet: {result} is written" + (f"; failed or out of time: {', '.join(failed)}" if failed else ""))
EOF
