"""`python -m bundler` is `bundle`."""

from bundler.cli import main

main()
