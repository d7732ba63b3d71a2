"""Judges a program again and again while it runs, and knows what of it was said already."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from draftline.signal.judge.verdict import Verdict, judge
from draftline.signal.trace import Trace

log = logging.getLogger(__name__)

_SHARE = 0.05  # of the time that judging may take


class Monitor:
    """Judges what `trace()` gives; `judging` stands in for `judge`.

    `seen` is the trace that was judged last and `verdict` what came of it (None before the first);
    `changed` says whether that was another judgement than the one before. Times are of any one clock.
    """

    def __init__(
        self, trace: Callable[[], Trace], judging: Callable[[Trace], Verdict] | None = None
    ) -> None:
        self.seen = Trace()
        self.verdict: Verdict | None = None
        self.changed = False
        self._trace, self._judging = trace, judging
        self._looked_s, self._spent_s = -math.inf, 0.0
        self._failed = False
        self._told: set[object] = set()

    def due(self, now_s: float, every_s: float) -> bool:
        """Whether the last look is `every_s` ago, and longer where judging takes long."""
        return now_s - self._looked_s >= max(every_s, self._spent_s / _SHARE)

    def look(self, now_s: float) -> Verdict | None:
        """Judges what is known now. None where judging failed, which is said once: it must not end the
        program that it judges."""
        began_s, self._looked_s = time.monotonic(), now_s
        try:
            self.seen = self._trace()
            found = (self._judging or judge)(self.seen)
        except Exception:
            if not self._failed:
                self._failed = True
                log.warning("the program's memory cannot be judged", exc_info=True)
            return None
        self._spent_s = time.monotonic() - began_s
        self.changed = self.verdict is None or _key(found) != _key(self.verdict)
        self.verdict = found
        return found

    def is_news(self) -> bool:
        """Whether a judgement like the last one was never asked about here: a finding is said once."""
        if self.verdict is None or (key := _key(self.verdict)) in self._told:
            return False
        self._told.add(key)
        return True


def _key(verdict: Verdict) -> object:
    """What must change for a verdict to be another one; numbers move all the time."""
    return tuple((d.device, d.shape, *(c.cause for c in d.causes)) for d in verdict.devices)
