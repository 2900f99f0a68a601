"""A model of two layers, with the files of the demo, in place of the one that actors load."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.model_actor import ModelActor
from pipeline.compute.model.policy import Params
from pipeline.compute.opening import OpenedModel
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests import tiny

DEMO = Path(__file__).parents[2] / "launch" / "demo" / "tiny_gemma3"


def opened() -> OpenedModel:
    """The model on this process's first device."""
    loading = Future[tuple[Params, float]]()
    loading.set_result((tiny.base(layers=2), 0.0))
    return OpenedModel(tiny.policy(layers=2), tiny.VOCABULARY, read_tokenizer(DEMO), loading)


def give_model(actor: ModelActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the actor the opened model; nothing is compiled."""
    monkeypatch.setattr("actors.model_actor.find_model", lambda _: DEMO)
    monkeypatch.setattr("actors.model_actor.open_tokenizer", lambda _: SimpleNamespace(path=DEMO))
    actor.opening = opened()
