"""Access control of programs that listen: keys, roles and the door that checks them."""
