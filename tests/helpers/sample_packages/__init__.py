"""Small model packages: whole, mutated, cut off while they are written; and keys to sign them."""
