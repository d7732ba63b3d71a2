"""Watching a run, a process or a command while it goes on."""
