"""The side that dials: fetching, streaming, and what to ask for next."""
