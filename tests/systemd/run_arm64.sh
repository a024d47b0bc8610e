#!/usr/bin/env bash
# Runs deploy/jetson/install.sh --without-gpu on a fresh Debian 12 for arm64 under qemu-user, from a root without Python to the
# end, then once more over what is there with torch, and boots what came out of it (arm64.sh): the demo model behind the unit.
# At last the whole installer, as on a board: with what says that it is one, CUDA's headers from PyPI, and a package that only says it
# is tensorrt (tests/deploy/stand_in_base.py); it compiles PyCUDA. Needs the network; the fresh root stays in .cache. What the
# emulated board shows and what it cannot stands in docs/operations.md.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
with_own_mounts "$script" "$@"
command -v systemd-nspawn >/dev/null || cannot "systemd-nspawn is missing; on Debian and Ubuntu: apt-get install systemd-container"
command -v debootstrap >/dev/null || cannot "debootstrap is missing; on Debian and Ubuntu: apt-get install debootstrap"
binfmt=/proc/sys/fs/binfmt_misc rule=/usr/lib/binfmt.d/qemu-aarch64.conf
[ -f "$rule" ] || cannot "qemu for arm64 is missing; on Debian and Ubuntu: apt-get install qemu-user-static"

mounted="" registered=""
clean() {
    release_layer arm64 || true
    [ -z "$registered" ] || echo -1 >"$binfmt/qemu-aarch64" || true
    [ -z "$mounted" ] || umount "$binfmt" || true
}
trap clean EXIT
# The kernel runs programs for arm64 with qemu from here on; at the end it is as it was.
[ -f "$binfmt/register" ] || { mount -t binfmt_misc binfmt_misc "$binfmt" && mounted=yes; } || cannot "binfmt_misc cannot be mounted"
[ -f "$binfmt/qemu-aarch64" ] || { cat "$rule" >"$binfmt/register" && registered=yes; } || cannot "qemu cannot be registered"

import_model .cache/booted/model
make_root arm64
[ "$(chroot .cache/arm64/root uname -m)" = aarch64 ] || cannot "programs for arm64 do not run here"

fresh_layer arm64
installed=.cache/arm64/installed
copy_source $installed
run_in $installed /src/deploy/jetson/install.sh --without-gpu
run_in $installed bash -s without <tests/systemd/arm64.sh
# Over what is there, as an upgrade. It is the last torch whose wheel for arm64 brings no CUDA of servers.
echo "torch==2.8.0" >$installed/src/constraints-arm64.txt
run_in $installed PIP_CONSTRAINT=/src/constraints-arm64.txt /src/deploy/jetson/install.sh --without-gpu --with-torch
release_layer arm64

export SOURCE="$PWD" RESULT="$PWD/.cache/arm64/result" LOWER="$PWD/.cache/arm64/upper:$PWD/.cache/arm64/root" KEEP_UNITS=yes
COMMAND="bash tests/systemd/arm64.sh booted" MINUTES=60 boot --bind-ro="$SOURCE/.cache/booted/model:/model"

mount_layer arm64
.venv/bin/python tests/deploy/stand_in_base.py deploy/jetson/Containerfile.jetpack6 $installed .cache/containers
.venv/bin/python -c 'import sys; sys.path.insert(0, "tests"); from fixtures.boards import RELEASES; print(RELEASES["6.2"])' \
    >$installed/etc/nv_tegra_release
# Without optimizing, or the emulated compiler takes half an hour for PyCUDA.
run_in $installed PIP_CONSTRAINT=/src/constraints-arm64.txt CFLAGS='-O0 -g0' /src/deploy/jetson/install.sh
run_in $installed bash -s board <tests/systemd/arm64.sh
