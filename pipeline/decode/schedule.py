"""Which request is drawn in which slot: the host's part of the engine, between two segments.

Requests with the same prompt form a group, whose prompt is read once; where several devices share a
group, once for each of its parts. The prompt of a rollout that was cut is all that it goes on from,
tokens that it has drawn included. Groups are taken in the order in which they are asked for; a slot
that has ended is given to the next member of a group that was read for its device. All of it is a
function of the requests and of what was drawn, never of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from pipeline.datatypes import RolloutRequest

T = TypeVar("T")

_FREE = -1


@dataclass(frozen=True)
class Group:
    """Requests with the same prompt.

    Attributes:
        prompt_tokens: int32 `seq`, what they go on from.
        members: places of the requests in what was asked for.
    """

    prompt_tokens: np.ndarray
    members: list[int]


def groups(requests: Sequence[RolloutRequest]) -> list[Group]:
    """The requests by prompt, in the order of each prompt's first."""
    found: dict[bytes, Group] = {}
    for place, request in enumerate(requests):
        tokens = request.read_tokens
        found.setdefault(tokens.tobytes(), Group(tokens, [])).members.append(place)
    return list(found.values())


@dataclass(frozen=True)
class Waiting(Generic[T]):
    """Prompts that were read together, and who still waits for a slot to continue them.

    Attributes:
        prefilled: what reading them gave.
        members: for each device, places of requests and the row of their prompt among those that
            this device has read.
    """

    prefilled: T
    members: list[deque[tuple[int, int]]]


@dataclass(frozen=True)
class Given:
    """A slot and who it was given to.

    Attributes:
        shard: device, or group of tp devices.
        slot: on that device.
        row: of the prompt among those that this device has read.
        member: place of the request.
    """

    shard: int
    slot: int
    row: int
    member: int


@dataclass
class Slots(Generic[T]):
    """Who is in which slot, who waits for one, and which prompts were not read yet.

    Attributes:
        queue: groups whose prompt was not read yet.
        holders: `shards slots`, place of the request in each slot; -1: it is free.
        waiting: prompts that were read, the oldest first.
    """

    queue: deque[Group]
    holders: np.ndarray
    waiting: list[Waiting[T]] = field(default_factory=list)

    @staticmethod
    def of(requests: Sequence[RolloutRequest], *, shards: int, slots: int) -> Slots[T]:
        """All slots free."""
        return Slots(deque(groups(requests)), np.full((shards, slots // shards), _FREE))

    @property
    def busy(self) -> np.ndarray:
        """`shards slots`, where somebody is."""
        return self.holders != _FREE

    @property
    def drained(self) -> bool:
        """Whether nobody waits for a slot any more."""
        return not self.queue and not self.waiting

    def release(self, ended: np.ndarray) -> list[tuple[int, int]]:
        """Frees slots whose rollout has ended.

        Args:
            ended: bool `slots`, of all devices; who ended them, device or host, does not matter.

        Returns:
            For each that somebody was in: the slot among those of all devices, the request.
        """
        left = np.flatnonzero(ended.reshape(self.holders.shape) & self.busy)
        found = [(int(slot), int(self.holders.flat[slot])) for slot in left]
        self.holders.flat[left] = _FREE
        return found

    def wants_prompts(self) -> bool:
        """Whether a slot is free for which nobody waits though prompts are left."""
        if not self.queue:
            return False
        free = ~self.busy[~self._served()]
        return bool(free.any())

    def next_prompts(
        self, bucket_of: Callable[[int], int], rows_of: Callable[[int], int]
    ) -> tuple[int, list[list[Group]]]:
        """Takes the groups whose prompts are read next.

        Args:
            bucket_of: the bucket that holds a prompt of so many tokens.
            rows_of: prompts of a bucket that a device reads at once.

        Returns:
            The bucket, and groups for each device for which nobody waits: each to the one with the
            most room. Where there are several devices, a group that one has no room for is split,
            and prompts are read ahead only while more is left than all slots can take, so that
            nobody waits for one device while another has nothing to do.
        """
        room = (~self.busy).sum(axis=1)
        takers = np.flatnonzero(~self._served()).tolist()
        several = len(room) > 1
        left = sum(len(group.members) for group in self.queue)
        bucket = bucket_of(len(self.queue[0].prompt_tokens))
        dealt: list[list[Group]] = [[] for _ in room]
        while self.queue and bucket_of(len(self.queue[0].prompt_tokens)) <= bucket:
            takers = [shard for shard in takers if len(dealt[shard]) < rows_of(bucket)]
            if not takers:
                break
            shard = max(takers, key=lambda shard: room[shard])
            most = room[shard] if room[shard] > 0 else left - self.holders.size
            if several and most <= 0:
                break
            group = self.queue.popleft()
            if several and most < len(group.members):
                self.queue.appendleft(Group(group.prompt_tokens, group.members[most:]))
                group = Group(group.prompt_tokens, group.members[:most])
            dealt[shard].append(group)
            room[shard] -= len(group.members)
            left -= len(group.members)
        return bucket, dealt

    def wait(self, prefilled: T, dealt: Sequence[Sequence[Group]]) -> None:
        """Notes that these groups' prompts were read."""
        members = [
            deque((place, row) for row, group in enumerate(own) for place in group.members)
            for own in dealt
        ]
        self.waiting.append(Waiting(prefilled, members))

    def give(self) -> list[tuple[T, list[Given]]]:
        """Gives free slots to those who wait; by what reading their prompts gave."""
        found = []
        for batch in self.waiting:
            given = []
            for shard, members in enumerate(batch.members):
                for slot in np.flatnonzero(~self.busy[shard])[: len(members)]:
                    place, row = members.popleft()
                    self.holders[shard, slot] = place
                    given.append(Given(shard, int(slot), row, place))
            if given:
                found.append((batch.prefilled, given))
        self.waiting = [batch for batch in self.waiting if any(batch.members)]
        return found

    def compact(self, slots: int) -> np.ndarray | None:
        """Moves everybody into so many slots on each device, where that can be done.

        Returns:
            `shards slots`, where on its device each slot was; None: too many are busy.
        """
        if self.busy.sum(axis=1).max() > slots:
            return None
        # Stable: who is in a slot comes first, in order.
        kept = np.argsort(~self.busy, axis=1, kind="stable")[:, :slots]
        self.holders = np.take_along_axis(self.holders, kept, axis=1)
        return kept

    def _served(self) -> np.ndarray:
        """For each device, whether somebody waits for a slot there."""
        served = np.zeros(len(self.holders), bool)
        for batch in self.waiting:
            served |= np.array([bool(members) for members in batch.members])
        return served
