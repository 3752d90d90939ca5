#!/usr/bin/env bash
# One scenario of benchmarks/gpu.py on one GPU, needs no network; results and the log go to $OUT.
#   benchmarks/gpu.sh 8b-64 | 8b-8 | 8b-128 | 70b-64 | 70b-64-tp8 | smoke
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-benchmarks/results}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
"${PYTHON:-python3}" -m benchmarks.gpu "$@" 2>&1 | tee "$OUT/gpu-${1:-}.log"
