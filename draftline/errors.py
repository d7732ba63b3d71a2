"""The exception tree. A user's fault exits with 2, a fault of the run with 1."""

from __future__ import annotations


class DraftlineError(Exception):
    """Root of every error that draftline raises on purpose.

    The message says what failed, the value seen and the value needed, the likely cause, and what to
    do next. `exit_code` is what the command line exits with.
    """

    exit_code = 1


class UserError(DraftlineError):
    """Something the caller can mend: a path, a key, a file, a flag."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key, value or combination that cannot be run."""


class DataError(UserError):
    """Conversation files from which nothing can be trained or evaluated."""


class TargetError(UserError):
    """A target model that cannot be loaded, tapped or drafted for."""


class ResumeError(UserError):
    """A run directory that cannot be continued as asked."""


class CheckpointError(DraftlineError):
    """A checkpoint that is damaged, incomplete or cannot be written."""


class DeviceError(UserError):
    """A device that is missing or too small for what was asked."""


class CompileError(DraftlineError):
    """A compile, recompile or uncompiled kernel where none may happen."""


class RunError(DraftlineError):
    """A run that cannot go on: a non-finite loss, a dead worker."""


class FallbackError(DraftlineError):
    """A fallback in a mode that allows none."""


class ParityError(DraftlineError):
    """An exported drafter that does not compute what the trained one computes."""
