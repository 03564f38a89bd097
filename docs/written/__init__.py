"""Pages that are written from the source; `docs/build.py` writes them."""
