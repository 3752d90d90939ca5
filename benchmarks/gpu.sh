#!/usr/bin/env bash
# What one GPU can show, needs no network; results and logs go to $OUT.
#   benchmarks/gpu.sh                          the three parts below, with the scenarios 8b-64 and 8b-8
#   benchmarks/gpu.sh tests                    the tests that need a GPU
#   benchmarks/gpu.sh calibrate                its profile
#   benchmarks/gpu.sh SCENARIO [option ...]    a scenario of benchmarks/gpu.py, measured and, with --simulate, simulated
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-benchmarks/results}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"

part() {
    local name=$1
    shift
    case "$name" in
        tests) set -- pytest -q tests/gpu "$@" ;;
        calibrate) set -- simplefsdp calibrate --network h100-8-nodes --out "$OUT/gpu-profile.json" "$@" ;;
        *) set -- benchmarks.gpu "$name" "$@" ;;
    esac
    "${PYTHON:-python3}" -m "$@" 2>&1 | tee "$OUT/gpu-$name.log"
}

if [ $# -gt 0 ]; then
    part "$@"
    exit
fi
failed=0
part tests || failed=1
part calibrate || failed=1
for scenario in 8b-64 8b-8; do
    part "$scenario" --simulate --embedding-lookup exchange || failed=1
done
exit $failed
