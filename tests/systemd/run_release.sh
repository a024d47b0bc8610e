#!/usr/bin/env bash
# Runs deploy/jetson/install.sh --without-gpu on a fresh Ubuntu of JetPack 6 (jammy, systemd 249, CPython 3.10) or JetPack 7
# (noble, systemd 255, CPython 3.12), boots it and tries the unit with the Jetson's drop-in there (release.sh). The engine
# is the tests' fake one: no torch. Needs the network; roots stay in .cache. $1: jammy or noble.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$0")/../.."
. tests/systemd/common.sh
with_own_mounts "$script" "$@"
suite=${1:?jammy or noble}
command -v systemd-nspawn >/dev/null || cannot "systemd-nspawn is missing; on Debian and Ubuntu: apt-get install systemd-container"
command -v debootstrap >/dev/null || cannot "debootstrap is missing; on Debian and Ubuntu: apt-get install debootstrap"

import_model .cache/booted/model
make_root "$suite"
trap 'release_layer "$suite"' EXIT
fresh_layer "$suite"
copy_source ".cache/$suite/installed"
run_in ".cache/$suite/installed" /src/deploy/jetson/install.sh --without-gpu
release_layer "$suite"

export SOURCE="$PWD" RESULT="$PWD/.cache/$suite/result" LOWER="$PWD/.cache/$suite/upper:$PWD/.cache/$suite/root" KEEP_UNITS=yes
COMMAND="bash tests/systemd/release.sh" boot --bind-ro="$SOURCE/.cache/booted/model:/model"
