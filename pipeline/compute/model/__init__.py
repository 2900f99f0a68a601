"""The model: layers, head, adapter, quantization, and the formats of weights.

Only Tunix's definitions of models are used. `tunix/__init__.py` would import its trainers as well,
with pandas and the clients of TensorBoard and clouds: a second and 140 MB in each process. So the
package is entered as if it had been imported.
"""

from __future__ import annotations

import importlib.util
import sys

if "tunix" not in sys.modules:
    _spec = importlib.util.find_spec("tunix")
    assert _spec is not None
    sys.modules["tunix"] = importlib.util.module_from_spec(_spec)
