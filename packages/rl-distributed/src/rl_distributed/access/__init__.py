"""Who may ask what of a program that listens: keys, roles and the door they open."""
