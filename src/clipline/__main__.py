"""`python -m clipline` is `clipline`."""

from .cli import main

main()
