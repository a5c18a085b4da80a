"""Whether this scheduler leads: always, or while it holds a lease that it shares with others."""

import asyncio
import logging
import secrets
import time
from math import inf
from typing import Protocol

from services.runtime.errors import UnrecoverableError
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.election import Election, Role

log = logging.getLogger(__name__)

RELEASE_S = 0.5  # bound on the release of the lease; without it, it expires


class LeaseUnavailable(Exception):
    """The lease could not be reached. A sentence for the log."""


class Lease(Protocol):
    """A lease that expires. Every call raises LeaseUnavailable without an answer in `limit_s`."""

    async def claim(self, leads: bool, limit_s: float) -> str:
        """Takes or renews the lease if possible; returns the token of its holder, empty for none.
        `leads`: the caller leads now."""
        ...

    async def release(self, limit_s: float) -> None:
        """Frees the lease if the caller holds it."""
        ...

    async def close(self) -> None: ...


class Leadership(Protocol):
    """When this scheduler leads."""

    @property
    def until_s(self) -> float:
        """It leads before this time of the monotonic clock."""
        ...

    @property
    def leads(self) -> bool:
        """Whether it leads now."""
        ...

    @property
    def leader(self) -> str:
        """Address of the scheduler that leads, as far as known; else empty."""
        ...

    @property
    def changes(self) -> int:
        """Changes of the leader, as far as known."""
        ...

    async def run(self) -> None:
        """Raises UnrecoverableError when it leads no more."""
        ...

    async def wait(self) -> None:
        """Returns once it leads."""
        ...

    async def release(self) -> None:
        """It stops leading: another may lead at once."""
        ...


class SoleLeadership:
    """A scheduler without others leads as long as it runs."""

    until_s, leads, leader, changes = inf, True, "", 0

    async def run(self) -> None:
        """Does nothing."""

    async def wait(self) -> None:
        """Does nothing."""

    async def release(self) -> None:
        """Does nothing."""


SOLE = SoleLeadership()


class LeaseKeeper:
    """Claims and renews a lease while `run` runs. `election` decides by the answers."""

    def __init__(self, election: Election, lease: Lease):
        self._election, self._lease = election, lease
        self._claiming = asyncio.Lock()
        self._leads = asyncio.Event()
        self._resigned = False
        self._outage_logged = False

    @property
    def until_s(self) -> float:
        return self._election.until_s

    @property
    def leads(self) -> bool:
        return time.monotonic() < self._election.until_s

    @property
    def leader(self) -> str:
        return self._election.holder.partition(" ")[0]

    @property
    def changes(self) -> int:
        return self._election.changes

    async def wait(self) -> None:
        await self._leads.wait()

    async def run(self) -> None:
        try:
            while (role := self._election.role(time.monotonic())) is not Role.DEPOSED:
                async with self._claiming:
                    await self._claim(leads=role is Role.LEADER)
                await self._pause()
        finally:
            await self._lease.close()
        if not self._resigned:
            raise UnrecoverableError(
                f"this scheduler leads no more: {self._why_deposed()}; restart it as a standby"
            )

    async def release(self) -> None:
        """Stops leading. Without an answer the lease expires."""
        self._resigned = True
        self._election.resign(time.monotonic())
        try:
            async with asyncio.timeout(RELEASE_S), self._claiming:
                await self._lease.release(RELEASE_S)
        except (LeaseUnavailable, TimeoutError) as error:
            log.warning("%s: the lease is not released, and expires", error or "Redis is late")

    async def _claim(self, leads: bool) -> None:
        sent_s, before = time.monotonic(), self._election.holder
        try:
            holder = await self._lease.claim(leads, self._election.patience_s(sent_s))
        except LeaseUnavailable as error:
            self._election.on_failure(time.monotonic())
            if not self._outage_logged:
                log.warning("%s; %s", error, "retrying" if leads else "waiting as a standby")
            self._outage_logged = True
            return
        self._outage_logged = False
        self._election.on_answer(holder, sent_s, time.monotonic())
        if self._election.role(time.monotonic()) is Role.LEADER:
            self._leads.set()
        if self._election.holder != before:
            log.info("the scheduler at %s leads", self.leader)

    async def _pause(self) -> None:
        """Waits until the next claim, or the end of leading."""
        next_s = self._election.next_claim_s
        if self._leads.is_set():
            next_s = min(next_s, self._election.until_s)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    def _why_deposed(self) -> str:
        if self._election.holder != self._election.token:
            return f"the one at {self.leader} holds the lease"
        return f"the lease was not renewed within {self._election.lease_s:g} s"


def open_leadership(config: SchedulerConfig) -> Leadership:
    """The leadership that the settings describe. Raises ValueError for an unusable URL."""
    if not config.lease_url:
        return SOLE
    from services.scheduler.leadership.redis_lease import RedisLease  # takes 0.15 s

    token = f"{config.address} {secrets.token_hex(8)}"
    lease = RedisLease(config.lease_url, config.lease_name, token, config.lease_s)
    return LeaseKeeper(Election(token, config.lease_s), lease)
