#!/bin/sh
# audit.sh FILE...: searches pinned requirements for known vulnerabilities, with pip-audit at
# osv.dev. Without an answer from there it says so, with exit status 0.
set -eu

# Ids of vulnerabilities that are accepted: they have no fix, and do not concern this project.
# Each with its reason.
accepted=

# shellcheck disable=SC2046 # the options are words of their own
set -- $(printf ' -r %s' "$@") $(for id in $accepted; do printf ' --ignore-vuln %s' "$id"; done)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if found=$(.venv/bin/python -m pip_audit --vulnerability-service osv --no-deps --disable-pip \
    --progress-spinner off "$@" 2>"$log"); then
    tail -n 1 "$log"
elif [ -n "$found" ]; then
    printf '%s\n' "$found"
    echo "known vulnerabilities: update (make lock ARGS=\"-P NAME\"); where there is no fix, add the" \
        "id to 'accepted' in launch/audit.sh" >&2
    exit 1
else
    echo "not searched for known vulnerabilities: $(tail -n 1 "$log" | cut -c 1-120)"
fi
