"""What builds the site; `python docs/build.py` is all there is to know to use it."""
