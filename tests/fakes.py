"""The tiny targets, by the name under which reproductions of reported faults import them."""

from support.fakes import *  # noqa: F403
