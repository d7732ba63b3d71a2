"""A length of time for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 5 s", "2 h 10 min"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
