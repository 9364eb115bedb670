"""Tasks and rewards shipped with rlx, registered by entry points like any other plugin."""
