#!/bin/sh
# find_python.sh [3.12]: prints the path of a working CPython 3.11 or 3.12 (with the argument: 3.12
# only) that can make virtual environments.
#
# If $PYTHON is set, it is used or refused, never replaced. Otherwise the first working one of $names
# anywhere on PATH is used; shims that exist but fail are skipped.
set -euf

oldest=${1:-3.11}
wanted="$oldest or 3.12"
[ "$oldest" != 3.12 ] || wanted=3.12
names="python3.12 python3.11 python3 python"
tried=""

# Runs on any Python version; its output on failure is shown to the user. In an activated virtual
# environment, which may be the one to be replaced, it prints the base interpreter.
probe='
import os, sys
version = sys.version_info[:2]
if not (3, int(sys.argv[1].split(".")[1])) <= version <= (3, 12):
    print("is Python %d.%d" % version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("has no venv module (on Debian: apt install python%d.%d-venv)" % version)
    sys.exit(1)
print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
'

try() {
    if answer=$("$1" -I -c "$probe" "$oldest" 2>/dev/null </dev/null) && [ -n "$answer" ]; then
        printf '%s\n' "$answer"
        exit 0
    fi
    tried="$tried
  $1: ${answer:-does not run}"
}

search() {
    found=""
    saved_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$saved_ifs
        if [ -x "${folder:-.}/$1" ] && [ ! -d "${folder:-.}/$1" ]; then
            found=yes
            try "${folder:-.}/$1"
        fi
    done
    IFS=$saved_ifs
    [ -n "$found" ] || tried="$tried
  $1: not on PATH"
}

case "${PYTHON:-}" in
    "") for name in $names; do search "$name"; done ;;
    */*) try "$PYTHON" ;;
    *) search "$PYTHON" ;;
esac

printf '%s\n' >&2 \
    "No Python $wanted that runs and can make virtual environments. Tried:$tried" \
    "Install one, or set it: make test PYTHON=/path/to/python3.12"
exit 1
