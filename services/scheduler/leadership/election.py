"""The election of one scheduler among several, as a candidate knows it. Pure.

A lease with an expiry decides. A standby claims it until it gets it. The leader claims it again at
a third of its time, and counts that time from before each claim was sent, so that it stops leading
before the lease can expire:

    standby  → leader    a claim succeeded, and its time is not over
    leader   → deposed   its time is over without another successful claim, or another holds the
                         lease
    any      → deposed   it resigns; a deposed candidate never leads again
"""

from enum import StrEnum
from math import inf

RENEWALS = 3  # claims in the time of a lease
STANDBY_CLAIMS = 10  # the same for a standby, and for a leader after a failed claim
# The part of a lease's time in which its holder leads. The rest covers the time from a check of the
# clock to the effect of the decision, and clocks of unequal speed.
LED_SHARE = 0.9


class Role(StrEnum):
    STANDBY = "standby"
    LEADER = "leader"
    DEPOSED = "deposed"


class Election:
    """One candidate. `token` is unique to it; `lease_s` is the same for all candidates."""

    def __init__(self, token: str, lease_s: float):
        self.token, self.lease_s = token, lease_s
        self.until_s = -inf  # the candidate leads before this time
        self.next_claim_s = -inf
        self.holder = ""  # token of the last known holder of the lease; empty: none is known
        self.changes = 0  # of the holder, as far as this candidate saw

    def role(self, now_s: float) -> Role:
        if self.until_s == -inf:
            return Role.STANDBY
        return Role.LEADER if now_s < self.until_s else Role.DEPOSED

    def patience_s(self, now_s: float) -> float:
        """How long a claim that is sent now may take."""
        limit_s = self.lease_s / RENEWALS
        return min(limit_s, self.until_s - now_s) if self.until_s > now_s else limit_s

    def on_answer(self, holder: str, sent_s: float, now_s: float) -> None:
        """A claim was answered: `holder` has the lease now; empty if no one has."""
        role = self.role(now_s)
        if role is Role.DEPOSED:
            return
        self._see_holder(holder)
        until_s = sent_s + LED_SHARE * self.lease_s
        if holder == self.token and until_s > now_s:
            self.until_s = max(self.until_s, until_s)
            self.next_claim_s = sent_s + self.lease_s / RENEWALS
        else:
            if holder != self.token and role is Role.LEADER:
                self.until_s = now_s
            self.next_claim_s = now_s + self.lease_s / STANDBY_CLAIMS

    def resign(self, now_s: float) -> None:
        """The candidate leads no more, and a standby never will."""
        self.until_s = now_s

    def on_failure(self, now_s: float) -> None:
        """A claim was not answered. The lease may have been taken or renewed nevertheless."""
        self.next_claim_s = now_s + self.lease_s / STANDBY_CLAIMS

    def _see_holder(self, holder: str) -> None:
        self.changes += bool(holder) and holder != self.holder
        self.holder = holder or self.holder
