"""Slot scheduling: the host's part of the engine, between two segments.

Requests with the same prompt form a group, whose prompt is prefilled once; the prompt of a
continued rollout includes the tokens that it already has. A free slot goes to the next member of a
group that its device has prefilled. Groups are prefilled in request order; when none is left, a
device with a free slot prefills a group that another device has prefilled, and both work on it.
The schedule is a function of the requests and of the sampled tokens, never of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from pipeline.types import RolloutRequest

T = TypeVar("T")

_FREE = -1


@dataclass(frozen=True, eq=False)
class Group:
    """Requests with the same prompt.

    Attributes:
        prompt_tokens: int32 `seq`, the tokens to prefill.
        members: indices of the requests that have no slot yet.
    """

    prompt_tokens: np.ndarray
    members: deque[int]


def groups(requests: Sequence[RolloutRequest]) -> list[Group]:
    """The requests by prompt, in the order of each prompt's first request."""
    found: dict[bytes, Group] = {}
    for index, request in enumerate(requests):
        tokens = request.prefill_tokens
        found.setdefault(tokens.tobytes(), Group(tokens, deque())).members.append(index)
    return list(found.values())


@dataclass(frozen=True)
class PrefilledBatch(Generic[T]):
    """Prompts that were prefilled together.

    Attributes:
        prefilled: result of the prefill.
        groups: the prefilled groups of each device, in row order.
    """

    prefilled: T
    groups: Sequence[Sequence[Group]]


@dataclass(frozen=True)
class SlotAssignment:
    """A slot and the request that it is assigned to.

    Attributes:
        shard: device, or group of tp devices.
        slot: on that device.
        row: of the prompt in the device's prefilled batch.
        member: index of the request.
    """

    shard: int
    slot: int
    row: int
    member: int


