"""Options of a sampler's programs; what they compute is tested with the engine."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.model.sharding import replicated
from tests import tiny


@pytest.mark.parametrize(("mib", "vmem_mib"), [(63, 32), (64, 48)])
def test_an_instruction_gets_more_vmem_if_a_ring_is_too_large_to_be_read_ahead(
    mib: int, vmem_mib: int
):
    policy = tiny.policy()
    ring = jax.ShapeDtypeStruct((mib, 2**20), jnp.int8, sharding=replicated(policy.mesh))
    programs = DecodePrograms(policy, tiny.make_config(), tiny.VOCABULARY)
    options = programs._tpu_options(SimpleNamespace(caches=((ring, ring),)))
    assert options == {"xla_tpu_scoped_vmem_limit_kib": str(1024 * vmem_mib)}
