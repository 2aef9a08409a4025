"""`python -m spoc_lib` is `spoc`."""

from spoc_lib.cli import main

main()
