#!/usr/bin/env bash
# Boots a file system below an overlay in memory and runs one command in it as a unit (run_booted.sh, run_fresh.sh); runs
# inside a private mount namespace. LOWER: the file system, COMMAND: the command, RESULT: the folder that takes its output
# and status, MINUTES: the time it has, KEEP_UNITS: keep the units that /etc has; the arguments are further options of
# systemd-nspawn.
set -euo pipefail
mount -t tmpfs -o mode=755 tmpfs /run 2>/dev/null || { echo "the systemd tests did not run: no mounts are allowed here"; exit 77; }
mkdir -p /run/systemd /run/layer
mount -t tmpfs -o size=4G tmpfs /run/layer
mkdir /run/layer/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=/run/layer/upper,workdir=/run/layer/work" /run/layer/root \
    || { echo "the systemd tests did not run: this file system carries no overlay"; exit 77; }
root=/run/layer/root
[ -n "${KEEP_UNITS:-}" ] || rm -rf "${root:?}/etc/systemd/system"
rm -rf "${root:?}/var/log/journal"
mkdir -p "$root/etc/systemd/system/booted.target.wants"
cat >"$root/etc/systemd/system/booted.target" <<'UNIT'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
UNIT
cat >"$root/etc/systemd/system/booted-tests.service" <<UNIT
[Unit]
After=basic.target
[Service]
Type=oneshot
WorkingDirectory=/srv/edged
Environment=HOME=/root EDGED_BOOTED=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/bash -c '$COMMAND >/result/output 2>&1; echo \$? >/result/status'
ExecStopPost=/bin/systemctl poweroff --no-block
TimeoutStartSec=${MINUTES}min
UNIT
ln -s ../booted-tests.service "$root/etc/systemd/system/booted.target.wants/"
ln -sf booted.target "$root/etc/systemd/system/default.target"
systemd-nspawn -q -D "$root" --keep-unit --register=no --boot \
    --bind-ro="$SOURCE:/srv/edged" --bind="$RESULT:/result" "$@" >"$RESULT/console" 2>&1
