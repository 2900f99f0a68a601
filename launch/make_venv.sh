#!/bin/sh
# make_venv.sh DIR [VERSION...]: makes an empty virtual environment in DIR with a working CPython of
# one of these versions, by default 3.12 and 3.11.
#
# $PYTHON, if it is set, is used or refused, never replaced. Otherwise the first Python anywhere on
# PATH that works is used; shims that exist but fail are skipped. A working environment is kept,
# unless $PYTHON names a different interpreter than its own.
# shellcheck disable=SC2086 # the versions are words of their own
set -euf

venv=$1
shift
versions=${*:-3.12 3.11}
wanted=$(printf '%s or ' $versions)
wanted=${wanted% or }
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

# try PROGRAM: sets `python` to the path of its interpreter, if that works.
try() {
    if answer=$("$1" -I -c "$probe" $versions 2>/dev/null </dev/null) && [ -n "$answer" ]; then
        python=$answer
        return
    fi
    tried="$tried
  $1: ${answer:-does not run}"
    return 1
}

# search NAME: tries all programs of this name on PATH.
search() {
    found=""
    saved_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$saved_ifs
        if [ -x "${folder:-.}/$1" ] && [ ! -d "${folder:-.}/$1" ]; then
            found=yes
            try "${folder:-.}/$1" && return
        fi
    done
    IFS=$saved_ifs
    [ -n "$found" ] || tried="$tried
  $1: not on PATH"
    return 1
}

find_python() {
    case "${PYTHON:-}" in
        "") for name in $(printf 'python%s ' $versions) python3 python; do search "$name" && return; done ;;
        */*) try "$PYTHON" && return ;;
        *) search "$PYTHON" && return ;;
    esac
    printf '%s\n' >&2 \
        "No Python $wanted that runs and can make virtual environments. Tried:$tried" \
        "Install one, as launch/bootstrap.sh can, or name it: PYTHON=/path/to/python${versions%% *}"
    exit 1
}

# DIR/.python is written last, so that an interrupted environment is made again.
if [ -f "$venv/.python" ] && "$venv/bin/python" -I -c "import pip" 2>/dev/null; then
    [ -n "${PYTHON:-}" ] || exit 0
    find_python
    [ "$python" != "$(cat "$venv/.python")" ] || exit 0
else
    find_python
fi
echo "Making $venv with $python"
rm -rf "$venv"
"$python" -m venv "$venv" || {
    echo "$python cannot make a virtual environment; set another one with PYTHON=..." >&2
    exit 1
}
printf '%s\n' "$python" >"$venv/.python"
