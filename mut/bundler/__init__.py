"""Package and publish model bundles."""

__version__ = "0.1.0"
