"""Bytes ⇄ catalog: one module per format, and one that tells which format bytes are in."""
