#!/usr/bin/env bash
# Runs tests/systemd/booted under a real systemd: this machine's own file system below an overlay in memory, booted in a
# container. Nothing of the machine changes. Exit status 77: it cannot boot here, and the reason is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."
cannot() {
    echo "the systemd tests did not run: $1"
    exit 77
}
[ "$(id -u)" = 0 ] || cannot "booting a container needs root; try: sudo make test-systemd"
command -v systemd-nspawn >/dev/null || cannot "systemd-nspawn is missing; on Debian and Ubuntu: apt-get install systemd-container"
[ -x /lib/systemd/systemd ] || cannot "this machine has no systemd to boot"
command -v dpkg-deb >/dev/null || cannot "dpkg-deb is missing"
system_python=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
ours=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$system_python" = "$ours" ] \
    || cannot "the package needs the distribution's interpreter, which is CPython ${system_python:-missing}, and .venv is of $ours"

out=.cache/booted
mkdir -p "$out"
if [ ! -f "$out/model/config.json" ]; then
    .venv/bin/python - "$out/model" <<'PY'
import sys
from pathlib import Path
from edged.checkpoint.demo import demo_gguf
from edged.checkpoint.gguf_import import import_gguf
import_gguf(demo_gguf(), Path(sys.argv[1]), overwrite=True)
PY
fi
chmod -R a+rX "$out"
rm -f "$out"/*.deb
.venv/bin/python deploy/deb/build.py --output "$out" --without torch --compression none
export SOURCE="$PWD" RESULT="$PWD/$out/result"
rm -rf "$RESULT" && mkdir -p "$RESULT"
status=0
timeout 900 unshare --mount --propagation private bash tests/systemd/boot.sh "$@" || status=$?
if [ ! -f "$RESULT/status" ]; then
    [ "$status" = 77 ] && exit 77
    tail -n 30 "$RESULT/console" 2>/dev/null || true
    if grep -q "Reached target" "$RESULT/console" 2>/dev/null; then
        echo "the container booted and the tests did not end (exit status $status)"
        exit 1
    fi
    cannot "the container does not boot here (exit status $status)"
fi
cat "$RESULT/output"
exit "$(cat "$RESULT/status")"
