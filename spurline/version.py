"""The version of the package: between two releases, that of the next one with .dev0."""

__version__ = "0.3.0.dev0"
