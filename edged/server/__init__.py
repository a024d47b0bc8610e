"""The gRPC faces of the daemon: inference, control, health and reflection."""

import os

# Before gRPC is imported: what its core would print on its own is said by our errors, as log lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
