#!/bin/sh
# bootstrap.sh [--yes] [--wheels DIR] [--tpu | --cuda13 | --cpu] [--no-doctor] [CONFIG]
#
# From a copy of this project to an environment in .venv: finds a Python or installs one, installs
# the pinned requirements and the project, and runs `python -m launch.doctor [CONFIG]`.
#
#   --yes                   install a missing Python without asking
#   --wheels DIR            install without network, from a folder that `make wheelhouse` filled
#   --tpu, --cuda13, --cpu  whose requirements; by default those of a TPU where the host has chips
#   --no-doctor             only install
#
# Needs no make. A second call installs what has changed. PYTHON=/path/to/python chooses a Python.
# Exit status: the doctor's, 1 if something could not be installed, 2 for unknown arguments.
set -eu

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }

# As Ray counts them: device files of Google's driver, or groups of VFIO with a PCI device of Google.
has_chips() {
    for device in /dev/accel[0-9]* /dev/vfio/[0-9]*; do
        case $device in
            /dev/accel*) [ ! -e "$device" ] || return 0 ;;
            *) ! grep -qsx 0x1ae0 "/sys/kernel/iommu_groups/${device##*/}"/devices/*/vendor || return 0 ;;
        esac
    done
    return 1
}

# stale STAMP SOURCE: whether SOURCE is to be installed. The stamps in .venv are the Makefile's.
stale() { ! [ -e ".venv/$1" ] || [ -n "$(find -L "$2" -newer ".venv/$1")" ]; }

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-virtualenv "$@"
}

# install_python VERSION...: installs the first, from apt any of them, with what the host has: uv,
# conda or apt. That needs consent: --yes, or an answer on a terminal.
install_python() {
    sudo=''
    [ "$(id -u)" -eq 0 ] || sudo='sudo '
    if command -v uv >/dev/null; then
        command="uv python install $1"
    elif command -v conda >/dev/null; then
        command="conda create --yes --prefix '$PWD/.python' python=$1"
    elif command -v apt-get >/dev/null; then
        packages=$(printf " || ${sudo}apt-get install --yes python%s-venv" "$@")
        command="${sudo}apt-get update && { ${packages# || }; }"
    else
        echo "None of uv, conda and apt is here to install a Python. With another Python that has pip," \
            "call python3 -m pip install --user uv; then repeat with ~/.local/bin on PATH." >&2
        exit 1
    fi
    if [ -z "$yes" ]; then
        printf 'This installs a Python:\n  %s\n' "$command" >&2
        if ! [ -t 0 ]; then
            echo "Call it, then repeat; or repeat with --yes." >&2
            exit 1
        fi
        printf 'Call it? [y/N] ' >&2
        read -r answer || answer=''
        case $answer in [yY]*) ;; *) exit 1 ;; esac
    fi
    echo "$command"
    DEBIAN_FRONTEND=noninteractive sh -c "$command" </dev/null || {
        echo "That failed. With another Python that has pip: python3 -m pip install --user uv;" \
            "then repeat with ~/.local/bin on PATH." >&2
        exit 1
    }
    case $command in
        uv*) PYTHON=$(uv python find "$1") ;;
        conda*) PYTHON=$PWD/.python/bin/python ;;
    esac
    export PYTHON="${PYTHON:-}"
}

yes='' wheels='' extra='' doctor=yes config=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --yes) yes=yes ;;
        --no-doctor) doctor='' ;;
        --cpu | --tpu | --cuda13) extra=${1#--} ;;
        --wheels)
            wheels=$(cd "${2:-/nowhere}" 2>/dev/null && pwd) || {
                echo "--wheels ${2:-}: no such folder; make wheelhouse fills one" >&2
                exit 2
            }
            shift
            ;;
        -*) echo "$1: unknown" >&2; usage >&2; exit 2 ;;
        /*) config=$1 ;;
        *) config=$PWD/$1 ;;
    esac
    shift
done

cd "$(dirname "$0")/.."
if ! [ -w . ]; then
    echo "$PWD is read-only; copy it to a folder that is not" >&2
    exit 1
fi

versions="3.12 3.11"
if [ -n "$wheels" ]; then
    versions=''
    for version in 3.12 3.11; do
        # numpy has a wheel for each version of Python.
        set -- "$wheels"/numpy-*-cp3"${version#3.}"-*.whl
        [ ! -e "$1" ] || versions="$versions $version"
    done
    if [ -z "$versions" ]; then
        echo "$wheels has no wheels for Python 3.12 or 3.11; make wheelhouse fills such a folder" >&2
        exit 1
    fi
    set -- --no-index --find-links "$wheels"
fi

# shellcheck disable=SC2086 # words of their own
if ! sh launch/make_venv.sh .venv $versions; then
    [ -z "${PYTHON:-}" ] || exit 1
    install_python $versions
    sh launch/make_venv.sh .venv $versions
fi

if [ -z "$extra" ]; then
    if has_chips; then extra=tpu; else extra=cpu; fi
fi
case $extra in
    cpu) stamp=.runtime requirements=requirements.txt ;;
    *) stamp=.$extra requirements=requirements-$extra.txt ;;
esac
if stale "$stamp" "$requirements"; then
    echo "Installing $requirements into .venv; the first time takes some minutes"
    pip_install "$@" --requirement "$requirements"
    touch ".venv/$stamp" .venv/.runtime
fi
if stale .package pyproject.toml; then
    pip_install "$@" --no-deps --editable .
    touch .venv/.package
fi

[ -n "$doctor" ] || exit 0
status=0
.venv/bin/python -m launch.doctor ${config:+"$config"} || status=$?
if [ "$extra" = tpu ]; then
    echo "Compute on the chips themselves, in some minutes: make test-accelerator"
fi
exit "$status"
