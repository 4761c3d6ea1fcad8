#!/usr/bin/env bash
# `make test`, the gate of every change: the checks, and beside them the tests that are neither long nor checks.
# Checks keep one core busy and tests wait at times, so both run side by side. Arguments are pytest's.
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # each process would compile the tests anew
make .venv/.dev build/import-root/tandem || exit
said=$(mktemp)
trap 'rm -f "$said"' EXIT

timed() { # name command...
    local name=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    echo "$name: $((SECONDS - began)) s, exit status $status"
    return "$status"
}

timed checks make check > "$said" 2>&1 &
checked=0 tested=0
timed tests .venv/bin/pytest -q -m "not gpu and not long and not check" -n "${TEST_PROCESSES:-3}" \
    --no-loadscope-reorder "$@" || tested=$?
wait $! || checked=$?
cat "$said"
echo "the gate: $SECONDS s"
exit $((checked ? checked : tested))
