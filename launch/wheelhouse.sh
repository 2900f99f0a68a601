#!/bin/sh
# wheelhouse.sh REQUIREMENTS: fills wheelhouse/ with what `launch/bootstrap.sh --wheels wheelhouse`
# installs on a host without network: the wheels of the pinned requirements, the project's own, and
# setuptools, which an editable installation needs.
#
# The wheels are for this machine's platform and for the Python of find_python.sh; $PYTHON chooses
# another one. Wheels of several Pythons can share the folder.
set -eu

requirements=$1
cd "$(dirname "$0")/.."

python=$(sh launch/find_python.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
"$python" -m venv "$scratch"

echo "Filling wheelhouse/ from $requirements for $python; the first time takes some minutes"
# A wheel is built from this folder's build/, which keeps modules that were removed since.
rm -rf build
"$scratch/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir wheelhouse --requirement "$requirements" "setuptools>=77" .
echo "wheelhouse/ has $(find wheelhouse -name '*.whl' | wc -l) wheels, $(du -sh wheelhouse | cut -f 1)." \
    "Copy this folder to the other host, and call: launch/bootstrap.sh --wheels wheelhouse"
