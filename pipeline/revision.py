"""Chooses sizes once more when the lengths of real rollouts are known.

What was measured at the start is a step's programs, and how often they run depends on lengths,
which are assumed until there are some. Only the process that has measured does this, once, between
two steps; the decision is journaled as any other. A run that goes on from an earlier checkpoint
takes it again at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.balance import Balance
from pipeline.calibration import Calibrated, without_room
from pipeline.datatypes import Rollout
from pipeline.plan.choice import choose_sizes
from pipeline.plan.sizes import Sizes
from pipeline.plan.workload import Lengths
from pipeline.run_dir import RunFolder

STEPS = 3
"""Steps whose rollouts are looked at."""
GAIN = 0.05
"""Least share of a step's seconds for which programs are compiled again."""
_EVENT, _REASON = "replan", "lengths"


@dataclass
class Revision:
    """To be shown each step's rollouts; see `Balance.revise`.

    Attributes:
        balance: whose sizes may change.
        calibrated: what was measured.
    """

    balance: Balance
    calibrated: Calibrated
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _steps: int = 0

    def __call__(self, rollouts: Sequence[Rollout]) -> None:
        """Decides after `STEPS` steps, from the lengths of all their rollouts."""
        self._steps += 1
        if self._steps > STEPS:
            return
        drawn = [rollout.completion for rollout in rollouts]
        self._seen += [(len(one.prompt_tokens), len(one.tokens)) for one in drawn]
        if self._steps == STEPS and self._seen:
            self._decide()

    def _decide(self) -> None:
        found, balance = self.calibrated, self.balance
        config, before = found.case.config, balance.sizes
        # Sizes below those that were chosen are what a lack of memory has left.
        speeds = without_room(
            found.speeds,
            found.ladder,
            asked=found.choice.sizes,
            got=before,
            row=config.row_tokens,
        )
        prompts, completions = zip(*self._seen, strict=True)
        count = len(self._seen)
        lengths = Lengths(sum(prompts) / count, max(1.0, sum(completions) / count))
        choice = choose_sizes(config, found.ladder, speeds, lengths)
        if choice is None:
            return
        rows = before.micro_batch_tokens // config.row_tokens
        now = choice.seconds(before.rollout_rows, rows)
        after = choice.sizes
        best = choice.seconds(after.rollout_rows, after.micro_batch_tokens // config.row_tokens)
        # Not known where memory has left sizes that were never measured.
        if now is None or best is None or best > (1 - GAIN) * now:
            return
        text = (
            f"completions have {lengths.completion:.0f} tokens, not "
            f"{found.case.lengths.completion:.0f}: {after.rollout_rows} slots and micro-batches of "
            f"{after.micro_batch_tokens} tokens take {1 - best / now:.0%} less of a step's time"
        )
        facts = {
            "step": balance.step,
            "reason": _REASON,
            "from": before.to_json(),
            "to": after.to_json(),
            "lengths": vars(lengths),
            "seconds": {"from": now, "to": best},
        }
        balance.put_in_force(after, _EVENT, text, facts)


@dataclass
class Replayed:
    """To be shown each step's rollouts, likewise: takes an earlier process's decision again.

    Attributes:
        balance: whose sizes may change.
        entry: what the journal says of the decision.
    """

    balance: Balance
    entry: Mapping[str, Any]

    @staticmethod
    def of(balance: Balance, folder: RunFolder) -> Replayed | None:
        """The last decision that came after the step from which a run goes on, if there is one."""
        found = [entry for entry in folder.events(_EVENT) if entry["reason"] == _REASON]
        if not found or found[-1]["step"] <= balance.step:
            return None
        return Replayed(balance, found[-1])

    def __call__(self, _: Sequence[Rollout]) -> None:
        """Decides at that step, unless a lack of memory has left other sizes since."""
        balance, entry = self.balance, self.entry
        if balance.step != entry["step"] or balance.sizes.to_json() != entry["from"]:
            return
        sizes = Sizes.of_json(entry["to"])
        text = f"{sizes.rollout_rows} slots and micro-batches of {sizes.micro_batch_tokens} tokens"
        facts = {name: value for name, value in entry.items() if name not in {"event", "time"}}
        balance.put_in_force(sizes, _EVENT, f"{text}, as was decided here before", facts)
