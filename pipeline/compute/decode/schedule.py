"""Which request is drawn in which slot: the host's part of the engine, between two segments.

Requests with the same prompt form a group, whose prompt is read once; the prompt of a rollout that
was cut is all that it goes on from, tokens that it has drawn included. A slot that has ended is
given to the next member of a group that was read on its device. Groups are read in the order in
which they are asked for; only when none is left that was not read, a device with a free slot reads
one that others have read, and all of them go on with it. All of it is a function of the requests
and of what was drawn, never of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from pipeline.contracts.rollouts import RolloutRequest

T = TypeVar("T")

_FREE = -1


@dataclass(frozen=True, eq=False)
class Group:
    """Requests with the same prompt.

    Attributes:
        prompt_tokens: int32 `seq`, what they go on from.
        members: places of the requests in what was asked for, of those who are in no slot yet.
    """

    prompt_tokens: np.ndarray
    members: deque[int]


def groups(requests: Sequence[RolloutRequest]) -> list[Group]:
    """The requests by prompt, in the order of each prompt's first."""
    found: dict[bytes, Group] = {}
    for place, request in enumerate(requests):
        tokens = request.read_tokens
        found.setdefault(tokens.tobytes(), Group(tokens, deque())).members.append(place)
    return list(found.values())


@dataclass(frozen=True)
class PartialRollouts(Generic[T]):
    """Prompts that were read together, whose groups still wait for slots.

    Attributes:
        prefilled: what reading them gave.
        groups: for each device those that it has read, in the order of its rows.
    """

    prefilled: T
    groups: Sequence[Sequence[Group]]


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
        waiting: prompts that were read, the oldest first, while one of them has members.
    """

    queue: deque[Group]
    holders: np.ndarray
    waiting: list[PartialRollouts[T]] = field(default_factory=list)

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
        """Whether a slot is free for which nobody waits, though somebody waits elsewhere."""
        return self.next_prompt() is not None and bool((~self.busy[~self._served()]).any())

    def next_prompt(self) -> np.ndarray | None:
        """The prompt that would be read first; None: nobody waits for one."""
        groups = [self.queue[0]] if self.queue else self._open()
        if not groups:
            return None
        return max(groups, key=lambda group: len(group.members)).prompt_tokens

    def next_prompts(
        self, bucket_of: Callable[[int], int], rows_of: Callable[[int], int]
    ) -> tuple[int, list[list[Group]]]:
        """Takes the groups whose prompts are read next; there must be one.

        Args:
            bucket_of: the bucket that holds a prompt of so many tokens.
            rows_of: prompts of a bucket that a device reads at once.

        Returns:
            The bucket, and groups for each device for which nobody waits: each to the one with the
            most room. Where there are several devices, prompts are read ahead only while more is
            left than all slots can take.
        """
        first = self.next_prompt()
        assert first is not None
        bucket = bucket_of(len(first))
        deal = _Deal.to(~self._served(), room=(~self.busy).sum(axis=1), rows=rows_of(bucket))
        left = sum(len(group.members) for group in self.queue)
        while self.queue and bucket_of(len(self.queue[0].prompt_tokens)) <= bucket:
            ahead = len(self.holders) == 1 or left > self.holders.size
            shard = deal.most_room(ahead=ahead)
            if shard is None:
                break
            group = self.queue.popleft()
            left -= len(group.members)
            deal.seat(group, shard)
        if not self.queue:
            for group in self._open():
                deal.unseated[group] = len(group.members)
            fits = [one for one in deal.unseated if bucket_of(len(one.prompt_tokens)) <= bucket]
            deal.share(fits)
        return bucket, deal.groups

    def wait(self, prefilled: T, dealt: Sequence[Sequence[Group]]) -> None:
        """Notes that these groups' prompts were read."""
        self.waiting.append(PartialRollouts(prefilled, dealt))

    def give(self) -> list[tuple[T, list[Given]]]:
        """Gives free slots to those who wait; by what reading their prompts gave."""
        found = []
        for batch in self.waiting:
            given = []
            for shard, own in enumerate(batch.groups):
                free = np.flatnonzero(~self.busy[shard])
                seats = ((row, group) for row, group in enumerate(own) for _ in group.members)
                for slot, (row, group) in zip(free, list(seats), strict=False):
                    place = group.members.popleft()
                    self.holders[shard, slot] = place
                    given.append(Given(shard, int(slot), row, place))
            if given:
                found.append((batch.prefilled, given))
        self.waiting = [batch for batch in self.waiting if any(map(_any_waits, batch.groups))]
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
        """For each device, whether somebody waits for a slot whose prompt it has read."""
        served = np.zeros(len(self.holders), bool)
        for batch in self.waiting:
            served |= np.array([_any_waits(own) for own in batch.groups])
        return served

    def _open(self) -> list[Group]:
        """Groups that were read and have members that wait."""
        read = (group for batch in self.waiting for own in batch.groups for group in own)
        return [group for group in dict.fromkeys(read) if group.members]


@dataclass
class Held:
    """Who keeps a slot behind the end; see `RolloutRequest.hold`.

    Attributes:
        segments: for how many segments, by place of the request.
        left: of these, of who is in a slot.
    """

    segments: Mapping[int, int]
    left: dict[int, int] = field(default_factory=dict)

    def count(self, holders: np.ndarray) -> None:
        """A segment is over.

        Args:
            holders: place of the request in each slot, of any shape.
        """
        for place in self.segments.keys() & set(holders.flat):
            self.left[place] = self.left.get(place, self.segments[place]) - 1

    def keeps(self, holders: np.ndarray) -> np.ndarray:
        """Where somebody keeps a slot: bool, of the shape of `holders`."""
        kept = [place for place in self.segments if self.left.get(place, 1) > 0]
        return np.isin(holders, kept)


@dataclass(frozen=True)
class _Deal:
    """Groups dealt to devices that read at most `rows` of them at once.

    Attributes:
        takers: the devices.
        rows: see above.
        room: free slots of each device; below zero: so many wait for one.
        groups: what each device got.
        unseated: members of each group for whom there is no slot yet.
    """

    takers: list[int]
    rows: int
    room: list[int]
    groups: list[list[Group]]
    unseated: dict[Group, int] = field(default_factory=dict)

    @staticmethod
    def to(takers: np.ndarray, *, room: np.ndarray, rows: int) -> _Deal:
        """Nothing dealt yet."""
        groups: list[list[Group]] = [[] for _ in room]
        return _Deal(np.flatnonzero(takers).tolist(), rows, room.tolist(), groups)

    def most_room(self, *, ahead: bool) -> int | None:
        """The device that gets the next group; with `ahead` also one without a free slot."""
        free = [shard for shard in self.takers if len(self.groups[shard]) < self.rows]
        if not ahead:
            free = [shard for shard in free if self.room[shard] > 0]
        return max(free, key=lambda shard: self.room[shard], default=None)

    def seat(self, group: Group, shard: int) -> None:
        """Gives a group to a device, on top of those who have it already."""
        waiting = self.unseated.get(group, len(group.members))
        self.unseated[group] = max(0, waiting - max(0, self.room[shard]))
        self.room[shard] -= waiting
        self.groups[shard].append(group)

    def share(self, groups: Sequence[Group]) -> None:
        """Gives devices that have free slots left the groups with the most unseated members."""
        while (shard := self.most_room(ahead=False)) is not None:
            others = [group for group in groups if self.unseated[group]]
            if not others:
                return
            self.seat(max(others, key=lambda group: self.unseated[group]), shard)


def _any_waits(groups: Sequence[Group]) -> bool:
    return any(group.members for group in groups)
