"""`python -m draftline`."""

from draftline.cli import main

main()
