#!/usr/bin/env bash
# Imports the demo model, serves it, streams one answer through gRPC, prints the status and stops. `make demo` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
model=.demo/SmolLM2-135M-Instruct
log=.demo/edged.log
mkdir -p .demo

if [ ! -f "$model/model.safetensors" ]; then
    echo "==> Importing the demo model (GGUF to safetensors)"
    "$bin/edgectl" import --demo "$model"
fi

set +e
"$bin/edgectl" status >/dev/null 2>&1
listening=$?
set -e
if [ "$listening" -ne 2 ]; then # 2: nobody answers
    echo "A daemon listens at the default address already; stop it first." >&2
    exit 1
fi

echo "==> Starting the daemon (log: $log)"
"$bin/edged" --config examples/demo.yaml >"$log" 2>&1 &
daemon=$!
trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true' EXIT

if ! "$bin/edgectl" status --wait 120 >/dev/null || ! kill -0 "$daemon" 2>/dev/null; then
    echo "The daemon did not come up. The end of $log:" >&2
    tail -n 20 "$log" >&2
    exit 1
fi

echo "==> edgectl generate --chat 'What is a robot? Answer in two sentences.'"
"$bin/edgectl" generate --chat 'What is a robot? Answer in two sentences.' --max-tokens 80

echo
echo "==> edgectl status"
"$bin/edgectl" status

echo "==> Stopping the daemon"
kill -TERM "$daemon"
wait "$daemon"
trap - EXIT
echo "==> Done. To serve it until you stop it: .venv/bin/edged --config examples/demo.yaml"