@dataclass
class Slots(Generic[T]):
    """Assignment of requests to slots, and the requests that have no slot yet.

    Attributes:
        queue: groups that have not been prefilled.
        occupants: `shards slots`, index of the request in each slot; -1 if it is free.
        prefilled: batches that still have members without a slot, the oldest first.
    """

    queue: deque[Group]
    occupants: np.ndarray
    prefilled: list[PrefilledBatch[T]] = field(default_factory=list)

    @staticmethod
    def of(requests: Sequence[RolloutRequest], *, shards: int, slots: int) -> Slots[T]:
        """All slots free, all requests queued."""
        return Slots(deque(groups(requests)), np.full((shards, slots // shards), _FREE))

    @property
    def busy(self) -> np.ndarray:
        """`shards slots`, True where a slot is occupied."""
        return self.occupants != _FREE

    @property
    def drained(self) -> bool:
        """Whether every request has been assigned a slot."""
        return not self.queue and not self.prefilled

    def release(self, ended: np.ndarray) -> list[tuple[int, int]]:
        """Frees slots.

        Args:
            ended: bool `slots`, over all devices.

        Returns:
            For each freed slot that was occupied: its index over all devices, and the index of
            the request.
        """
        left = np.flatnonzero(ended.reshape(self.occupants.shape) & self.busy)
        found = [(int(slot), int(self.occupants.flat[slot])) for slot in left]
        self.occupants.flat[left] = _FREE
        return found

    def needs_prefill(self) -> bool:
        """Whether a device has a free slot and no prefilled request for it, while requests wait."""
        return self.next_prompt() is not None and bool((~self.busy[~self._supplied()]).any())

    def next_prompt(self) -> np.ndarray | None:
        """The prompt that would be prefilled first; None if no request waits for a prefill."""
        groups = [self.queue[0]] if self.queue else self._open_groups()
        if not groups:
            return None
        return max(groups, key=lambda group: len(group.members)).prompt_tokens

    def next_prefill(
        self, bucket_of: Callable[[int], int], rows_of: Callable[[int], int]
    ) -> tuple[int, list[list[Group]]]:
        """Takes the groups to prefill next; `next_prompt` must not be None.

        Args:
            bucket_of: the bucket for a prompt of this many tokens.
            rows_of: prompts of a bucket that a device prefills at once.

        Returns:
            The bucket, and the groups of each device that has no prefilled request, each group on
            the device with the most free slots. With several devices, prompts are prefilled ahead
            of free slots only while more requests are queued than there are slots.
        """
        first = self.next_prompt()
        assert first is not None
        bucket = bucket_of(len(first))
        assignment = _PrefillAssignment.empty(
            ~self._supplied(), free=(~self.busy).sum(axis=1), rows=rows_of(bucket)
        )
        left = sum(len(group.members) for group in self.queue)
        while self.queue and bucket_of(len(self.queue[0].prompt_tokens)) <= bucket:
            ahead = len(self.occupants) == 1 or left > self.occupants.size
            shard = assignment.best_shard(ahead=ahead)
            if shard is None:
                break
            group = self.queue.popleft()
            left -= len(group.members)
            assignment.add(group, shard)
        if not self.queue:
            for group in self._open_groups():
                assignment.unassigned[group] = len(group.members)
            open_groups = list(assignment.unassigned)
            assignment.share(
                [one for one in open_groups if bucket_of(len(one.prompt_tokens)) <= bucket]
            )
        return bucket, assignment.groups

    def add_prefilled(self, prefilled: T, groups: Sequence[Sequence[Group]]) -> None:
        """Records that the prompts of these groups, by device, have been prefilled."""
        self.prefilled.append(PrefilledBatch(prefilled, groups))

    def assign(self) -> list[tuple[T, list[SlotAssignment]]]:
        """Assigns free slots to prefilled requests; by result of the prefill."""
        found = []
        for batch in self.prefilled:
            assigned = []
            for shard, own in enumerate(batch.groups):
                free = np.flatnonzero(~self.busy[shard])
                waiting = [(row, group) for row, group in enumerate(own) for _ in group.members]
                for slot, (row, group) in zip(free, waiting, strict=False):
                    index = group.members.popleft()
                    self.occupants[shard, slot] = index
                    assigned.append(SlotAssignment(shard, int(slot), row, index))
            if assigned:
                found.append((batch.prefilled, assigned))
        self.prefilled = [batch for batch in self.prefilled if any(map(_any_open, batch.groups))]
        return found

    def compact(self, slots: int) -> np.ndarray | None:
        """Moves the occupied slots of each device to the first `slots` ones, in order.

        Returns:
            `shards slots`, the former index of each slot on its device; None if too many are
            occupied, and then nothing changes.
        """
        if self.busy.sum(axis=1).max() > slots:
            return None
        # A stable sort keeps occupied slots in order.
        kept = np.argsort(~self.busy, axis=1, kind="stable")[:, :slots]
        self.occupants = np.take_along_axis(self.occupants, kept, axis=1)
        return kept

    def _supplied(self) -> np.ndarray:
        """For each device, whether it has prefilled requests that wait for a slot."""
        supplied = np.zeros(len(self.occupants), bool)
        for batch in self.prefilled:
            supplied |= np.array([_any_open(own) for own in batch.groups])
        return supplied

    def _open_groups(self) -> list[Group]:
        """Prefilled groups with members that wait for a slot."""
        read = (group for batch in self.prefilled for own in batch.groups for group in own)
        return [group for group in dict.fromkeys(read) if group.members]


@dataclass(frozen=True)
class _PrefillAssignment:
    """Assignment of groups to devices that prefill at most `rows` of them at once.

    Attributes:
        shards: devices that take part.
        rows: see above.
        free: free slots of each device, less the members assigned to it; may be negative.
        groups: groups of each device.
        unassigned: number of members of each group that have no free slot on its devices.
    """

    shards: list[int]
    rows: int
    free: list[int]
    groups: list[list[Group]]
    unassigned: dict[Group, int] = field(default_factory=dict)

    @staticmethod
    def empty(shards: np.ndarray, *, free: np.ndarray, rows: int) -> _PrefillAssignment:
        """No group assigned."""
        groups: list[list[Group]] = [[] for _ in free]
        return _PrefillAssignment(np.flatnonzero(shards).tolist(), rows, free.tolist(), groups)

    def best_shard(self, *, ahead: bool) -> int | None:
        """The device for the next group; with `ahead` also one without a free slot."""
        open_shards = [shard for shard in self.shards if len(self.groups[shard]) < self.rows]
        if not ahead:
            open_shards = [shard for shard in open_shards if self.free[shard] > 0]
        return max(open_shards, key=lambda shard: self.free[shard], default=None)

    def add(self, group: Group, shard: int) -> None:
        """Assigns a group to a device, in addition to the devices that have it already."""
        waiting = self.unassigned.get(group, len(group.members))
        self.unassigned[group] = max(0, waiting - max(0, self.free[shard]))
        self.free[shard] -= waiting
        self.groups[shard].append(group)

    def share(self, groups: Sequence[Group]) -> None:
        """Gives devices with free slots the groups with the most unassigned members."""
        while (shard := self.best_shard(ahead=False)) is not None:
            others = [group for group in groups if self.unassigned[group]]
            if not others:
                return
            self.add(max(others, key=lambda group: self.unassigned[group]), shard)


def _any_open(groups: Sequence[Group]) -> bool:
    return any(group.members for group in groups)
