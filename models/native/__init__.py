"""Decodes on a CPU in C: decode.c, its compilation where PageTurn runs (library.py), its use (decoder.py)."""
