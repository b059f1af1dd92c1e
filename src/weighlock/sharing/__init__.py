"""The side that is dialled: shares, and the server that offers them."""
