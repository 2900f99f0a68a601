#!/bin/sh
# install_python.sh [--yes] VERSION...: installs a CPython of one of these versions (3.12, 3.11) with
# what the host has, uv, conda or apt, and prints its path.
#
# That needs consent: --yes, or an answer on a terminal. Without either it prints the command that
# would do it, with exit status 1. If a command fails, the next kind of installer is tried.
set -eu

yes=''
if [ "${1:-}" = --yes ]; then
    yes=yes
    shift
fi
cd "$(dirname "$0")/.."
wanted=$(printf '%s or ' "$@")
wanted=${wanted% or }

# attempt COMMAND: calls it, with consent; its output goes to stderr.
attempt() {
    if [ -z "$yes" ]; then
        printf 'This installs a Python %s:\n  %s\n' "$wanted" "$1" >&2
        if ! [ -t 0 ]; then
            echo "Call it, then repeat; or repeat with --yes." >&2
            exit 1
        fi
        printf 'Call it? [y/N] ' >&2
        read -r answer || answer=''
        case $answer in
            [yY]*) ;;
            *) exit 1 ;;
        esac
    fi
    echo "$1" >&2
    sh -c "$1" >&2 </dev/null && return
    echo "That failed: $1" >&2
    return 1
}

# The command for apt; nothing without root, or if apt has lists without a wanted version.
apt_command() {
    sudo=''
    [ "$(id -u)" -eq 0 ] || sudo="$(command -v sudo) " || return 0
    packages=''
    for version in "$@"; do
        if apt-cache show "python$version-venv" || ! apt-cache show python3; then
            packages="${packages:+$packages || }apt-get install --yes python$version-venv"
        fi >/dev/null 2>&1
    done
    [ -z "$packages" ] || echo "${sudo}sh -c 'export DEBIAN_FRONTEND=noninteractive;" \
        "apt-get update && { $packages; }'"
}

# Those that need no root come first.
if command -v uv >/dev/null && attempt "uv python install $1"; then
    uv python find "$1"
    exit
fi
if command -v conda >/dev/null && attempt "conda create --yes --prefix '$PWD/.python' python=$1"; then
    echo "$PWD/.python/bin/python"
    exit
fi
if command -v apt-get >/dev/null; then
    command=$(apt_command "$@")
    if [ -n "$command" ] && attempt "$command"; then
        exec sh launch/find_python.sh "$@"
    fi
fi
echo "Neither uv, conda nor apt installs a Python $wanted here. With another Python that has pip, call" \
    "python3 -m pip install --user uv; then repeat with ~/.local/bin on PATH." >&2
exit 1
