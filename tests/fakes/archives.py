"""Damage to the files of ``torch.save`` that no checksum shows."""

from __future__ import annotations


def with_parts_called_folders(data: bytes) -> bytes:
    """Return a file of ``torch.save`` whose directory says that the tensors are folders (one bit each).

    The checksums still match. torch leaves the memory of small tensors as it is, whatever is in it.
    """
    out, at = bytearray(data), -1
    while (at := out.find(b"PK\x01\x02", at + 1)) >= 0:
        name = out[at + 46 : at + 46 + out[at + 28]]
        if b"/data/" in name:
            out[at + 38] |= 0x10
    assert out != data
    return bytes(out)
