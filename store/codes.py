"""The store's integer codes, master and client alike: 0, or the negative number that the drop-in API returns too."""

from __future__ import annotations

OK = 0
NO_SPACE = -200
INVALID = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
LEASE_EXPIRED = -707
REPLICA_GONE = -712
TRANSFER_FAILED = -800
UNAVAILABLE = -900
TIMED_OUT = -901
