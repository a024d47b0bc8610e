#!/usr/bin/env bash
# Runs deploy/jetson/install.sh --without-gpu on a fresh Ubuntu of JetPack 6 (jammy, systemd 249, CPython 3.10) or JetPack 7
# (noble, systemd 255, CPython 3.12), boots it and tries the unit with the Jetson's drop-in there (release.sh). The engine
# is the tests' fake one: no torch. Needs the network; roots stay in .cache. $1: jammy or noble.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
suite=${1:?jammy or noble}
[ "$(id -u)" = 0 ] || cannot "it needs root"
command -v systemd-nspawn >/dev/null || cannot "systemd-nspawn is missing; on Debian and Ubuntu: apt-get install systemd-container"
command -v debootstrap >/dev/null || cannot "debootstrap is missing; on Debian and Ubuntu: apt-get install debootstrap"

out=.cache/$suite root=.cache/$suite/root
mkdir -p "$out"
import_model .cache/booted/model
if [ ! -f "$out/made" ]; then
    rm -rf "$root"
    debootstrap --variant=minbase --components=main,universe --include=systemd,systemd-sysv,dbus,udev,python3,ca-certificates \
        "$suite" "$root" http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/gutsy >"$out/debootstrap.log" 2>&1 \
        || cannot "no Ubuntu $suite can be made here ($out/debootstrap.log says why)"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt" # this machine's own authorities, too
    touch "$out/made"
fi
rm -rf "$root/src" && mkdir "$root/src"
git ls-files -z --cached --others --exclude-standard -- ':!tests' | xargs -0 tar -c --ignore-failed-read 2>/dev/null | tar -x -C "$root/src"
mountpoint -q "$root/proc" || mount --bind /proc "$root/proc"
trap 'umount "$root/proc" 2>/dev/null || true' EXIT
chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt /src/deploy/jetson/install.sh --without-gpu
umount "$root/proc"

export SOURCE="$PWD" RESULT="$PWD/$out/result" LOWER="$PWD/$root" KEEP_UNITS=yes
COMMAND="bash tests/systemd/release.sh" boot --bind-ro="$SOURCE/.cache/booted/model:/model"
