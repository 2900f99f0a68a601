#!/bin/sh
# find_python.sh [VERSION...]: prints the path of a working CPython of one of these versions, by
# default 3.12 and 3.11, that can make virtual environments.
#
# If $PYTHON is set, it is used or refused, never replaced. Otherwise the first working one of $names
# anywhere on PATH is used; shims that exist but fail are skipped.
# shellcheck disable=SC2086 # the versions are words of their own
set -euf

versions=${*:-3.12 3.11}
wanted=$(printf '%s or ' $versions)
wanted=${wanted% or }
names="$(printf 'python%s ' $versions)python3 python"
tried=""

# Runs on any Python version; its output on failure is shown to the user. In an activated virtual
# environment, which may be the one to be replaced, it prints the base interpreter.
probe='
import os, sys
version = "%d.%d" % sys.version_info[:2]
if version not in sys.argv[1:]:
    print("is Python " + version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("has no venv module (on Debian: apt install python%s-venv)" % version)
    sys.exit(1)
print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
'

try() {
    if answer=$("$1" -I -c "$probe" $versions 2>/dev/null </dev/null) && [ -n "$answer" ]; then
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
    "Install one, as launch/bootstrap.sh can, or name it: PYTHON=/path/to/python${versions%% *}"
exit 1
