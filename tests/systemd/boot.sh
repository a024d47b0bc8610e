#!/usr/bin/env bash
# Inside a private mount namespace (run_booted.sh): overlay, unit of the tests, boot.
set -euo pipefail
mount -t tmpfs -o mode=755 tmpfs /run 2>/dev/null || { echo "the systemd tests did not run: no mounts are allowed here"; exit 77; }
mkdir -p /run/systemd /run/layer
mount -t tmpfs -o size=4G tmpfs /run/layer
mkdir /run/layer/{upper,work,root}
mount -t overlay overlay -o lowerdir=/,upperdir=/run/layer/upper,workdir=/run/layer/work /run/layer/root \
    || { echo "the systemd tests did not run: this file system carries no overlay"; exit 77; }
root=/run/layer/root
rm -rf "${root:?}/etc/systemd/system" "${root:?}/var/log/journal"
mkdir -p "$root/etc/systemd/system/booted.target.wants"
cat >"$root/etc/systemd/system/booted.target" <<'UNIT'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
UNIT
arguments=""
[ $# = 0 ] || arguments=$(printf ' %q' "$@")
cat >"$root/etc/systemd/system/booted-tests.service" <<UNIT
[Unit]
After=basic.target
[Service]
Type=oneshot
WorkingDirectory=/srv/edged
Environment=HOME=/root EDGED_BOOTED=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/bash -c '$SOURCE/.venv/bin/python -m pytest -p no:cacheprovider --durations=5 tests/systemd/booted$arguments >/result/output 2>&1; echo \$? >/result/status'
ExecStopPost=/bin/systemctl poweroff --no-block
TimeoutStartSec=14min
UNIT
ln -s ../booted-tests.service "$root/etc/systemd/system/booted.target.wants/"
ln -s booted.target "$root/etc/systemd/system/default.target"
systemd-nspawn -q -D "$root" --keep-unit --register=no --boot \
    --bind-ro="$SOURCE:/srv/edged" --bind="$RESULT:/result" >"$RESULT/console" 2>&1
