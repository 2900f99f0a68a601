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
# The project's wheel is made from build/, which would keep modules that are removed later.
trap 'rm -rf "$scratch" build' EXIT
trap 'exit 130' INT TERM
rm -rf build
"$python" -m venv "$scratch"

echo "Filling wheelhouse/ from $requirements for $python; the first time takes some minutes"
"$scratch/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir wheelhouse --requirement "$requirements" "setuptools>=77" .
echo "wheelhouse/ has $(find wheelhouse -name '*.whl' | wc -l) wheels, $(du -sh wheelhouse | cut -f 1)." \
    "Copy this folder to the other host, and call: launch/bootstrap.sh --wheels wheelhouse"
