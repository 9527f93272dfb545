"""``python -m lightning_remat`` is the command ``lightning-remat``."""

from lightning_remat.cli import app

if __name__ == "__main__":
    # Otherwise usage lines would name this file.
    app(prog_name="lightning-remat")
