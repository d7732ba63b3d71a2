"""Reports of a run, and two runs side by side."""
