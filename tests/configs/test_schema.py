"""The schema's validators and derived numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import pytest

from configs.alarms import THRESHOLDS
from configs.base import parse_duration_s
from configs.budget import Budget, parse_instant
from configs.learner import Variant
from configs.mismatch import MismatchBounds

from .conftest import load, overrides
from .test_load import mistakes

CONFLICTS = [
    # settings in the notation of `overrides`; the key, and a part of the refusal
    ("budget.steps=none", "budget: set steps, time or until"),
    ("budget.time=1h", "budget.time: excludes budget.steps"),
    ("budget.steps=none; .time=9x", "budget.time: '9x' is not a duration"),
    ("data.train.split=train", "data.train.split: is no slice of a file; write for example"),
    ("data.test=0.2; data.test.limit=5; .subset=a", "data.test.subset: has no effect with share;"),
    ("data.test.split=none", "data.test.path: is not a file (.jsonl, .ndjson, .json, .csv, .tsv,"),
    ("data.answer_pattern=#### .+", "data.answer_pattern: needs a group"),
    ("prompt.template=hello", "prompt.template: contains no column"),
    ('prompt.template={question} {"v": {"a": 1}}', 'prompt.template: {"v": {"a": 1}} is no'),
    ("prompt.template={question:>5}", "prompt.template: converts or formats {question}; write"),
    ("prompt.template={a", "prompt.template: write {{ and }} for braces"),
    ("prompt.answer_open=<reasoning>", "prompt.answer_open: equals another tag"),
    ("prompt.answer=boxed; prompt.reasoning_close=]", "prompt.reasoning_close: has no effect with"),
    ("prompt.answer=completion; prompt.thinking=true", 'prompt.answer: "completion" begins with'),
    ("rewards.functions.1.name=correct", "rewards.functions: two share the name correct"),
    ("rollout.stop_tokens=[]", "rollout.stop_tokens: no completion could end"),
    ('rollout.forbidden_tokens=["<eos>"]', "rollout.forbidden_tokens: <eos>: also in stop_tokens"),
    ("plan.row_tokens=47", "plan.row_tokens: the longest sequence, 48 tokens; nearest valid: 48"),
    ("plan.platform=gpu; .slots=none", "plan.slots: is required on a gpu without plan.gpu and"),
    (
        "plan.slot_buckets=[2,40,7]; .sampler_devices=2",
        "plan.slot_buckets: multiples of 2 below slots = 32; nearest valid: [2]",
    ),
    ("plan.slots=none; .slot_buckets=[8]", "plan.slot_buckets: has no effect without plan.slots"),
    ("eval.temperature=1e-30", "eval.temperature: must be 0, or at least 0.01; nearest valid"),
    ("plan.gpu=l4", 'plan.gpu: has no effect without plan.platform = "gpu"; remove it'),
    ("plan.attention=splash", 'plan.attention: = "tpu", not "cpu"; nearest valid: "blocked"'),
    (
        "plan.platform=gpu; .per_layer_embeddings=host",
        'plan.per_layer_embeddings: "host" is not supported on gpu; nearest valid: "chips"',
    ),
    ("plan.learner_devices=4; .fsdp=3; .tp=2", "plan.learner_devices: x tp = 6; nearest valid: 6"),
    ("plan.sampler_devices=3; .sampler_tp=2", "plan.sampler_devices: = 2; nearest valid: 2 or 4"),
    ("plan.platform=tpu; .learner_devices=6", "plan.learner_devices: nearest valid: 1 or 4 or 8"),
    ("plan.placement=colocated; .sampler_tp=2", "plan.sampler_tp: has no effect in colocated"),
    ("plan.placement=auto; .samplers=1", "plan.samplers: needs a plan.placement that is set, and"),
    (
        "plan.platform=tpu; .placement=auto; .learner_devices=24",
        "plan.learner_devices: must be a power of two; nearest: 16",
    ),
    (
        "plan.rollout_weights=merged; model.quantization=nf4",
        'plan.rollout_weights: model.quantization = "none", not "nf4"; nearest valid: "shared"',
    ),
    (
        "plan.rollout_weights=int8_matmul; model.dtype=float32",
        'learner.importance_cap: weights; nearest valid: 2.0, or plan.rollout_weights = "shared"',
    ),
    ("learner.decay_steps=5", "learner.decay_steps: has no effect with a constant"),
    ("learner.schedule=linear; .warmup_steps=10", "learner.warmup_steps: nearest valid: 9"),
    ("budget.steps=none; .until=tomorrow", "budget.until: 'tomorrow' is not a date and time;"),
    (
        "rollout.min_prompts_per_step=1",
        "rollout.min_prompts_per_step: has no effect with budget.steps",
    ),
    (
        "budget.steps=none; .time=1h; rollout.min_prompts_per_step=99",
        "rollout.min_prompts_per_step: must be at most prompts_per_step; nearest valid: 4",
    ),
    (
        (
            "budget.steps=none; .time=1h; rollout.min_prompts_per_step=1; "
            ".dynamic_sampling=capped; .max_prompts_per_step=12"
        ),
        'rollout.min_prompts_per_step: needs rollout.dynamic_sampling = "off"',
    ),
    (
        (
            "budget.steps=none; .time=1h; rollout.min_prompts_per_step=1; .ahead=one; "
            "learner.importance_cap=2"
        ),
        'rollout.min_prompts_per_step: needs rollout.ahead = "off"',
    ),
    ("plan.prompt_buckets=[8,16]", "plan.prompt_buckets: nearest valid: [8]"),
    ("rollout.overlong_tokens=33", "rollout.overlong_tokens: max_new_tokens; nearest valid: 32"),
    (
        "rollout.overlong_tokens=8; rewards.functions.0.name=overlong",
        "rewards.functions: is the name of the part of rollout.overlong_tokens",
    ),
    ("rollout.cut_off=0.9", 'rollout.cut_off: has no effect with rollout.partial = "off"'),
    ("rollout.partial=drop; .cut_off=0.99", "rollout.cut_off: in a step; nearest valid: 0.96"),
    ("rollout.partial=drop", "rollout.partial: needs rollout.cut_off, e.g. 0.9"),
    ("rollout.partial=keep; .cut_off=0.7", "rollout.partial: needs importance weights; set"),
    ("rollout.max_prompts_per_step=12", "rollout.max_prompts_per_step: has no effect with"),
    ("rollout.dynamic_sampling=capped", "rollout.dynamic_sampling: needs rollout.max_prompts"),
    (
        "rollout.dynamic_sampling=capped; .max_prompts_per_step=4",
        "rollout.max_prompts_per_step: must be above prompts_per_step; nearest valid: 5",
    ),
    (
        "rollout.dynamic_sampling=capped; .max_prompts_per_step=12; .partial=drop; .cut_off=0.5",
        'rollout.dynamic_sampling: "drop" ends steps without them; nearest valid: "off"',
    ),
    ("rollout.ahead=one", "rollout.ahead: needs importance weights; set learner.importance_cap"),
    (
        "rollout.ahead=one; learner.importance_cap=2; plan.placement=colocated",
        'rollout.ahead: needs plan.placement = "split"',
    ),
    ("learner.clip_epsilon=0.1", "learner.clip_epsilon: where the ratio is 1"),
    ("learner.kl=topk", "learner.kl: has no effect with learner.kl_coef = 0"),
    ("learner.kl_coef=0.1; .kl_top_k=32", "learner.kl_top_k: has no effect without learner.kl ="),
    ("learner.teacher=runs/t", "learner.teacher: learner.distill_coef = 0; set that"),
    ("learner.distill_coef=1", "learner.distill_coef: needs learner.teacher"),
    ("eval.every_steps=5", "eval.every_steps: has no effect without data.validation; remove it"),
    ("eval.metric=corect", 'eval.metric: "correct", of exact_answer, reward, correct, format'),
    ("rewards.functions.0.name=reward", 'rewards.functions: "reward" is a value of eval.metric of'),
    ("eval.metric=correct; .extraction=boxed", "eval.extraction: has no effect with eval.metric ="),
    ("data.train.path=none", "data.train.path: missing; a source needs path"),
    (
        "data.validation.path=none; .limit=8",
        "data.validation.path: missing; a source needs path or",
    ),
    (
        'run.fork=a; .phases=["sft", "grpo"]; sft.train=s.jsonl; .steps=1',
        'run.fork: goes with phases = ["grpo"] only',
    ),
    ("wandb.mode=disabled; .entity=me", 'wandb.entity: has no effect with wandb.mode = "disabled"'),
    ('alarms.stop=["validation_falls"]', 'alarms.stop: "validation_falls" has no effect without'),
    ('alarms.off=["kl"]', 'alarms.off: "kl" has no effect with learner.kl_coef = 0'),
    ('alarms.stop=["excluded", "trunctation"]', "alarms.stop.1: nearest: 'truncation'"),
]


@pytest.mark.parametrize(("settings", "refusal"), CONFLICTS)
def test_promise_8_conflicts_are_refused(small: Path, settings: str, refusal: str) -> None:
    (line,) = mistakes(small, *overrides(settings))
    where, _, told = line.partition(": ")
    key, _, what = refusal.partition(": ")
    assert where in {"command line", str(small)}
    assert told.removeprefix("--").split(":")[0].split(" = ")[0] == key
    assert what in told


@pytest.mark.parametrize(
    "settings",
    [
        'alarms.off=["excluded"]',
        'alarms.stop=["kl"]; learner.kl_coef=0.01',
        'alarms.stop=["validation_falls"]; data.validation.path=v.jsonl; eval.every_steps=2',
    ],
)
def test_settings_with_an_effect_are_accepted(small: Path, settings: str) -> None:
    load(small, settings)


KEEP = "rollout.cut_off=0.7; .partial=keep; learner.importance_cap=2"
FREE_ROWS = "plan.row_tokens=none; .micro_batch_tokens=none"
GIVEN_LOSS = "learner.updates_per_batch=2; .clip_epsilon=0.1; .advantage=rloo; .token_weights=token"
TIME = "budget.steps=none; .time=1h"
INT8 = "learner.importance_cap=2; plan.rollout_weights=int8"
BOUNDS = {
    "": MismatchBounds(probe=1e-3, mean_stop=1e-4, p999=1e-3),
    INT8: MismatchBounds(probe=0.14, mean_stop=0.1, p999=1.5),
    f"{INT8}; plan.kv_cache=int8": MismatchBounds(probe=0.2, mean_stop=0.15, p999=2.0),
    "mismatch.probe=0.1; .mean_stop=0.2": MismatchBounds(probe=0.1, mean_stop=0.2, p999=1e-3),
}
BOXED = "rewards.functions.0.args.extraction=boxed"
FUNCTION = "rewards.functions.0.function"
DERIVED: list[tuple[str, Mapping[str, object]]] = [
    # settings in the notation of `overrides`; values
    (
        "plan.prompt_buckets=[8]; learner.schedule=cosine",
        {"prompt_buckets": (8, 16), "row_tokens": 48, "micro_batch_rows": 8, "decay_steps": 10},
    ),
    ("plan.placement=colocated; .learner_devices=8", {"plan.devices_per_sampler": 8}),
    ("plan.slots=none", {"plan.planned_sizes": ("slots",)}),
    # A decay without a known end follows the clock.
    (f"{TIME}; learner.schedule=linear", {"plans_decay": True}),
    (f"{TIME}; learner.schedule=linear; .decay_steps=5", {"plans_decay": False}),
    (TIME, {"plans_decay": False, "budget.time_s": 3600}),
    # Prompts are shared where that saves a tenth. Prompts of 8 tokens and completions of 11.2 on
    # average: groups of 8 save 7 of 19.2 tokens, and one of them takes 97.6.
    (FREE_ROWS, {"shares_prefix": True, "row_tokens": 98}),
    (f"{FREE_ROWS}; learner.share_prefix=false", {"shares_prefix": False, "row_tokens": 48}),
    # 7 of 69.6, but not of 71: completions of 0.35 x 176 or 180.
    (f"{FREE_ROWS}; rollout.max_new_tokens=176", {"shares_prefix": True, "row_tokens": 501}),
    (f"{FREE_ROWS}; rollout.max_new_tokens=180", {"shares_prefix": False, "row_tokens": 196}),
    (
        f"{FREE_ROWS}; rollout.max_new_tokens=180; learner.share_prefix=true",
        {"shares_prefix": True, "row_tokens": 512},
    ),
    # A row holds the longest sequence, and is not much longer if that is long.
    (f"{FREE_ROWS}; rollout.group_size=2", {"shares_prefix": True, "row_tokens": 80}),
    (
        f"{FREE_ROWS}; rollout.max_prompt_tokens=700; .max_new_tokens=1000",
        {"shares_prefix": True, "row_tokens": 2048},
    ),
    (
        f"{FREE_ROWS}; rollout.max_prompt_tokens=2000; .max_new_tokens=1000",
        {"shares_prefix": True, "row_tokens": 3000},
    ),
    # Kept partial rollouts have prompt buckets of every length.
    (f"{KEEP}; plan.prompt_buckets=[8]", {"prompt_buckets": (8, 16, 32, 48)}),
    (
        f"{KEEP}; rollout.max_new_tokens=1; plan.row_tokens=17; .micro_batch_tokens=374",
        {"prompt_buckets": (16, 17)},
    ),
    # A loss has the settings of its paper; configured ones replace them.
    ("learner.loss=grpo", {"learner.variant": Variant(0.2, 0.2, "grpo", "sequence")}),
    (GIVEN_LOSS, {"learner.variant": Variant(0.1, 0.1, "rloo", "token")}),
    (f"{GIVEN_LOSS}; .loss=dapo", {"learner.variant.clip_high": 0.28}),
    (f"{GIVEN_LOSS}; .clip_epsilon_high=0.3", {"learner.variant.clip_high": 0.3}),
    # The metric: as set, else the correctness reward, else exact_answer.
    ("", {"metric": "exact_answer", "uses_rewards": False, "has_accuracy_reward": False}),
    ("eval.metric=format", {"uses_rewards": True, "has_accuracy_reward": False}),
    ("eval.metric=overlong; rollout.overlong_tokens=8", {"uses_rewards": True}),
    (BOXED, {"metric": "correct", "has_accuracy_reward": True, "extraction": "boxed"}),
    (
        f"{FUNCTION}=rewards.numeric:numeric_answer",
        {"metric": "correct", "has_accuracy_reward": True},
    ),
    (f"{FUNCTION}=mine.py:correct", {"metric": "exact_answer", "has_accuracy_reward": False}),
    (f"{BOXED}; eval.extraction=tags", {"metric": "exact_answer", "extraction": "tags"}),
    # Evaluations find answers as rewards do.
    ("prompt.answer=last_line", {"extraction": "last_line"}),
    ("prompt.answer=last_line; eval.extraction=boxed", {"extraction": "boxed"}),
    # Bounds of the mismatch depend on the number format.
    *((settings, {"mismatch_bounds": bounds}) for settings, bounds in BOUNDS.items()),
]


@pytest.mark.parametrize(("settings", "values"), DERIVED)
def test_derived_values(small: Path, settings: str, values: Mapping[str, object]) -> None:
    config = load(small, settings)
    assert {name: attrgetter(name)(config) for name in values} == values


def test_a_prompt_has_the_smallest_bucket_that_holds_it(small: Path) -> None:
    config = load(small, f"{KEEP}; plan.prompt_buckets=[8]")
    assert [config.prompt_bucket(size) for size in (3, 16, 17, 47)] == [8, 16, 32, 48]


def test_each_alarm_has_a_threshold_with_a_direction() -> None:
    excluded, falls = THRESHOLDS["excluded"], THRESHOLDS["correct_falls"]
    assert [excluded.exceeds(value) for value in (0.4, 0.5, 0.6)] == [False, False, True]
    assert [falls.exceeds(value) for value in (0.4, 0.5, 0.6)] == [True, False, False]


# --- durations and deadlines of budgets


@pytest.mark.parametrize(
    ("text", "seconds"), [("9h", 32_400), ("1h30m", 5_400), ("90s", 90), ("1d1s", 86_401)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "9", "h", "0h", "1m1h", "-1h", "1.5h", "1h 30m", "٣h"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write for example '9h'"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    "text", ["2026-11-22T18:00:00+01:00", "2026-11-22T17:00Z", "2026-11-22 12:00-05:00"]
)
def test_an_instant_is_the_same_in_every_time_zone(text: str) -> None:
    assert Budget(until=text).until_s == 1_795_366_800


def test_an_instant_without_an_offset_is_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ+02:00")  # POSIX: two hours behind
    time.tzset()
    try:
        assert parse_instant("2026-11-22T15:00").timestamp() == 1_795_366_800
    finally:
        monkeypatch.undo()
        time.tzset()
