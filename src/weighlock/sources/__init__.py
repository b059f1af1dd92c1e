"""WHERE bytes are read: anything readable at any offset from any thread."""
