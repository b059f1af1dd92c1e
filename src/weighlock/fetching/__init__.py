"""The side that dials: fetching, streaming, pushing, and what to ask for next."""
