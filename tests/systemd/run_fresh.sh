#!/usr/bin/env bash
# Installs the Debian package on a fresh Debian 12 (debootstrap, kept in .cache), starts its service under a booted systemd,
# upgrades, removes and purges it (fresh.sh): without torch and with it, or what the arguments name. Exit status 77: it cannot
# be done here.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
check_machine test-deb
command -v debootstrap >/dev/null || cannot "debootstrap is missing; on Debian and Ubuntu: apt-get install debootstrap"
[ "$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.11 ] \
    || cannot "Debian 12 has CPython 3.11, and this machine's package is for another"

out=.cache/fresh
mkdir -p "$out"
import_model .cache/booted/model
if [ ! -f "$out/made" ]; then
    rm -rf "$out/root"
    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,libgomp1 bookworm "$out/root" >"$out/debootstrap.log" 2>&1 \
        || cannot "no Debian 12 can be made here ($out/debootstrap.log says why)"
    touch "$out/made"
fi
export SOURCE="$PWD" RESULT="$PWD/$out/result" LOWER="$PWD/$out/root"
[ $# -gt 0 ] || set -- without with
for kind in "$@"; do
    rm -rf "$out/package" && mkdir "$out/package"
    without=()
    [ $kind = with ] || without=(--without torch)
    .venv/bin/python deploy/deb/build.py --output "$out/package" --compression none "${without[@]}"
    COMMAND="bash tests/systemd/fresh.sh $kind" boot --bind-ro="$SOURCE/$out/package:/package" --bind-ro="$SOURCE/.cache/booted/model:/model"
done
