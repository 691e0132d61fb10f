"""What a machine's processors need for the work of a collective: messages, copies, sums.

The constants were measured on one machine; ``mycel.runtime.calibration`` scales them to others.
"""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError

__all__ = ["ADD_S_PER_GB", "COPY_S_PER_GB", "EMULATED_EFFICIENCY", "EMULATED_START_S", "MESSAGE_S", "WAKE_S", "Costs"]

#: Seconds of one rank's time for one message (system calls and bookkeeping), measured on loopback sockets.
MESSAGE_S = 4e-6
#: Seconds between a message's arrival and the reaction of a sleeping receiver, measured on loopback sockets.
WAKE_S = 25e-6
#: Seconds of a processor for 10^9 bytes into or out of a socket, and for adding as many: what a large all_reduce on
#: loopback takes, divided.
COPY_S_PER_GB = 0.1
ADD_S_PER_GB = 0.05
#: Part of an emulated link's capacity that bytes of messages get: what headers of 1,500-byte packets leave, 0.956,
#: of a channel paced at 0.97 of its path.
EMULATED_EFFICIENCY = 0.956 * 0.97
#: Seconds of a core that each rank of an emulated cluster takes to get going, fitted to the recorded runs.
EMULATED_START_S = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a machine's processors need for the work of a collective.

    Attributes:
        message_s: seconds of a processor for one message, at either end.
        wake_s: seconds from a message's arrival to the reaction of a sleeping receiver.
        copy_s_per_gb: seconds of a processor for 10^9 bytes into a socket or out of it.
        add_s_per_gb: seconds of a processor for combining 10^9 bytes with as many others.
        cores: of a machine, shared by the ranks on it.

    Raises:
        UsageError: a negative or endless time, or no core.
    """

    message_s: float = MESSAGE_S
    wake_s: float = WAKE_S
    copy_s_per_gb: float = COPY_S_PER_GB
    add_s_per_gb: float = ADD_S_PER_GB
    cores: int = 1

    def __post_init__(self) -> None:
        times = (self.message_s, self.wake_s, self.copy_s_per_gb, self.add_s_per_gb)
        if self.cores < 1 or not all(0 <= seconds < float("inf") for seconds in times):
            raise UsageError(f"{self}: needs a core, and times from 0")
