"""Promise 7 in compiled programs; the programs are those of the compute.aot tests."""

from __future__ import annotations

from pipeline.compute.aot.hlo import Module, parse
from tests.pipeline.compute.aot.test_hlo import text
from tests.whole_logits import whole_logits


def names(module: Module, **settings) -> set[str]:
    return {buffer.name for buffer in whole_logits(module, vocab=4096, **settings)}


def test_promise_7_whole_logits_are_found_in_any_shape():
    module = parse(text("blocks"))
    assert names(module, model=(256,), most=10) == set()
    # 16 positions x 512 entries are as many as the vocabulary x 2.
    assert names(module, model=(256,), most=2) == set()
    assert names(module, model=(256,), most=1) == {"fusion.9", "get-tuple-element.110"}
    line = "  %bitcast.21 = "
    for dims, is_found in (
        ("4096,64", True),
        ("64,4096", True),
        ("8,512,64", True),
        ("262144", True),
        ("8,63,512", False),  # the allowed number
        ("64,16,256", False),  # hidden states
        ("4096,256,1", False),  # the embedding itself
        ("4096,2,256", True),  # but not two embeddings
    ):
        other = text("blocks").replace(line, f"  %odd = f32[{dims}]{{0}} custom-call()\n{line}")
        assert ("odd" in names(parse(other), model=(256,), most=63)) == is_found, dims
