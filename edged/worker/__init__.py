"""The engine process, which alone owns the device, and the daemon's side of it."""
