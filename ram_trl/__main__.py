"""`python -m ram_trl` is `ram-trl`."""

from .cli import main


main()
