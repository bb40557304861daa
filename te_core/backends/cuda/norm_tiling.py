"""How the norm kernels share rows among threads: tables as pure functions of sizes and of the device's limits.

Every forward kernel must add up a row in the same order, so all take `forward_team`'s size and iters, which depend on
the row alone and not on the device, the number of rows or the cast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Measured on an H200, 2026-11-21 (the heads of norm_forward.cu and norm_backward.cu).
FORWARD_VECTORS = 4  # of a row, in one thread
FORWARD_THREADS = 320  # 2 teams of 128 or of 160
FORWARD_STAGES = 2
FORWARD_RESIDENT = 1024  # threads of a multiprocessor that the compiler shall leave registers for
HELD_REGISTERS = 32  # of a row, in one thread; longer rows are read again instead
TILE_ROWS = 32  # of FP8 make a whole 32-byte sector of the transposed copy; half sectors cost twice the time
TILE_THREADS = 1024
TILE_STAGES = 1
TILE_RESIDENT = 1024
MAX_TEAMS = 15  # named barriers of a block, less the block's own
BACKWARD_COLUMNS = 16  # sums of a thread for each of dgamma and dbeta, at most
BACKWARD_THREADS = 512
BACKWARD_STAGES = 3
RESERVED_SHARED = 1024  # of each block, by the driver
STATIC_SHARED = 6 * 1024  # more than the kernels' own arrays of fixed size


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can hold; the numbers of `te_core.driver.ATTRIBUTES`."""

    multiprocessors: int
    threads_per_multiprocessor: int
    shared_per_multiprocessor: int
    shared_per_block_optin: int
    l2_bytes: int

    def blocks_per_multiprocessor(self, threads: int, registers: int, shared: int = 0) -> int:
        """Blocks that run side by side (at least 1)."""
        by_registers = 65536 // (max(8, -(-registers // 8) * 8) * threads)
        by_shared = self.shared_per_multiprocessor // (shared + STATIC_SHARED + RESERVED_SHARED)
        return max(1, min(self.threads_per_multiprocessor // threads, by_registers, by_shared, 32))


@dataclass(frozen=True, slots=True)
class Team:
    """`size` threads share a row, `iters` vectors of `width` each (0: read again); `teams` of them make a block."""

    size: int
    iters: int
    width: int
    teams: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.size * self.teams

    def is_full(self, cols: int) -> bool:
        """Whether the vectors are exactly the row."""
        return self.size * self.iters * self.width == cols

    def row_bytes(self, itemsize: int) -> int:
        """Shared memory that one stage of a block takes."""
        return self.threads * self.iters * self.width * itemsize

    def in_blocks_of(self, threads: int, most: int = 1024) -> Team:
        """The same rows in blocks of up to this many threads (a few whole warps at least) and `most` teams."""
        most = min(most, MAX_TEAMS) if self.size > 32 else most
        teams = max(1, 32 // self.size, min(threads // self.size, most))
        return replace(self, teams=teams)


def vector_width(cols: int, alignment: int, itemsizes: tuple[int, ...], most: int) -> int:
    """Elements that one access may take: at most `most`, dividing the row, every operand on its boundary.

    `alignment` is the bitwise or of the operands' addresses.
    """
    boundary = (alignment | 16) & -(alignment | 16)
    width = most
    while width > 1 and (cols % width or any(min(16, width * size) > boundary for size in itemsizes)):
        width //= 2
    return width


def _team_size(vectors: int, iters: tuple[int, ...], largest: int = 1024) -> int:
    """Threads for a row of this many vectors: a power of two within a warp, else whole warps.

    The first of `iters` that divides the row exactly wins (kernels need not ask where the row ends), else the first.
    """
    if vectors <= 32:
        return 1 << (vectors - 1).bit_length()
    for each in iters:
        if vectors % (32 * each) == 0 and vectors // each <= largest:
            return vectors // each
    return min(largest, -(-vectors // (32 * iters[0])) * 32)


def forward_team(cols: int, width: int, itemsize: int) -> Team:
    """The team of a forward kernel (its `teams` to be chosen)."""
    vectors = cols // width
    each = (FORWARD_VECTORS, 5, 3, 6, 2, 7, 8, 1) if width * itemsize == 16 else (16, 15, 14, 13, 12, 11, 10, 9, 8)
    size = _team_size(vectors, each)
    iters = -(-vectors // size)
    fits = iters * max(1, width * itemsize // 4) <= HELD_REGISTERS
    return Team(size, iters if fits else 0, width)


def stages(row_bytes: int, blocks: int, most: int, limits: Limits) -> int:
    """Rows to fetch ahead, 0 if not even one fits, with `blocks` a multiprocessor."""
    share = limits.shared_per_multiprocessor // blocks - RESERVED_SHARED
    room = min(limits.shared_per_block_optin, share) - STATIC_SHARED
    return max(0, min(most, room // max(1, row_bytes)))


def transposing_team(team: Team) -> Team:
    """The block of norm_forward.cu that turns TILE_ROWS rows at a time: its teams divide them evenly."""
    teams = min(TILE_ROWS, 8 if team.size > 32 else TILE_ROWS, max(1, TILE_THREADS // team.size))
    return replace(team, teams=max(1 << (teams.bit_length() - 1), 32 // team.size))


def backward_team(cols: int, width: int) -> Team | None:
    """The team of norm_backward.cu; None: the row is too long for it."""
    vectors, most = cols // width, max(1, BACKWARD_COLUMNS // width)
    # First what fits well, then up to twice as many sums: still better than a thousand threads of half the registers.
    size = _team_size(vectors, (*range(most, 0, -1), *range(most + 1, 2 * most + 1)), 512)
    iters = -(-vectors // size)
    if iters > 2 * most:
        return None
    return Team(size, iters, width).in_blocks_of(BACKWARD_THREADS if size > 32 else 256, 8 if size > 32 else 256)
