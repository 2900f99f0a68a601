#!/usr/bin/env bash
# Submits a run to a Ray cluster as a job: see `launch/submit.sh --help`, which is launch/submit.py.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${GEMMA_GRPO_PYTHON:-$project/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
case "$python" in
    /*) ;;
    *) python=$PWD/$python ;;
esac
# The current folder is not on Python's path: its modules may have the same names as the project's.
PYTHONSAFEPATH=1 PYTHONPATH=$project exec "$python" -m launch.submit "$@"
