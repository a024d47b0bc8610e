#!/usr/bin/env bash
# On a booted Ubuntu where the installer has run (run_release.sh): the unit under that systemd.
set -euo pipefail
say() { printf '==> %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*"; systemctl status --no-pager edged || true; journalctl --no-pager -u edged | tail -20; exit 1; }
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
property() { systemctl show --property "$1" --value edged; }
python() { /opt/edged/bin/python "$@"; }
configure() {
    cat >/etc/edged/edged.yaml <<YAML
models: [{name: smollm, path: /model, context_length: 512, threads: 1}]
watchdog: {step_timeout: 4s}
${1:-}
YAML
}
within() { # seconds, what is waited for, the command
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "$what"
        sleep 0.1
    done
}
says() { [[ $(property StatusText) == *"$1"* ]]; }

say "$(. /etc/os-release && echo "$PRETTY_NAME"), $(systemctl --version | head -1), $(python --version)"
unit=/etc/systemd/system/edged.service
[ -f "$unit" ] && [ -f "$unit.d/10-hardware.conf" ] || fail "the installer has put no unit in place"
cat >"$unit.d/99-fake.conf" <<'UNIT'
[Service]
ExecStart=
ExecStart=/opt/edged/bin/python /srv/edged/tests/daemon/fake_model_daemon.py --config /etc/edged/edged.yaml
Environment='FAKE_ENGINE={"step_seconds": 0.01}'
UNIT
systemctl daemon-reload
said=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep edged || true)
[ -z "$said" ] || fail "systemd-analyze verify: $said"
rating=$(systemd-analyze security --no-pager edged.service | sed -n 's/.*exposure level for edged.service: \([0-9.]*\).*/\1/p')
say "exposure $rating"
awk -v value="$rating" 'BEGIN { exit !(value != "" && value <= 2.0) }' || fail "the exposure is $rating"

configure
systemctl start edged
says "serving smollm" || fail "it does not say that it serves"
edgectl status
python - <<'PY'
from edged.client import Client
with Client() as client:
    assert client.generate([5, 6, 7], max_tokens=3, temperature=0.0, ignore_eos=True).answer().finished
PY
say "groups of the daemon: $(ps -o supgrp= -p "$(property MainPID)" 2>/dev/null || grep Groups "/proc/$(property MainPID)/status")"

say "Reload"
configure "log: {level: debug}"
systemctl reload edged
within 10 "the reload is not told" says "reloaded: log.level"

say "A frozen daemon is ended by the watchdog and is back"
kill -STOP "$(property MainPID)"
began=$SECONDS
within 30 "it does not come back" bash -c '[ "$(systemctl show --property NRestarts --value edged)" = 1 ] && edgectl status'
say "back after $((SECONDS - began)) s"

say "A killed daemon is back"
kill -KILL "$(property MainPID)"
within 20 "it does not come back" bash -c '[ "$(systemctl show --property NRestarts --value edged)" = 2 ] && edgectl status'

say "Stopping drains"
python - >/tmp/stream <<'PY' &
import sys
from edged.client import Chunk, Client
with Client() as client:
    for event in client.generate([5, 6, 7], max_tokens=300, temperature=0.0, ignore_eos=True):
        if isinstance(event, Chunk):
            print("chunk", flush=True)
    print("finished", event.usage.generated_tokens, flush=True)
PY
stream=$!
within 10 "no stream" grep -q chunk /tmp/stream
systemctl stop edged
wait $stream
grep -q "finished 300" /tmp/stream || fail "the stream was cut off: $(tail -1 /tmp/stream)"
[ "$(property Result)" = success ] || fail "the stop's result is $(property Result)"

say "Credentials"
mkdir -p /etc/credstore
/opt/edged/bin/edgectl token robot --scopes infer -o /root/robot.token >/etc/credstore/edged.tokens
chmod 600 /etc/credstore/edged.tokens
if [ "$(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')" -lt 250 ]; then # wants full paths
    printf '[Service]\nLoadCredential=edged.tokens:/etc/credstore/edged.tokens\n' >"$unit.d/50-keys.conf"
    systemctl daemon-reload
fi
configure "listen: {unix: /run/edged/edged.sock, tcp: '127.0.0.1:50051', tokens: /run/credentials/edged.service/edged.tokens}"
systemctl start edged
! edgectl status --address 127.0.0.1:50051 >/dev/null 2>&1 || fail "tcp is open"
python - <<'PY'
from edged.client import Client, Credentials
with Client("127.0.0.1:50051", credentials=Credentials(token_file="/root/robot.token")) as client:
    assert client.generate([5, 6, 7], max_tokens=3, temperature=0.0, ignore_eos=True).answer().finished
PY

say "A refused configuration is not tried again"
systemctl stop edged
configure "memory: {budget: 300MiB}"
! systemctl start edged 2>/dev/null || fail "it started"
[ "$(property ActiveState) $(property ExecMainStatus) $(property NRestarts)" = "failed 78 0" ] || fail "another end"
says "300.00 MiB" || fail "the status does not say why"
rm "$unit.d/99-fake.conf"
edgectl service uninstall --purge
[ ! -e "$unit" ] || fail "the unit is left"
say "Done"
