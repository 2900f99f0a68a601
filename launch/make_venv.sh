#!/bin/sh
# make_venv.sh DIR [3.12]: an empty virtual environment in DIR, from the Python that find_python.sh
# finds.
#
# One that is there and runs is kept, unless $PYTHON names another interpreter than made it.
# DIR/.python is written last, so what an interruption leaves behind is made anew.
set -eu

venv=$1
shift
find_python=$(dirname "$0")/find_python.sh

if [ -f "$venv/.python" ] && "$venv/bin/python" -I -c "import pip" 2>/dev/null; then
    [ -n "${PYTHON:-}" ] || exit 0
    python=$("$find_python" "$@")
    [ "$python" != "$(cat "$venv/.python")" ] || exit 0
else
    python=$("$find_python" "$@")
fi

echo "Making $venv with $python"
rm -rf "$venv"
"$python" -m venv "$venv" || {
    echo "$python cannot make a virtual environment; name another with PYTHON=..." >&2
    exit 1
}
printf '%s\n' "$python" >"$venv/.python"
