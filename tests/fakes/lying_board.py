"""A process that starts like an agent and then misbehaves: ``lying_board.py KIND [BYTES]``."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path


def frame(text: bytes, extra: bytes = b"") -> bytes:
    return struct.pack(">II", len(text), len(extra)) + text + extra


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def request() -> None:
    """Read one request; the first has the number 1."""
    size, extra = struct.unpack(">II", sys.stdin.buffer.read(8))
    sys.stdin.buffer.read(size + extra)


def flood(stream: int) -> None:
    while True:
        os.write(stream, b"x" * 2**16)


def main() -> None:
    kind = sys.argv[1]
    if kind == "deaf from the start":
        time.sleep(600)
    if kind == "babbles before it starts":
        flood(1)
    source = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    if kind == "never starts":
        time.sleep(600)
    version = next(line for line in source.splitlines() if line.startswith(b"VERSION = ")).split()[-1]
    write(b"dsa-hw-agent " + version + b"\n")
    if kind == "deaf":
        time.sleep(600)
    request()
    if kind == "mute":
        time.sleep(600)
    elif kind == "floods standard error":
        flood(2)
    elif kind == "floods":
        write(struct.pack(">II", 2**20, 0))
        flood(1)
    elif kind == "dies":
        sys.stderr.write("Out of memory\n")
        write(frame(b'{"id": 1}')[:-1])
        sys.exit(7)
    elif kind == "sends frames for ever":
        while True:
            write(frame(b'{"id": 0}'))
    elif kind == "deep":
        write(frame(b'{"id": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
        sys.stdin.buffer.read()
    elif kind == "says":
        write(Path(sys.argv[2]).read_bytes())
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
