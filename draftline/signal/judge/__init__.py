"""A Trace to a verdict: phases, shapes, causes."""
