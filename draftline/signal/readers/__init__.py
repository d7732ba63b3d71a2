"""Files of any kind to a Trace."""
