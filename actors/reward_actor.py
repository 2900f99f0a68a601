"""The process that hosts the reward processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.schema import Rewards
from pipeline.clock import Heartbeat
from rewards.base import Outcome, RewardFacts, RewardInput
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog
from rewards.processes.parent import end_with_parent


class RewardActor:
    """A `RewardHost`; a plain class that `actors.groups` runs as a Ray actor."""

    def __init__(self, rewards: Rewards, log: str) -> None:
        end_with_parent()
        self._host = RewardHost(rewards, log=RewardLog(Path(log)))

    async def start(self) -> list[RewardFacts]:
        """See `RewardHost.start`."""
        return await self._host.start()

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """See `RewardHost.score`."""
        return await self._host.score(inputs)

    def notices(self) -> list[str]:
        """See `RewardLog.notices`."""
        return self._host.log.notices()

    def busy_s(self) -> dict[str, float]:
        """See `RewardHost.busy_s`."""
        return self._host.busy_s()

    def heartbeat(self) -> Heartbeat:
        """Returns since when no call of a reward function has ended, while some are waited for."""
        quiet_s = self._host.quiet_s
        return Heartbeat() if quiet_s is None else Heartbeat("scoring", quiet_s)

    async def close(self) -> None:
        """Ends the reward processes."""
        await self._host.close()
