#!/usr/bin/env bash
# Runs tests/systemd/booted under a real systemd: this machine's own file system below an overlay in memory, booted in a
# container. Nothing of the machine changes. Exit status 77: it cannot boot here, and the reason is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
check_machine test-systemd
[ -x /lib/systemd/systemd ] || cannot "this machine has no systemd to boot"

out=.cache/booted
mkdir -p "$out"
import_model "$out/model"
rm -f "$out"/*.deb
.venv/bin/python deploy/deb/build.py --output "$out" --without torch --compression none
arguments=""
[ $# = 0 ] || arguments=$(printf ' %q' "$@")
export SOURCE="$PWD" RESULT="$PWD/$out/result" LOWER=/
export COMMAND="$SOURCE/.venv/bin/python -m pytest -p no:cacheprovider --durations=5 tests/systemd/booted$arguments"
boot
