"""Compares what the chips computed with the CPU; the bounds follow from bfloat16's own error.

The CPU computes everything twice: in float32, which counts as exact, and in the chips' bfloat16.
The difference of these two is the rounding error of the program itself. The chips round, too, at
other places: they add in another order, and they also round the factors of float32 products. So
their errors are not the same numbers, but of the same size: their root mean square may be `RMS`
times that of the CPU's bfloat16, their largest value `LARGEST` times the CPU's largest. A wrong
mask or scale, or a chip that computes wrongly, is outside of this by far; so is one wrong number,
unless its error is as small as that of rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]
"""Results by name, float32."""

RMS, LARGEST = 2.5, 4.0
"""Allowed errors as multiples of those of the CPU's bfloat16. Two roundings of each factor in place
of one make errors at most twice as large; the largest of hundreds varies by half of itself."""
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Difference:
    """The difference of the chips' results from the exact ones.

    Attributes:
        name: of the array that is closest to its bound, or farthest outside of it.
        largest: its largest error.
        bound: of the largest error.
        rms: root mean square of its errors.
        rms_bound: of the root mean square.
    """

    name: str
    largest: float
    bound: float
    rms: float
    rms_bound: float

    @property
    def share(self) -> float:
        """The error as a share of its bound; infinite if it is no number."""
        share = max(self.largest / self.bound, self.rms / self.rms_bound)
        return share if np.isfinite(share) else np.inf

    @property
    def is_small(self) -> bool:
        """Whether the error is within its bounds."""
        return self.share <= 1

    def __str__(self) -> str:
        return (
            f"{self.name}: largest error {self.largest:.2g} of {self.bound:.2g} allowed, root mean "
            f"square {self.rms:.2g} of {self.rms_bound:.2g}"
        )


def difference(chips: Arrays, *, rounded: Arrays, exact: Arrays) -> Difference:
    """The difference of the array that is closest to its bound, or farthest outside of it.

    The chips' results in bfloat16, the CPU's in bfloat16, and the CPU's in float32.
    """
    found = (
        error_difference(chips[name] - value, allowed=rounded[name] - value, name=name)
        for name, value in exact.items()
    )
    return max(found, key=lambda one: one.share)


def error_difference(error: np.ndarray, *, allowed: np.ndarray, name: str) -> Difference:
    """The difference by the chips' errors and those of the CPU, perhaps for other tokens."""
    return Difference(
        name,
        largest=float(np.abs(error).max()),
        bound=LARGEST * max(float(np.abs(allowed).max()), _TINY),
        rms=_rms(error),
        rms_bound=RMS * max(_rms(allowed), _TINY),
    )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
