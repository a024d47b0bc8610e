# shellcheck shell=bash
# What run_booted.sh and run_fresh.sh share: sourced from the source tree's root.
cannot() {
    echo "the systemd tests did not run: $1"
    exit 77
}

# Whether this machine can boot a container and build the package at all.
check_machine() {
    [ "$(id -u)" = 0 ] || cannot "booting a container needs root; try: sudo make $1"
    command -v systemd-nspawn >/dev/null || cannot "systemd-nspawn is missing; on Debian and Ubuntu: apt-get install systemd-container"
    command -v dpkg-deb >/dev/null || cannot "dpkg-deb is missing"
    local system ours
    system=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
    ours=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$system" = "$ours" ] \
        || cannot "the package needs the distribution's interpreter, which is CPython ${system:-missing}, and .venv is of $ours"
}

# The demo model in $1, imported once.
import_model() {
    [ -f "$1/config.json" ] || .venv/bin/python - "$1" <<'PY'
import sys
from pathlib import Path
from edged.checkpoint.demo import demo_gguf
from edged.checkpoint.gguf_import import import_gguf
import_gguf(demo_gguf(), Path(sys.argv[1]), overwrite=True)
PY
    chmod -R a+rX "$1"
}

# Boot LOWER, run COMMAND in it, print what it printed; its exit status, or 77 where nothing boots here.
boot() {
    local status=0
    rm -rf "$RESULT" && mkdir -p "$RESULT"
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
    return "$(cat "$RESULT/status")"
}
