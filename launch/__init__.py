"""Commands. Imported first, this package gives the user's folder its place on Python's path.

`python -m` puts the current folder first, where a user's `rewards.py` or `configs.py` would hide
the packages of the project; a console command leaves it out, and reward functions of a module in
it would not be found. In both cases it becomes the last.
"""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  # images of TPU hosts have older ones
    what = f"gemma-grpo needs Python 3.11 or later, and {sys.executable} is older"
    sys.exit(f"{what}: make install-dev, install-tpu or install-cuda13 makes an environment")

_CURRENT = Path.cwd()
if not sys.flags.safe_path and Path(__file__).resolve().parents[1] != _CURRENT:
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _CURRENT]
    sys.path.append(str(_CURRENT))
