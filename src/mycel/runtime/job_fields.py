"""The integers in which a run is told to the engine: fields of a job, its rows and its channels, and how it ends.

See ``engine`` for what they are for.
"""

from __future__ import annotations

# Fields of a job.
J_STATUS = 0
J_NUM_ROWS = 1
J_NUM_CHANNELS = 2
J_ROWS = 3  # address: int64[rows, ROW_FIELDS]
J_PENDING0 = 4  # address: int64[rows], how many instructions each row needs
J_PENDING = 5  # address: int64[rows], how many of them are still unfinished
J_DEPENDENT_START = 6  # address: int64[rows + 1]
J_DEPENDENTS = 7  # address: int64[...], rows that need this row
J_QUEUE_START = 8  # address: int64[channels + 1]
J_QUEUE = 9  # address: int64[rows + 1], rows of each channel, in order; then local rows that need others; then -1
J_CHANNELS = 10  # address: int64[channels, CHANNEL_FIELDS]
J_BASES = 11  # three addresses: INPUT, OUTPUT, SCRATCH
J_DTYPE = 14
J_REDUCE_OP = 15
J_DIVISOR = 16  # 0: the result is not divided
J_REMAINING = 17
J_HEADER = 18  # four integers: magic, sequence number, kind, bytes (the channel's C_STATED in their place)
J_DEADLINE_NS = 22
J_POLL = 23  # address: struct pollfd[channels + extras + 1 + channels]
J_NUM_EXTRAS = 24
J_EXTRAS = 25  # address: int64[extras], descriptors whose readability ends the wait
J_FAILED_CHANNEL = 26
J_ERRNO = 27
J_STARTED_NS = 28
J_ENDED_NS = 29
J_ELEMENT_BYTES = 30
J_LIMIT_NS = 31  # from the run's begin to its deadline; 0 where the deadline is given
J_NUMBERS = 32  # address of the last sequence number that was given; a job whose own is 0 takes the next
J_POSITION = 33  # in the ring, counted from the first; -1 where it is in none
J_ASKING = 34  # address of the ASK_* integers, which all jobs of a group share
J_LOCAL = 35  # how many of the local rows that need others are done
J_WORK = 36  # address of 24 integers to work in, which follow: clock, msghdr, iovec, outgoing header, lead
JOB_FIELDS = 61
#: Places among them, in bytes.
SLOT_OFFSET, LEAD_OFFSET = 16 * 8, 20 * 8

# Fields of a row.
R_OP, R_CHANNEL, R_ADDRESS_BUFFER, R_OFFSET, R_BYTES, R_OPERAND_BUFFER, R_OPERAND_OFFSET, R_FINAL = range(8)
ROW_FIELDS = 8
R_TAKEN = R_OPERAND_OFFSET  # of a row that sends: how far its receiver will have come when it has taken it; 0: it is

# Fields of a channel.
C_FD = 0
C_OUTGOING = 1
C_HEAD = 2  # position in the channel's queue
C_DONE = 3  # bytes of the message at the head that went or came, its header included
C_STAGING = 4  # address where bytes to be reduced arrive
C_BLOCKED = 5  # the socket said it would block, wait for poll; of a ring, why: STUCK, NOT_TAKEN
C_HEADER = 6  # four integers: the header that came in
C_BYTES = 10  # payload bytes since the channel was opened
C_STATED = 11  # bytes that the header states: of the whole array, or on this channel where blocks differ in length
C_RING = 12  # address of the ring; 0: the bytes go through the socket
C_CAPACITY = 13  # of the ring
C_ENDED = 14  # the ring's socket has ended: nothing comes after what is in the ring
C_BELL = 15  # wakes the other end of the ring
C_OWN_BELL = 16  # wakes this end, of a ring that comes in; else ASK_BELL does
C_ARENA = 17  # address where the sender's arena is mapped
C_ARENA_BYTES = 18  # of that; 0: it is not
C_TAKEN = 19  # position in the queue, up to which messages that went by reference have been taken
C_AWAITED = 20  # how far the receiver will have come when the next of these is taken
C_FROM = 21  # address of the message at the head in the sender's arena; 0: it comes as bytes
CHANNEL_FIELDS = 22

# Why a ring is blocked: nothing has come, or there is no room; what was told by reference is not taken yet.
STUCK, NOT_TAKEN = 1, 2

# What the jobs of a group share: how long to ask rings again before sleeping, and where this process has what.
ASK_ROUNDS = 0  # now
ASK_MOST = 1  # at most
ASK_YIELD = 2  # whether to let other ranks of the node have the processor meanwhile
ASK_BELL = 3  # this rank's, which others ring
ASK_ONE = 4  # 1, for bells
ASK_ARENA = 5  # address of this process's arena
ASK_ARENA_BYTES = 6  # of that; 0: it has none
ASK_LARGE = 7  # bytes from which on arrays of all ranks of the node do not fit into its caches
ASK_FIELDS = 8

# What execute returns.
UNUSED = -1  # of fields that are of no job yet
PENDING = 0
DONE = 1
CLOSED = 2  # a channel was closed or failed; J_FAILED_CHANNEL, J_ERRNO
MISMATCHED = 3  # a header differs; J_FAILED_CHANNEL and the channel's C_HEADER
TIMED_OUT = 4
CONTROL = 5  # a control descriptor is readable
INTERRUPTED = 6  # a signal arrived
UNOPENED = 7  # a channel has no socket yet: its C_FD is -1

HEADER_MAGIC = 0x6D7963656C303031
HEADER_BYTES = 32
