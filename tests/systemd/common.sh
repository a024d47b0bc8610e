# shellcheck shell=bash
# What the run_*.sh share: sourced from the source tree's root.
cannot() {
    echo "the systemd tests did not run: $1"
    exit 77
}

# Run the script $1 anew with mounts of its own: whoever searches the source tree meanwhile does not find /proc in it, and they
# are gone when it ends, however it ends.
with_own_mounts() {
    [ "$(id -u)" = 0 ] || cannot "it needs root"
    [ -z "${OWN_MOUNTS:-}" ] || return 0
    unshare --mount true 2>/dev/null || cannot "no mounts are allowed here"
    OWN_MOUNTS=yes exec unshare --mount --propagation private bash "$@"
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
    export MINUTES=${MINUTES:-14}
    timeout $((60 * MINUTES + 60)) unshare --mount --propagation private bash tests/systemd/boot.sh "$@" || status=$?
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

# A root of the small system $1 (jammy, noble, bookworm or arm64) in .cache/$1/root, made once. It has no Python: what is tested
# brings it.
make_root() {
    local out=.cache/$1 suite=$1 source=() include='systemd,systemd-sysv,dbus,udev,ca-certificates'
    case $1 in
        arm64) suite=bookworm source=(--arch=arm64) ;;
        jammy | noble) source=(--components=main,universe) ;;
    esac
    [ -f "$out/made" ] || {
        rm -rf "$out/root" && mkdir -p "$out"
        case $suite in
            bookworm) debootstrap --variant=minbase "${source[@]}" "--include=$include" $suite "$out/root" ;;
            *) debootstrap --variant=minbase "${source[@]}" "--include=$include" $suite "$out/root" \
                http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/gutsy ;;
        esac >"$out/debootstrap.log" 2>&1 || cannot "no $suite can be made here ($out/debootstrap.log says why)"
        [ ! -e "$out/root/usr/bin/python3" ] || cannot "the fresh root has a Python already"
        touch "$out/made"
    }
}

# That root with a fresh layer over it in .cache/$1/installed, ready for an installation: /proc, names and authorities of this
# machine. release_layer gives it back; the layer stays in .cache/$1/upper.
fresh_layer() {
    release_layer "$1"
    rm -rf ".cache/$1/upper" ".cache/$1/work" && mkdir -p ".cache/$1/upper" ".cache/$1/work" ".cache/$1/installed"
    mount_layer "$1"
}

# The same with the layer as it was left.
mount_layer() {
    local out=.cache/$1
    mount -t overlay overlay -o "lowerdir=$out/root,upperdir=$out/upper,workdir=$out/work" "$out/installed" \
        || cannot "this file system carries no overlay"
    mount --bind /proc "$out/installed/proc"
    cp /etc/resolv.conf "$out/installed/etc/resolv.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$out/installed/etc/ssl/certs/ca-certificates.crt"
}

release_layer() {
    local place
    for place in ".cache/$1/installed/proc" ".cache/$1/installed"; do
        ! mountpoint -q "$place" || umount "$place"
    done
}

# This source tree in /src of a root, as an administrator would have it.
copy_source() {
    rm -rf "$1/src" && mkdir "$1/src"
    git ls-files -z --cached --others --exclude-standard -- ':!tests' | xargs -0 tar -c --ignore-failed-read 2>/dev/null | tar -x -C "$1/src"
}

# Run a command in the root $1 as somebody would who has just logged in; words with = before it are its environment.
run_in() {
    local root=$1
    shift
    chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$@"
}
