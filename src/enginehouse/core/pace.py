"""How long serving waits for what, with the reason for each length. The same in every frontend of a cluster.

These are no settings: they keep each other's relations. The simulation passes its own, all shorter alike.
"""

from __future__ import annotations

from msgspec import Struct


class ServingPace(Struct, frozen=True, kw_only=True):
    scale_down_seconds: float = 300.0  # without a request before a surplus replica stops; the same as in LocalAI
    scale_up_seconds: float = 10.0  # between two replicas that are added because all are busy
    retry_seconds: float = 15.0  # after the first failed load that nobody asked for
    max_retry_seconds: float = 300.0  # after many in a row
    cool_down_seconds: float = 10.0  # after a failed load, requests get its error instead of a new load; as in LocalAI
    reserved_seconds: float = 60.0  # after the last look at a load: by then another frontend steers it
    settled_seconds: float = 600.0  # at most: a reservation ends when a heartbeat shows the memory as used
    drain_seconds: float = 30.0  # for answers under way on a replica that is stopped in order; the same as in LocalAI
    evict_seconds: float = 10.0  # for requests that came while an idle replica was chosen to be stopped
    # Uses are written every few seconds; a replica that was not used for so long has no request on any frontend.
    idle_seconds: float = 15.0


USUAL = ServingPace()
