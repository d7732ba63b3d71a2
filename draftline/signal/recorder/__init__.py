"""What a running program tells of itself, and the driver of its devices."""
