#!/usr/bin/env bash
# Submits a run to a running Ray cluster as a job: launch.train with the same arguments.
#
#   launch/submit.sh [--no-wait] CONFIG.toml [--table.key VALUE ...]
#
# Uploads the project's source, the configuration and the modules of the current folder that the
# reward functions need (module:function), and nothing else: no runs, no weights, no data. Data,
# models and reward files (file.py:function) are read where they are, as they are when the job
# starts, so their folders must exist on the cluster's host. Keys (WANDB_API_KEY, HF_TOKEN, those of
# run.mirror) are never put into the job, because every user of the cluster can read its metadata:
# set them where Ray is started. The cluster is RAY_API_SERVER_ADDRESS, by default the one on this
# machine; its Python is GEMMA_GRPO_PYTHON, by default .venv/bin/python of this project.
set -euo pipefail

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --dry-run)
            echo "$argument: not possible for a job; use python -m launch.train" >&2
            exit 2
            ;;
    esac
done

wait_flag=()
if [ "${1:-}" = --no-wait ]; then
    wait_flag=(--no-wait)
    shift
fi
if [ -z "${1:-}" ]; then
    usage >&2
    exit 2
fi

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${GEMMA_GRPO_PYTHON:-$project/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
case "$python" in
    /*) ;;
    *) python=$PWD/$python ;;
esac

home=$PWD
config=$1
shift
case "$config" in
    /*) ;;
    *) config=$home/$config ;;
esac

upload=$(mktemp -d)
trap 'rm -rf "$upload"' EXIT
(cd "$project" && find configs rewards pipeline actors launch \
    \( -name '*.py' -o -name '*.toml' \) -print0 | tar --null -T - -cf -) | tar -xf - -C "$upload"
# The current folder is not on Python's path: its modules may have the same names as the project's.
name=$(PYTHONSAFEPATH=1 PYTHONPATH=$project "$python" -m launch.upload "$upload" "$config" "$@")

# Mistakes are reported here instead of in the job's log. The check runs in the upload folder, so that
# files missing there are found.
(cd "$upload" && unset PYTHONPATH && GEMMA_GRPO_HOME=$home GEMMA_GRPO_SUBMITTED=1 \
    PYTHONDONTWRITEBYTECODE=1 "$python" -m launch.train "$config" "$@" --dry-run >/dev/null)
if ! [ -f "$config" ]; then
    echo "$config is not a file; CONFIG.toml comes first" >&2
    exit 2
fi

# Clusters from `ray start` use token authentication, and `ray job submit` sends the token only with
# RAY_AUTH_MODE=token.
if [ -z "${RAY_AUTH_MODE:-}" ]; then
    token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -f "$token_file" ]; then
        export RAY_AUTH_MODE=token
    fi
    # Ray makes the file readable to everybody.
    if [ "$token_file" = "$HOME/.ray/auth_token" ] && [ -O "$token_file" ]; then
        chmod 600 "$token_file"
    fi
fi
export RAY_API_SERVER_ADDRESS=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
if ! "$python" - <<'EOF'
import os, sys, urllib.error, urllib.request

try:
    urllib.request.urlopen(os.environ["RAY_API_SERVER_ADDRESS"] + "/api/version", timeout=10)
except urllib.error.HTTPError:
    pass  # a server answers; the submission reports missing permissions
except (OSError, ValueError):
    sys.exit(1)
EOF
then
    echo "no Ray cluster answers at $RAY_API_SERVER_ADDRESS; start one with: ray start --head" \
        "(or set RAY_API_SERVER_ADDRESS)" >&2
    exit 2
fi

# By default Ray stops a job with SIGTERM to all its processes and kills them 3 seconds later, too
# early for a checkpoint.
runtime_env=$("$python" - "$home" <<'EOF'
import json
import sys

variables = {
    "GEMMA_GRPO_HOME": sys.argv[1],
    "RAY_JOB_STOP_WAIT_TIME_S": "600",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
print(json.dumps({"env_vars": variables}))
EOF
)

# Id and name contain the run's name; `ray job stop` takes the id, which is unique.
job=$name-$(date -u +%Y%m%d-%H%M%S)-$(printf %04x $RANDOM)
echo "submitting job $job; to stop it with a checkpoint:" \
    "${RAY_AUTH_MODE:+RAY_AUTH_MODE=$RAY_AUTH_MODE }ray job stop $job"

# `exec` makes the run the job's first process, so that signals reach it.
command="exec $(printf '%q ' "$python" -m launch.train submitted "$@")"
"$python" -m ray.scripts.scripts job submit ${wait_flag[@]+"${wait_flag[@]}"} \
    --submission-id "$job" --metadata-json "{\"job_name\": \"$name\"}" \
    --working-dir "$upload" --runtime-env-json "$runtime_env" -- bash -c "$command"
