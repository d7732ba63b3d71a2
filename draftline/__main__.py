"""`python -m draftline`."""

from draftline.cli.main import main

main()
