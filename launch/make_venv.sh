#!/bin/sh
# make_venv.sh DIR [VERSION...]: makes an empty virtual environment in DIR with the Python from
# find_python.sh.
#
# A working environment is kept, unless $PYTHON names a different interpreter than its own.
# DIR/.python is written last, so that an interrupted environment is made again.
set -eu

venv=$1
shift
find_python=$(dirname "$0")/find_python.sh

if [ -f "$venv/.python" ] && "$venv/bin/python" -I -c "import pip" 2>/dev/null; then
    [ -n "${PYTHON:-}" ] || exit 0
    python=$(sh "$find_python" "$@")
    [ "$python" != "$(cat "$venv/.python")" ] || exit 0
else
    python=$(sh "$find_python" "$@")
fi

echo "Making $venv with $python"
rm -rf "$venv"
"$python" -m venv "$venv" || {
    echo "$python cannot make a virtual environment; set another one with PYTHON=..." >&2
    exit 1
}
printf '%s\n' "$python" >"$venv/.python"
