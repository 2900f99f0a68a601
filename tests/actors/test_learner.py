"""The learner's process: which adapter it sends."""

from __future__ import annotations

import numpy as np

from actors.learner import LearnerActor
from pipeline.model import lora
from tests import tiny


def test_with_rollouts_drawn_ahead_it_also_sends_the_version_before():
    learner = tiny.learner(
        learner={"max_grad_norm": 1e6, "adam_b1": 0.9, "importance_cap": 1e3},
        plan={"placement": "split"},
        rollout={"ahead": "one"},
    )
    actor = LearnerActor(tiny.make_config())
    actor.learner = learner
    sent = {}
    for _ in range(2):
        (version, sha256), _ = actor.publish(which="current")
        sent[version] = sha256
        actor.update(tiny.make_rollouts([(3, 9), (14, 28)], advantages=[1.0, -1.0]))
    label, payload = actor.publish(which="previous")
    assert label == (1, sent[1])
    assert lora.sha256(payload) == sent[1] != sent[0]
    assert all(isinstance(value, np.ndarray) for value in payload.values())
