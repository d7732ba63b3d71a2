"""Amounts as people read them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def sized(count: int) -> str:
    """`count` bytes in GiB, or in the unit that shows so few, such as `1.50 GiB` or `12.3 KiB`."""
    if count >= 10 << 20:
        return f"{count / 2**30:.2f} GiB"
    if count >= 1 << 20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB" if count >= 1 << 10 else f"{count} bytes"
