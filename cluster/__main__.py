"""`python -m cluster`: the same as `cidery`."""

from cluster.cli import main

main(prog_name="cidery")
