"""`python -m baton`: the `baton` command."""

from baton import main

main()
