"""Chooses sizes once more when the lengths of real rollouts are known.

What was measured at the start is a step's programs, and how often they run depends on lengths,
which are assumed until there are some. Only the process that has measured does this, once, between
two steps, and only if the steps to come gain more time by it than preparing for other sizes takes.
The decision is journaled as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.contracts.rollouts import Rollout
from pipeline.contracts.speeds import Lengths
from pipeline.control.deadline import Deadline
from pipeline.plan.balance import REPLAN, Balance
from pipeline.plan.calibration import Calibrated, without_room
from pipeline.plan.size_choice import choose_sizes

STEPS = 3
"""Steps whose rollouts are looked at."""
GAIN = 0.05
"""Least share of a step's seconds for which programs are compiled again."""
_REASON = "lengths"


@dataclass
class Revision:
    """To be shown each step's rollouts; see `Balance.revise`.

    Attributes:
        balance: whose sizes may change.
        calibrated: what was measured.
        deadline: when the run ends.
    """

    balance: Balance
    calibrated: Calibrated
    deadline: Deadline
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
        now = choice.seconds(before.slots, rows)
        after = choice.sizes
        best = choice.seconds(after.slots, after.micro_batch_tokens // config.row_tokens)
        # Not known where memory has left sizes that were never measured.
        if now is None or best is None or best > (1 - GAIN) * now:
            return
        if (now - best) * self._steps_left(now) <= balance.prepared_s:
            return
        text = (
            f"completions have {lengths.completion:.0f} tokens, not "
            f"{found.case.lengths.completion:.0f}: {after.slots} slots and micro-batches of "
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
        balance.put_in_force(after, REPLAN, text, facts)

    def _steps_left(self, step_s: float) -> float:
        """Steps to come, if each takes so long."""
        deadline = self.deadline
        if deadline.steps is not None:
            return deadline.steps - self.balance.step
        return max(0.0, deadline.left_s - deadline.end_s) / step_s
