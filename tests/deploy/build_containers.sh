#!/usr/bin/env bash
# Builds the container files of deploy/ with buildah and runs the images: each on a stand-in for its base (stand_in_base.py), since
# these tests do not reach NVIDIA's registry. A stand-in is a small Ubuntu or Debian for this machine's processor without Python,
# with CUDA's headers from PyPI, a package python3-libnvinfer that only says it is tensorrt, and what the base has that the
# container file takes away. Needs root and the network; roots stay in .cache. Arguments choose: jetpack6, jetpack7, rtx.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
with_own_mounts "$script" "$@"
for program in buildah debootstrap; do
    command -v $program >/dev/null || cannot "$program is missing; on Debian and Ubuntu: apt-get install $program"
done
import_model .cache/booted/model
[ $# -gt 0 ] || set -- jetpack6 jetpack7 rtx
out=$PWD/.cache/containers
mkdir -p "$out"
trap 'release_layer jammy; release_layer noble; release_layer bookworm' EXIT
# Nothing of the machine's own images is touched. No namespaces of a runtime: the steps run in a chroot.
export BUILDAH_ISOLATION=chroot
fail() { printf 'FAILED: %s\n' "$*"; exit 1; }
setting() { # of the image, one word a line
    .venv/bin/python -c "import json, sys; print(*json.load(open(sys.argv[1]))['Docker']['config']${1:-}, sep='\n')" "$out/image.json"
}
buildah() { command buildah --root "$out/storage" --runroot "$out/run" "$@"; }

for name in "$@"; do
    case $name in
        jetpack6) suite=jammy file=deploy/jetson/Containerfile.jetpack6 ;;
        jetpack7) suite=noble file=deploy/jetson/Containerfile.jetpack7 ;;
        rtx) suite=bookworm file=deploy/rtx/Containerfile ;;
        *) echo "$name is none of jetpack6, jetpack7, rtx" >&2; exit 2 ;;
    esac
    base=$(sed -n 's/^FROM //p' "$file")
    echo "==> $name: a stand-in for $base out of $suite"
    make_root $suite
    fresh_layer $suite
    .venv/bin/python tests/deploy/stand_in_base.py "$file" ".cache/$suite/installed" "$out"
    umount ".cache/$suite/installed/proc"
    container=$(buildah from scratch)
    cp -a ".cache/$suite/installed/." "$(buildah mount "$container")"
    buildah commit -q "$container" "$base" >/dev/null
    buildah rm "$container" >/dev/null
    release_layer $suite

    echo "==> $name: the build"
    context=()
    [ "$name" != jetpack7 ] || context=(--build-context "apt=$out/apt")
    # As docker does it: the file's own commands begin with `docker build`, and only docker's format has a HEALTHCHECK.
    buildah build --format docker --pull=never -q -t "edged:$name" -f "$file" "${context[@]}" .

    echo "==> $name: the image"
    container=$(buildah from --pull=never "edged:$name")
    place=$(buildah mount "$container")
    gone=(src root/.cache 'var/lib/apt/lists/*_Packages')
    [ "$name" != jetpack7 ] || gone+=('usr/local/cuda-*/compat*' 'etc/apt/sources.list.d/cuda-*sbsa*')
    for path in "${gone[@]}"; do
        [ -z "$(compgen -G "$place/$path")" ] || fail "the image carries /$path"
    done
    buildah inspect --type image "edged:$name" >"$out/image.json"
    mapfile -t entry < <(setting "['Entrypoint']")
    mapfile -t health < <(setting "['Healthcheck']['Test'][1:]")
    [ "$(setting "['User']" | tr -d '\n') ${entry[0]} ${health[0]}" = "edged /opt/edged/bin/edged /opt/edged/bin/edgectl" ] \
        || fail "the image's settings: $(setting)"
    # As its comment says: a user of the host, of whom the image has no entry, and his three folders.
    rm -rf "$out/host" && mkdir -p "$out"/host/{etc,lib,run}
    chown 12345:12345 "$out"/host/{lib,run}
    inside() {
        buildah run --user 12345:12345 -v "$out/host/etc:/etc/edged:ro" -v "$out/host/lib:/var/lib/edged" \
            -v "$out/host/run:/run/edged" -v "$PWD/.cache/booted/model:/model:ro" -v "$PWD/tests:/tests:ro" "$container" -- "$@"
    }
    cat >"$out/host/etc/edged.yaml" <<'YAML'
models: [{name: smollm, path: /model, context_length: 512, threads: 1}]
YAML
    inside /opt/edged/bin/python -c 'import tensorrt, pycuda; print("tensorrt", tensorrt.__version__, "pycuda", pycuda.VERSION_TEXT)'
    program=("${entry[@]}")
    if [ "$name" != rtx ]; then
        status=0 said=$(inside "${entry[@]}" --check 2>&1) || status=$?
        [[ "$status $said" == "78 "*"needs torch, which is not installed"* ]] || fail "status $status: $said"
        # The daemon itself runs, around the tests' engine.
        program=(env 'FAKE_ENGINE={}' /opt/edged/bin/python /tests/daemon/fake_model_daemon.py "${entry[@]:1}")
    fi
    inside "${program[@]}" >"$out/daemon.log" 2>&1 &
    daemon=$!
    inside "${health[@]}" --wait 2min || { tail "$out/daemon.log"; fail "it does not serve"; }
    inside "${health[@]}" >/dev/null || fail "its HEALTHCHECK does not pass"
    if [ "$name" = rtx ]; then
        answer=$(inside /opt/edged/bin/edgectl generate "The capital of France is" -n 8 -t 0)
        [[ $answer == *Paris* ]] || fail "another answer: $answer"
    fi
    kill -TERM "$(inside /opt/edged/bin/edgectl status --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["daemon_pid"])')"
    wait "$daemon" || fail "it ended with $?: $(tail -3 "$out/daemon.log")"
    [ -z "$(find "$out/host/run" -type s)" ] || fail "the socket is left"
    buildah rm "$container" >/dev/null
    buildah rmi --force "edged:$name" "$base" >/dev/null
done
echo "==> Done: $*"
