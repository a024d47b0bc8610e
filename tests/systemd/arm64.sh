#!/usr/bin/env bash
# In an arm64 root where the installer has run (run_arm64.sh): `without` torch and not booted; `booted`, with torch and a model; as
# a `board`, with what stands in for JetPack.
set -euo pipefail
say() { printf '==> %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*"; [ ! -d /run/systemd/system ] || journalctl --no-pager -u edged | tail -20; exit 1; }
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

say "$(uname -m), $(. /etc/os-release && echo "$PRETTY_NAME"), $(/opt/edged/bin/python --version), $1"
[ "$(uname -m)" = aarch64 ] || fail "this is no arm64"

if [ "$1" = board ]; then
    say "PyCUDA was compiled for this machine, and edged knows the board"
    modules=$(find /opt/edged -path '*/pycuda/_*.so' -name '*aarch64*')
    grep -q _driver <<<"$modules" || fail "no module of PyCUDA: $modules"
    for module in $modules; do
        said=$(LD_LIBRARY_PATH=/usr/local/cuda/lib64 ldd "$module")
        [[ $said != *"not found"* ]] || fail "$module: $said"
    done
    edgectl doctor >/tmp/doctor || true
    cat /tmp/doctor
    grep -q "36.4.3" /tmp/doctor || fail "doctor does not name the release"
    grep -Eq "tensorrt +10.3.0" /tmp/doctor || fail "doctor does not see TensorRT"
    exit
fi

say "Everything that was installed imports"
/opt/edged/bin/python - "$1" <<'PY'
import importlib
import importlib.metadata
import pkgutil
import sys
from pathlib import Path

missing = {"tensorrt", "pycuda", "cuda"} | ({"torch"} if sys.argv[1] == "without" else set())
site = Path(sys.prefix) / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
names = {
    name
    for name, owners in importlib.metadata.packages_distributions().items()
    if (site / name).exists() or (site / f"{name}.py").exists() or list(site.glob(f"{name}.*.so"))
    if name.isidentifier() and owners != ["pip"]
}
for package in ("edged", "plugins_trt"):
    module = importlib.import_module(package)
    names |= {found.name for found in pkgutil.walk_packages(module.__path__, f"{package}.")}
left_out = []
for name in sorted(names - {"edged.__main__", "edged.cli.__main__"}):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in missing, (name, error)
        left_out.append(name)
foreign = [path for path in site.rglob("*.so") if path.read_bytes()[18:20] != b"\xb7\x00"]
assert not foreign, foreign
print(f"    {len(names) - len(left_out)} modules; {len(left_out)} ask for {', '.join(sorted(missing))}: {', '.join(left_out)}")
assert len(names) > 200, names
PY

if [ "$1" = without ]; then
    say "What the service asks of it"
    [ "$(readlink /usr/local/bin/edgectl)" = /opt/edged/bin/edgectl ] || fail "edgectl is not on the path"
    [ -f /etc/systemd/system/edged.service.d/10-hardware.conf ] || fail "the Jetson's drop-in is missing"
    grep -q '^SupplementaryGroups=video render' /etc/systemd/system/edged.service.d/10-hardware.conf || fail "another drop-in"
    [ "$(stat -c '%U %a' /var/lib/edged/models)" = "edged 755" ] || fail "the models' folder: $(stat -c '%U %a' /var/lib/edged/models)"
    said=$(systemd-analyze verify --man=no /etc/systemd/system/edged.service 2>&1 | grep edged || true)
    [ -z "$said" ] || fail "systemd-analyze verify: $said"
    say "Without torch a model that needs it is refused by name, and doctor has the remedy"
    status=0 said=$(/opt/edged/bin/edged --config /etc/edged/edged.yaml --check 2>&1) || status=$?
    [[ "$status $said" == "78 "*"needs torch, which is not installed"* ]] || fail "status $status: $said"
    status=0 said=$(edgectl doctor --config /etc/edged/edged.yaml) || status=$?
    [[ "$status $said" == "1 "*torch* ]] || fail "status $status: $said"
    exit
fi

property() { systemctl show --property "$1" --value edged; }
until_it() { # what is waited for, the command; emulation takes its time
    local end=$((SECONDS + 1200)) what=$1
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "$what"
        sleep 0.5
    done
}
answers() {
    local answer
    answer=$(edgectl generate "The capital of France is" -n 4 -t 0)
    say "The capital of France is$answer"
    [[ $answer == *Paris* ]] || fail "another answer than on x86-64"
}

say "The demo model behind the unit"
cat >/etc/edged/edged.yaml <<'YAML'
models: [{name: smollm, path: /model, context_length: 512, threads: 2}]
YAML
# The one thing of the unit that emulation cannot do: credentials are mounted with system calls that qemu-user has not.
printf '[Service]\nLoadCredential=\n' >/etc/systemd/system/edged.service.d/99-emulated.conf
systemctl daemon-reload
began=$SECONDS
systemctl start edged || fail "it does not start"
[ "$(property StatusText)" = "serving smollm" ] || fail "it says $(property StatusText)"
say "READY after $((SECONDS - began)) s"
edgectl status
answers
grep -q '^Groups:.* ' "/proc/$(property MainPID)/status" || fail "it is in no further group"
[ "$(stat -c '%U %G %a' /run/edged/edged.sock)" = "edged edged 660" ] || fail "the socket: $(stat -c '%U %G %a' /run/edged/edged.sock)"
edgectl doctor --config /etc/edged/edged.yaml || fail "doctor found faults"

say "Reload"
printf 'log: {level: debug}\n' >>/etc/edged/edged.yaml
systemctl reload edged
until_it "the reload is not told" bash -c '[[ $(systemctl show --property StatusText --value edged) == *"reloaded: log.level"* ]]'

say "A killed engine is back, with its reason in the status"
engine=$(edgectl status --json | /opt/edged/bin/python -c 'import json, sys; print(json.load(sys.stdin)["engine_pid"])')
kill -KILL "$engine"
until_it "the killed engine is still there" bash -c "! kill -0 $engine"
edgectl status --wait 20min >/tmp/status
grep -q "SIGKILL" /tmp/status || { cat /tmp/status; fail "the status does not say why"; }
[ "$(property NRestarts)" = 0 ] || fail "the daemon did not stay"

say "A frozen daemon is ended by the watchdog and is back"
kill -STOP "$(property MainPID)"
until_it "systemd does not end it" bash -c '[ "$(systemctl show --property NRestarts --value edged)" = 1 ]'
edgectl status --wait 20min >/dev/null
answers

say "Stopping"
systemctl stop edged
[ "$(property Result)" = success ] || fail "the stop's result is $(property Result)"
edgectl service uninstall --purge
[ ! -e /etc/systemd/system/edged.service ] || fail "the unit is left"
say "Done"
