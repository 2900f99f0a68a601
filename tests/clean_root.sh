#!/bin/sh
# clean_root.sh FOLDER [bookworm]: tries launch/bootstrap.sh in a new Debian of that suite in FOLDER.
#
# Without Python and without consent it prints the command and fails; with --yes apt installs a
# Python; without network, in a network namespace of its own, it installs from wheelhouse/ (`make
# wheelhouse-tpu` first, with a Python of the suite's version). Both times the demo runs some steps,
# and the second time a device file stands for a TPU chip.
# Needs root, debootstrap and unshare.
set -eu

root=$1
suite=${2:-bookworm}
cd "$(dirname "$0")/.."

# enter [--net] COMMAND...: runs a command there, with its own /proc and /dev; --net without network.
enter() {
    network=''
    if [ "$1" = --net ]; then
        network=--net
        shift
    fi
    # shellcheck disable=SC2016 # expanded inside
    unshare --mount --pid --fork $network sh -eu -c '
        mount -t proc proc "$0/proc"
        mount -t tmpfs tmpfs "$0/dev"
        mkdir "$0/dev/shm"
        for node in "null 3" "zero 5" "random 8" "urandom 9"; do
            mknod -m 666 "$0/dev/${node% *}" c 1 "${node#* }"
        done
        [ -z "$CHIP" ] || touch "$0/dev/accel0"
        ! command -v ip >/dev/null || ip link set lo up
        exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
    ' "$root" "$@" </dev/null
}

check() {
    echo "== $1"
    shift
    "$@" || { echo "failed: $*" >&2; exit 1; }
}

demo() {
    enter "$@" /project/.venv/bin/gemma-grpo train /project/configs/demo.toml --run.dir /root/runs \
        --budget.steps 4 --data.validation.limit 20 --data.test.limit 20
    [ -e "$root/root/runs/demo/summary.json" ]
    rm -r "$root/root/runs"
}

refused_without_consent() {
    if said=$(enter /project/launch/bootstrap.sh --cpu 2>&1); then
        return 1
    fi
    printf '%s\n' "$said" | grep 'apt-get install --yes python3'
}

CHIP=''
export CHIP
debootstrap --variant=minbase --include=ca-certificates "$suite" "$root"
# pip and apt reach the network as here.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
mkdir "$root/project"
git ls-files --cached --others --exclude-standard | tar -cf - -T - | tar -xf - -C "$root/project"

check "no Python, no consent" refused_without_consent
check "no Python, --yes" enter /project/launch/bootstrap.sh --yes --no-doctor
check "the demo" demo
rm -r "$root/project/.venv"
cp -r wheelhouse "$root/"
CHIP=yes
check "no network, a chip" enter --net /project/launch/bootstrap.sh --wheels /wheelhouse --no-doctor
check "libtpu" test -e "$root/project/.venv/.tpu"
check "the demo without network" demo --net
