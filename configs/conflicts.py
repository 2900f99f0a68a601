"""Whether the settings of a configuration suit each other: within a table, and between tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import TypeVar

from configs.base import MissingSetting, Problem, Table
from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM, unused_extraction
from configs.learner import Sft
from configs.rollout import min_finished
from configs.schema import Config
from configs.task import OVERLONG

T = TypeVar("T", bound=Table)


def problems(config: Config) -> Iterator[Problem]:
    """Yields a problem for each setting that does not suit the others.

    A check is skipped if it reads a setting that the configuration lacks (see `without`), and a
    check between tables also if it reads a setting that has a problem within its table: one mistake
    does not hide others, and does not count twice.
    """
    within = list(_table_problems(config))
    yield from within
    rest = without(config, *(key for key, _ in within))
    for check in _CROSS_CHECKS:
        with suppress(MissingSetting):
            yield from check(rest)


def without(table: T, *keys: str) -> T:
    """A copy without these dotted keys; reading one of them raises `MissingSetting`.

    Of a list all elements are left out.
    """
    rest = table.model_copy()
    for key in keys:
        name, _, inner = key.partition(".")
        value = vars(rest).pop(name, None)
        if inner and isinstance(value, Table):
            vars(rest)[name] = without(value, inner)
    return rest


def _table_problems(config: Config) -> Iterator[Problem]:
    for key, table in _tables(config):
        with suppress(MissingSetting):
            for inner, what in table.conflicts():
                yield f"{key}.{inner}".strip("."), what


def _tables(table: Table, key: str = "") -> Iterator[tuple[str, Table]]:
    """The tables in `table`, then itself, with their dotted keys."""
    for name in type(table).model_fields:
        value, inner = getattr(table, name, None), f"{key}.{name}".strip(".")
        if isinstance(value, Table):
            yield from _tables(value, inner)
        elif isinstance(value, tuple):
            for number, element in enumerate(value):
                if isinstance(element, Table):
                    yield from _tables(element, f"{inner}.{number}")
    yield key, table


def _schedule_problems(config: Config) -> Iterator[Problem]:
    learner, end = config.learner, config.decay_steps
    if learner.schedule == "constant":
        yield from learner.unused("decay_steps", why="with a constant schedule", table="learner")
    elif end is not None and learner.warmup_steps >= end:
        what = f"must be below the end of the decay, step {end}; nearest valid: {end - 1}"
        yield "learner.warmup_steps", what


def _bucket_problems(config: Config) -> Iterator[Problem]:
    longest, buckets = config.rollout.max_prompt_tokens, config.plan.prompt_buckets
    valid = sorted({size for size in buckets if size < longest})
    if valid != list(buckets):
        what = f"must be ascending and below {longest}, which is always a bucket"
        yield "plan.prompt_buckets", f"{what}; nearest valid: {valid}"


def _row_problems(config: Config) -> Iterator[Problem]:
    plan, longest = config.plan, config.rollout.max_tokens
    if plan.row_tokens is not None and plan.row_tokens < longest:
        what = f"must hold the longest sequence, {longest} tokens; nearest valid: {longest}"
        yield "plan.row_tokens", what


def _rollout_weights_problems(config: Config) -> Iterator[Problem]:
    kind, model = config.plan.rollout_weights, config.model
    if kind == "shared":
        return
    if model.quantization != "none":
        what = f'needs model.quantization = "none", not "{model.quantization}"'
        yield "plan.rollout_weights", f'{what}; nearest valid: "shared"'
    rounds = kind != "merged" or model.dtype != "float32"
    if rounds and config.learner.importance_cap == 0:
        base = f" with a {model.dtype} base" if kind == "merged" else ""
        what = (
            f'plan.rollout_weights = "{kind}"{base} rounds differently from the learner, which '
            'needs importance weights; nearest valid: 2.0, or plan.rollout_weights = "shared"'
        )
        yield "learner.importance_cap", what


def _overlong_problems(config: Config) -> Iterator[Problem]:
    names = [part.name for part in config.rewards.functions]
    if config.rollout.overlong_tokens and OVERLONG in names:
        what = f"{OVERLONG!r} is the name of the part of rollout.overlong_tokens; choose another"
        yield "rewards.functions", what


def _partial_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.cut_off is not None:
        prompts = -(-rollout.prompts_per_step // config.plan.num_samplers)
        share = prompts * rollout.group_size
        if min_finished(share, cut_off=rollout.cut_off) == share:
            nearest = math.floor(100 * (share - 1) / share) / 100
            what = f"would truncate none of a sampler's {share} rollouts in a step"
            yield "rollout.cut_off", f"{what}; nearest valid: {nearest}"
            return
    if rollout.partial == "keep" and not config.learner.importance_cap:
        what = (
            '"keep" trains on tokens of older policy versions, which needs importance weights; set '
            "learner.importance_cap above 0, e.g. 2"
        )
        yield "rollout.partial", what


def _ahead_problems(config: Config) -> Iterator[Problem]:
    if config.rollout.ahead == "off":
        return
    if config.plan.placement != "split" and not config.plan.searches_placement:
        what = (
            'needs plan.placement = "split": a process that owns all devices cannot sample and '
            'learn at the same time; nearest valid: "off"'
        )
        yield "rollout.ahead", what
    if not config.learner.importance_cap:
        what = (
            '"one" trains on rollouts of the previous policy version, which needs importance '
            "weights; set learner.importance_cap above 0, e.g. 2"
        )
        yield "rollout.ahead", what


def _shrink_problems(config: Config) -> Iterator[Problem]:
    rollout, key = config.rollout, "rollout.min_prompts_per_step"
    if rollout.min_prompts_per_step is None:
        return
    if config.budget.steps is not None:
        yield key, "has no effect with budget.steps, where all steps have one size; remove it"
    elif rollout.dynamic_sampling != "off":
        what = 'needs rollout.dynamic_sampling = "off", which refills steps; remove one of them'
        yield key, what
    elif rollout.ahead != "off":
        what = 'needs rollout.ahead = "off", which samples before a step is sized; remove one'
        yield key, what


def _validation_problems(config: Config) -> Iterator[Problem]:
    if not config.validates:
        why = "without data.validation"
        yield from config.eval.unused("every_steps", "every_minutes", why=why, table="eval")


def _alarm_problems(config: Config) -> Iterator[Problem]:
    useless = dict[str, str]()
    if not config.validates:
        why = "without data.validation"
        useless |= {"validation_falls": why, "rising_while_validation_falls": why}
    if config.learner.kl_coef == 0:
        why = "with learner.kl_coef = 0, where there is no reference to compare with"
        useless["kl"] = why
    for key, names in (("off", config.alarms.off), ("stop", config.alarms.stop)):
        for name in names:
            if name in useless:
                yield f"alarms.{key}", f'"{name}" has no effect {useless[name]}; remove it'


def _metric_problems(config: Config) -> Iterator[Problem]:
    for part in config.rewards.functions:
        if part.name in {EXACT_ANSWER, WEIGHTED_SUM}:
            what = f'"{part.name}" is a value of eval.metric of its own; name the part otherwise'
            yield "rewards.functions", what
    metric, names = config.eval.metric, config.metric_names
    if metric is None:
        return
    if metric not in names:
        (nearest,) = get_close_matches(metric, names, n=1, cutoff=0.0)
        what = f"is not the name of a reward part, {EXACT_ANSWER} or {WEIGHTED_SUM}"
        yield "eval.metric", f'{what}; nearest valid: "{nearest}", of {", ".join(names)}'
    elif config.eval.extraction is not None and metric != EXACT_ANSWER:
        yield "eval.extraction", unused_extraction(metric)


def _chip_problems(config: Config) -> Iterator[Problem]:
    if config.plan.platform != "tpu":
        why = f'with plan.platform = "{config.plan.platform}"'
        yield from config.run.unused("tpu_chips", why=why, table="run")


def _sft_problems(config: Config) -> Iterator[Problem]:
    sft, steps = config.sft, config.budget.steps
    if not config.run.has_sft_phase:
        why = 'without "sft" in run.phases'
        yield from sft.unused(*Sft.model_fields, why=why, table="sft")
        return
    if sft.train is None:
        yield "sft.train", 'is required for run.phases = ["sft", "grpo"]'
    if steps is not None and sft.steps >= steps:
        what = f"must be below budget.steps = {steps}, to leave steps for GRPO"
        yield "sft.steps", f"{what}; nearest valid: {steps - 1}"


def _profile_problems(config: Config) -> Iterator[Problem]:
    steps, profiled = config.budget.steps, config.profile.range
    if profiled is not None and steps is not None and profiled[0] > steps:
        what = f'there are only budget.steps = {steps} steps; nearest valid: "{steps}"'
        yield "profile.steps", what


_CROSS_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _schedule_problems,
    _bucket_problems,
    _row_problems,
    _rollout_weights_problems,
    _overlong_problems,
    _partial_problems,
    _ahead_problems,
    _shrink_problems,
    _validation_problems,
    _alarm_problems,
    _metric_problems,
    _chip_problems,
    _sft_problems,
    _profile_problems,
)
"""Checks between tables that are valid by themselves."""
