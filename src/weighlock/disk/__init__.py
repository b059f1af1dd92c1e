"""WHERE bytes are put: files that appear whole or not at all."""
