"""How many of an encoder's last layers its vectors have."""

LAYERS = 3  # earlier layers carry more of the wording
