"""A page that shows 16 bit and checkpoints side by side; see README.md."""
