"""A sampler's compiled programs, and what they take of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from pipeline.compute.decode.state import DecodeState
from pipeline.compute.model.footprint import program_bytes, result_bytes


@dataclass(frozen=True)
class Compact:
    """Programs that keep some of the slots.

    Layer by layer, so that beside the caches there is never more than a small copy of one layer's.

    Attributes:
        rest: of everything but the caches.
        rings: of keys and values of one layer, by their shape.
    """

    rest: jax.stages.Compiled
    rings: Mapping[tuple[int, ...], jax.stages.Compiled]

    def __call__(self, state: DecodeState, kept: jax.Array) -> DecodeState:
        """These slots of each device, numbered on it; takes the caches of `state`."""
        small, caches = self.rest(replace(state, caches=()), kept), []
        for ring in state.caches:
            caches.append(self.rings[ring[0].shape](ring, kept))
            for array in ring:
                array.delete()
        return replace(small, caches=tuple(caches))


@dataclass(frozen=True)
class Compiled:
    """A sampler's programs.

    Attributes:
        empty: makes the state with no rollout in any slot.
        prefill: reads prompts; by bucket.
        fill: puts newcomers into slots, after a prefill of this bucket; takes the state.
        segment: decodes; by slots; takes the state.
        compact: keeps some of the slots; by how many; takes the state of the next larger number.
    """

    empty: jax.stages.Compiled
    prefill: Mapping[int, jax.stages.Compiled]
    fill: Mapping[int, jax.stages.Compiled]
    segment: Mapping[int, jax.stages.Compiled]
    compact: Mapping[int, Compact]

    def needs(self, weights: int) -> dict[str, int]:
        """Bytes of each device beside base and adapter, at the fullest moment of each program.

        The slots are there all along, and prompts that were read wait while others decode or read.

        Args:
            weights: bytes of each device that base and adapter take.
        """
        slots, waiting = result_bytes(self.empty), max(map(result_bytes, self.prefill.values()))
        named = {
            "segment": (self.segment, waiting - weights),
            "prefill": (self.prefill, waiting + slots - weights),
            "fill": (self.fill, 0),
        }
        return {
            f"{name} {size}": program_bytes(program) + beside
            for name, (programs, beside) in named.items()
            for size, program in programs.items()
        }
