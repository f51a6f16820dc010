"""A wall clock that jumps, for programs that are started with it; other clocks are unchanged.

A shared library, loaded before any other, adds an offset to what the C library says the time is.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_FILE = "SHIFTED_CLOCK"
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) abort();
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) abort();
    offset = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!failed && offset && is_wall) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


class WallClock:
    """The clock of all programs that have ``variables`` in their environment."""

    def __init__(self, folder: Path) -> None:
        source, library, offset = (folder / f"clock.{suffix}" for suffix in ("c", "so", "offset"))
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.variables = {"LD_PRELOAD": str(library), _FILE: str(offset)}

    def shift(self, seconds: int) -> None:
        """Shift the clock by this much from this process's own from now on."""
        self._memory[:] = struct.pack("q", seconds)


def why_impossible() -> str | None:
    """Return what this system lacks, if anything."""
    return None if shutil.which("cc") else "there is no C compiler (cc) to build the clock with"
