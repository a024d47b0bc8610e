#!/usr/bin/env bash
# On a fresh Debian, booted (run_fresh.sh): the package from its installation to its purge. $1: with or without (torch).
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # as on an administrator's shell
say() { printf '==> %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*"; systemctl status --no-pager edged || true; journalctl --no-pager -u edged | tail -20; exit 1; }
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
property() { systemctl show --property "$1" --value edged; }

# Every file that could be the package's; not what dpkg, systemd and the clock write for themselves.
files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/tmp -o -path /var/log -o -path /var/lib/dpkg \
        -o -path /var/lib/systemd -o -path /var/cache/ldconfig -o -path /result -o -path /srv -o -path /package -o -path /model \) -prune \
        -o -print | sort
}
package=$(echo /package/*.deb)
files >/tmp/before

say "Installing $(basename "$package"), torch: $1"
dpkg --install "$package"
[ "$(systemctl is-enabled edged || true)" = disabled ] || fail "the service is enabled without being asked"
[ "$(stat -c '%U %a' /var/lib/edged/models)" = "edged 750" ] || fail "the models' folder"
/usr/bin/edgectl --version
[ -z "$(dpkg --verify edged)" ] || fail "dpkg finds changed files: $(dpkg --verify edged | head -5)"
cp -r /model /var/lib/edged/models/smollm
chown -R edged:edged /var/lib/edged/models
cat >/etc/edged/edged.yaml <<'YAML'
models: [{name: smollm, path: /var/lib/edged/models/smollm, context_length: 512, threads: 1}]
YAML

if [ "$1" = without ]; then
    say "A model that needs torch is refused at once, and doctor says so"
    ! systemctl start edged 2>/dev/null || fail "it started"
    [ "$(property ExecMainStatus) $(property NRestarts)" = "78 0" ] || fail "another status"
    shown=$(systemctl status --no-pager edged || true)
    [[ $shown == *"needs torch, which is not installed"* ]] || fail "the status does not say why"
    ! edgectl doctor --config /etc/edged/edged.yaml >/tmp/doctor || fail "doctor is content"
    grep -q "a model runs on it (executor: torch or auto)" /tmp/doctor || { cat /tmp/doctor; fail "doctor does not name torch"; }
else
    say "A model that the service may not read is named, and doctor has the remedy"
    chown -R root:root /var/lib/edged/models/smollm
    chmod 700 /var/lib/edged/models/smollm
    ! systemctl start edged 2>/dev/null || fail "it started"
    [ "$(property ExecMainStatus) $(property NRestarts)" = "66 0" ] || fail "another status"
    [[ $(property StatusText) == *"/var/lib/edged/models/smollm"*"ermission denied"* ]] || fail "the status does not say why"
    edgectl doctor --config /etc/edged/edged.yaml >/tmp/doctor || true
    grep -q "chgrp -R edged /var/lib/edged/models/smollm" /tmp/doctor || { cat /tmp/doctor; fail "doctor has no remedy"; }
    chgrp -R edged /var/lib/edged/models/smollm && chmod -R g+rX /var/lib/edged/models/smollm
    say "The service serves"
    systemctl enable --now edged
    edgectl status
    edgectl generate "The capital of France is" -n 8 -t 0 || fail "no answer"
    edgectl doctor --config /etc/edged/edged.yaml || fail "doctor found faults"
    [ -z "$(find /opt/edged -user edged)" ] || fail "the service wrote beside its code"
    say "It reads its configuration again, without any program of procps"
    [ ! -e /bin/kill ] || fail "this root is not as small as it should be"
    printf 'log: {level: debug}\n' >>/etc/edged/edged.yaml
    systemctl reload edged
    for _ in $(seq 100); do [[ $(property StatusText) != *"reloaded: log.level"* ]] || break; sleep 0.1; done
    [[ $(property StatusText) == *"reloaded: log.level"* ]] || fail "the reload is not told: $(property StatusText)"
    say "The same package once more, as an upgrade"
    pid=$(property MainPID)
    dpkg --install "$package"
    [ "$(property ActiveState)" = active ] && [ "$(property MainPID)" != "$pid" ] || fail "the upgrade did not restart it"
    edgectl generate "The capital of France is" -n 8 -t 0 --wait 1min || fail "no answer after the upgrade"
fi

changed=/opt/edged/lib/python3.11/site-packages/edged/daemon.py
printf '\n' >>$changed
[[ $(dpkg --verify edged) == *"$changed"* ]] || fail "dpkg does not see that $changed was changed"

say "Removing keeps the configuration"
dpkg --remove edged
[ "$(property ActiveState)" != active ] || fail "the service runs on"
[ -f /etc/edged/edged.yaml ] && [ -d /var/lib/edged/models/smollm ] || fail "configuration or models are gone"
[ ! -e /opt/edged ] || fail "/opt/edged is left: $(find /opt/edged | head -5)"
say "Purging leaves the models alone"
dpkg --install "$package" >/dev/null
dpkg --purge edged
files >/tmp/after
left=$(comm -13 /tmp/before /tmp/after | grep -v '^/var/lib/edged' || true)
[ -z "$left" ] || fail "left behind: $left"
[ -f /var/lib/edged/models/smollm/config.json ] || fail "the models are gone"
say "Without models nothing at all is left"
rm -rf /var/lib/edged
dpkg --install "$package" >/dev/null
dpkg --purge edged
[ "$(property ActiveState)" = inactive ] || fail "systemd remembers the unit as $(property ActiveState)"
files >/tmp/after
left=$(comm -13 /tmp/before /tmp/after)
[ -z "$left" ] || fail "left behind: $left"
gone=$(comm -23 /tmp/before /tmp/after)
[ -z "$gone" ] || fail "files of others are gone: $gone"
say "Done, torch: $1"
