#!/usr/bin/env bash
# Installs edged on a Jetson with JetPack 6.2 or 7.2: the board's own TensorRT, PyCUDA built against its CUDA, and a virtual
# environment of the system's interpreter in /opt/edged. Torch stays away unless asked for: the TensorRT executor needs none.
#
#   sudo deploy/jetson/install.sh [--with-torch] [--without-gpu] [--no-service] [--source FOLDER] [--dry-run]
#
# Power mode and clocks are not touched; the last lines say what there is to choose.
set -euo pipefail

PREFIX=/opt/edged
SOURCE=$(cd "$(dirname "$0")/../.." && pwd)
with_torch=no with_gpu=yes with_service=yes dry=no

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0"; }
say() { printf '==> %s\n' "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
run() { if [ "$dry" = yes ]; then printf '    %s\n' "$*"; else "$@"; fi; }

while [ $# -gt 0 ]; do
    case $1 in
        --with-torch) with_torch=yes ;;
        --without-gpu) with_gpu=no ;; # packaging alone: an emulated root, a build machine
        --no-service) with_service=no ;;
        --source) SOURCE=${2:?--source needs a folder}; shift ;;
        --dry-run) dry=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; die "unknown option $1" ;;
    esac
    shift
done

[ "$dry" = yes ] || [ "$(id -u)" = 0 ] || die "run it with sudo"
[ -f "$SOURCE/pyproject.toml" ] || die "$SOURCE is no source tree of edged; name one with --source"

# What board is this?
release="" file=${EDGED_RELEASE_FILE:-/etc/nv_tegra_release} # the variable is for tests
if [ -r "$file" ]; then
    release=$(sed -nE '1s/.*\bR([0-9]+)\b.*REVISION: ([0-9.]+).*/\1.\2/p' "$file")
fi
case $release in
    36.4.7) say "L4T $release (JetPack 6.2.1)"
        echo "    This release refuses large GPU allocations while the page cache is full (NvMap error 12)."
        echo "    Upgrade to L4T 36.5 (JetPack 6.2.2) when you can; edgectl doctor says more." ;;
    36.*) say "L4T $release (JetPack 6)" ;;
    39.*) say "L4T $release (JetPack 7.2)" ;;
    38.*) die "L4T $release is for Thor; this installer knows Orin (JetPack 6.2 and 7.2)" ;;
    "") [ "$with_gpu" = no ] || die "/etc/nv_tegra_release is missing: this is no Jetson; --without-gpu installs the rest" ;;
    *) die "L4T $release: edged needs JetPack 6.2 or 7.2" ;;
esac
[ "$(uname -m)" = aarch64 ] || [ "$dry" = yes ] || [ "$with_gpu" = no ] || die "this machine is $(uname -m), a Jetson is aarch64"

python=/usr/bin/python3 # TensorRT's module of JetPack is bound to it
version=""
check_python() {
    version=$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case $version in
        3.10 | 3.11 | 3.12 | 3.13) ;;
        *) die "$python is CPython $version; edged needs 3.10 to 3.13" ;;
    esac
}
[ ! -x $python ] || check_python # before anything is changed; images of CUDA come without one

say "System packages"
export DEBIAN_FRONTEND=noninteractive # a time zone must not be asked for where nobody answers
packages=(python3 python3-venv python3-dev build-essential libgomp1)
[ "$with_gpu" = no ] || packages+=(python3-libnvinfer)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    run apt-get update -qq
    run apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

[ -x $python ] || die "$python is missing: apt-get install python3"
check_python

say "Virtual environment in $PREFIX (CPython $version, with the system's packages behind it)"
if [ ! -x $PREFIX/bin/python ]; then
    run $python -m venv --system-site-packages $PREFIX
fi
pip=("$PREFIX/bin/python" -m pip --disable-pip-version-check install -q)

say "edged and what it needs$([ "$with_torch" = yes ] && echo ', with torch' || echo ', without torch')"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
SOURCE=$SOURCE WITH_TORCH=$with_torch $python - >"$requirements" <<'PY'
import os
import re

text = open(os.path.join(os.environ["SOURCE"], "pyproject.toml"), encoding="utf-8").read()
block = re.search(r"(?ms)^dependencies = \[\n(.*?)^\]", text)[1]
for name in re.findall(r'^\s*"([^"]+)"', block, re.M):
    if os.environ["WITH_TORCH"] == "yes" or not re.match(r"torch\b", name):
        print(name)
PY
[ "$dry" = no ] || sed 's/^/    pip: /' "$requirements"
run "${pip[@]}" -r "$requirements"
run "${pip[@]}" --no-deps "$SOURCE"

if [ "$with_gpu" = yes ]; then
    say "PyCUDA, built against the board's CUDA"
    [ -x /usr/local/cuda/bin/nvcc ] || [ "$dry" = yes ] || die "/usr/local/cuda/bin/nvcc is missing: apt-get install nvidia-jetpack"
    export CUDA_ROOT=/usr/local/cuda PATH=/usr/local/cuda/bin:$PATH
    export LIBRARY_PATH=/usr/local/cuda/targets/aarch64-linux/lib:/usr/lib/aarch64-linux-gnu/nvidia
    run "${pip[@]}" 'pycuda>=2025.1.2'
    if [ "$dry" = no ]; then
        $PREFIX/bin/python -c 'import tensorrt; print("    TensorRT", tensorrt.__version__)' \
            || die "tensorrt of JetPack cannot be imported by $PREFIX/bin/python: apt-get install --reinstall python3-libnvinfer"
        $PREFIX/bin/python -c 'import pycuda; print("    PyCUDA", pycuda.VERSION_TEXT)'
    fi
fi

if [ "$with_service" = yes ]; then
    say "The service"
    run $PREFIX/bin/edgectl service install --hardware jetson
    [ "$dry" = yes ] || ln -sf $PREFIX/bin/edgectl /usr/local/bin/edgectl
fi

say "Done"
[ "$dry" = yes ] || $PREFIX/bin/edgectl --version
cat <<'TEXT'
Not touched, and yours to choose (docs/operations.md):
  sudo nvpmodel -q             the power mode; -m ID changes it, ids stand in /etc/nvpmodel.conf
  sudo jetson_clocks --show    the clocks; without --show it pins them at the mode's highest
TEXT
