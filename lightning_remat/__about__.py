"""The version, and nothing that needs an import: the build backend reads this file without running the package."""

__version__ = "0.1.0"
