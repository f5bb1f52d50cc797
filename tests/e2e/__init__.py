"""The installed command on two real nodes."""
